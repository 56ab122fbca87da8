"""Calibration: the highest rate at which this machine behaves as the declared links, for a number of hosts; links above it are refused.

At a rate, stock gloo's all-reduces are compared with the closed form. The ladder is climbed until a rate
fails twice; then the gap to the last good one is halved, on a logarithmic scale.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fleetbench.cluster import Cluster, Link
from fleetbench.digests import reading, write_whole
from fleetbench.errors import ConfigError, EnvironmentLacks
from fleetbench.measurements import FOREIGN_LIMIT
from fleetbench.quantities import BitsPerSecond, format_bandwidth
from fleetbench.result import skip
from fleetbench.store import machine
from real.testbed.collectives import Ranks, fit
from real.testbed.ground import Testbed
from real.testbed.noise import Trial, between, quietly
from real.testbed.topology import Topology
from real.testbed.verify import LinkOff

LADDER_BPS = tuple(rate * 10**6 for rate in (50, 100, 200, 400, 800, 1600))
_HALVINGS = 2
_SCHEMA = 1
_FOLDER = "testbed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What was found at one rate."""

    rate_bps: int
    carries: bool
    why: str
    """Why it does not carry; empty where it does."""
    counts: bool = True
    """Whether the machine was quiet; a rate that failed on a busy one may be carried on a quiet one."""
    num_void: int = 0
    alpha_s: float | None = None
    residuals: dict[str, float] | None = None
    """By bytes: measured over closed form, minus one."""
    times_s: dict[str, float] | None = None
    blocks: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """The highest rate that carries, on this machine, for so many hosts."""

    hosts: int
    rootless: bool
    rate_bps: int
    """0 where not even the lowest rate that was tried carried."""
    points: tuple[Point, ...]
    machine: dict[str, Any]
    taken: str
    schema: int = _SCHEMA

    @property
    def failed_bps(self) -> int | None:
        """The lowest rate that did not carry; none where all did."""
        last = {point.rate_bps: point.carries for point in self.points}
        return min((rate for rate, carries in last.items() if not carries), default=None)

    @property
    def counts(self) -> bool:
        """Whether the machine was quiet at the lowest rate that did not carry."""
        return all(point.counts for point in self.points if point.rate_bps == self.failed_bps)

    def refuses(self, rate_bps: int) -> bool:
        """Whether links of ``rate_bps`` are known to be more than the machine carries; what was never tried is not known."""
        failed = self.failed_bps
        return failed is not None and rate_bps > self.rate_bps and (self.rate_bps > 0 or rate_bps >= failed)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def save(ceiling: Ceiling, root: Path) -> Path:
    """Keep a ceiling below ``root`` under a hash of the machine and the number of hosts."""
    path = _path(root, ceiling.hosts, rootless=ceiling.rootless)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(ceiling.to_dict(), indent=1))
    return path


def load(root: Path, hosts: int, *, rootless: bool) -> Ceiling | None:
    """The ceiling that was kept below ``root`` for this machine and number of hosts; none where there is none."""
    path = _path(root, hosts, rootless=rootless)
    if not path.exists():
        return None
    with reading(path, "remove it, and run `fleetbench testbed --calibrate`"):
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != _SCHEMA:
            return None
        return Ceiling(**{**data, "points": tuple(Point(**{**point, "blocks": tuple(point["blocks"])}) for point in data["points"])})


def require_carried(topology: Topology, root: Path, *, rootless: bool) -> tuple[Ceiling | None, list[dict[str, str]]]:
    """The known ceiling, and an entry of ``skipped`` where none is. Raises ``EnvironmentLacks`` for links above it."""
    ceiling = load(root, topology.num_hosts, rootless=rootless)
    if ceiling is None:
        why = f"not calibrated for {topology.num_hosts} hosts: only the rates of the links were checked, each and all at once"
        return None, [skip("testbed.ceiling", why)]
    rate_bps = topology.fastest_host_bps
    if ceiling.refuses(rate_bps):
        carried = f"{format_bandwidth(ceiling.rate_bps)} at most" if ceiling.rate_bps else "none of the rates that were tried"
        busy = "" if ceiling.counts else ", on a busy machine"
        raise EnvironmentLacks(
            f"this machine carries {carried} for {topology.num_hosts} hosts (calibrated {ceiling.taken}{busy})",
            "cluster.inter.bandwidth",
            format_bandwidth(rate_bps),
            "declare slower links, and scale compute along: only their ratio matters; or `fleetbench testbed --calibrate` again",
        )
    entries = []
    tried = {point.rate_bps for point in ceiling.points}
    if not min(tried) <= rate_bps <= max(tried):
        entries.append(skip("testbed.ceiling", f"{format_bandwidth(rate_bps)} are outside of what was tried to calibrate"))
    if topology.has_racks:
        entries.append(skip("testbed.ceiling", "calibrated without racks, whose links a packet crosses on top of the hosts'"))
    return ceiling, entries


