"""Ceilings: how fast a link this machine carries, as it was calibrated, and the refusal of what is faster."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fleetbench.errors import ConfigError, EnvironmentLacks
from fleetbench.quantities import format_bandwidth
from fleetbench.result import skip
from fleetbench.store import machine
from real.testbed.topology import Topology

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
    path.write_text(json.dumps(ceiling.to_dict(), indent=1), encoding="utf-8")
    return path


def load(root: Path, hosts: int, *, rootless: bool) -> Ceiling | None:
    """The ceiling that was kept below ``root`` for this machine and number of hosts; none where there is none."""
    path = _path(root, hosts, rootless=rootless)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != _SCHEMA:
            return None
        return Ceiling(**{**data, "points": tuple(Point(**{**point, "blocks": tuple(point["blocks"])}) for point in data["points"])})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"not a ceiling: {error}", str(path), hint="remove it, and run `fleetbench testbed --calibrate`") from None


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