def this_machine() -> dict[str, Any]:
    """What a ceiling holds for."""
    return {**machine(), "usable_cores": len(os.sched_getaffinity(0))}


def _path(root: Path, hosts: int, *, rootless: bool) -> Path:
    key = json.dumps([this_machine(), hosts, rootless], sort_keys=True)
    return root / _FOLDER / f"ceiling-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


Probe = Callable[[int], Point]
Progress = Callable[[int, int], None]


def climb(probe: Probe, ladder: Sequence[int] = LADDER_BPS, halvings: int = _HALVINGS, progress: Progress | None = None) -> list[Point]:
    """Probe rates as the module says; every point in the order taken."""
    points: list[Point] = []
    total = len(ladder) + halvings

    def carries(rate: int) -> bool:
        points.append(probe(rate))
        if not points[-1].carries:
            points.append(probe(rate))
        if progress is not None:
            progress(min(len({point.rate_bps for point in points}), total), total)
        return points[-1].carries

    good, bad = 0, 0
    for rate in ladder:
        if not carries(rate):
            bad = rate
            break
        good = rate
    if good and bad:
        for _ in range(halvings):
            middle = round(math.sqrt(good * bad), -6)
            if carries(int(middle)):
                good = int(middle)
            else:
                bad = int(middle)
    if progress is not None:
        progress(total, total)
    return points


def highest(points: Sequence[Point]) -> int:
    """The highest rate that carried, below every one that did not."""
    last = {point.rate_bps: point.carries for point in points}
    lowest_bad = min((rate for rate, carries in last.items() if not carries), default=math.inf)
    return max((rate for rate, carries in last.items() if carries and rate < lowest_bad), default=0)


def calibrate(hosts: int, folder: Path, *, rootless: bool | None = None, progress: Progress | None = None) -> Ceiling:
    """Find the ceiling for ``hosts``; takes one to two minutes. ``folder``: for files while it lasts."""
    if hosts < 2:
        raise ConfigError("one host has no link", "cluster.nodes", str(hosts), "set cluster.nodes = 2 or more")
    cluster = Cluster(nodes=hosts, inter=Link(bandwidth=BitsPerSecond(LADDER_BPS[0])))
    with Testbed(cluster, folder, rootless=rootless) as testbed, Ranks(testbed, folder) as ranks:
        points = climb(lambda rate: _probe(testbed, ranks, rate), progress=progress)
        return Ceiling(
            hosts=hosts,
            rootless=testbed.rootless,
            rate_bps=highest(points),
            points=tuple(points),
            machine=this_machine(),
            taken=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        )


def _probe(testbed: Testbed, ranks: Ranks, rate_bps: int) -> Point:
    testbed.reshape(rate_bps)
    before = testbed.read()
    try:
        testbed.verify()
    except LinkOff as error:
        quiet = between(before, testbed.read()).foreign_cores <= FOREIGN_LIMIT
        return Point(rate_bps=rate_bps, carries=False, why=error.what, counts=quiet)
    ranks.open()
    trial: Trial[dict[int, float]] = quietly(testbed, lambda: ranks.medians(rate_bps))
    found = fit(trial.value, testbed.topology.num_hosts, rate_bps)
    worst = max(found.residuals, key=lambda nbytes: abs(found.residuals[nbytes]))
    why = "" if found.holds else f"all-reduces of {worst} bytes are off the linear model by {100 * found.residuals[worst]:+.1f} %"
    return Point(
        rate_bps=rate_bps,
        carries=found.holds,
        why=why,
        counts=trial.counts,
        num_void=trial.num_void,
        alpha_s=found.alpha_s,
        residuals={str(nbytes): error for nbytes, error in found.residuals.items()},
        times_s={str(nbytes): time_s for nbytes, time_s in trial.value.items()},
        blocks=tuple(block.to_dict() for block in trial.blocks),
    )
