"""Calibrate: the highest rate at which this machine behaves as the declared links, for a number of hosts.

At a rate, stock gloo's all-reduces are compared with the closed form. The ladder is climbed until a rate
fails twice; then the gap to the last good one is halved, on a logarithmic scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from fleetbench.cluster import Cluster, Link
from fleetbench.errors import ConfigError
from fleetbench.measurements import FOREIGN_LIMIT
from fleetbench.quantities import BitsPerSecond
from real.testbed.ceilings import Ceiling, Point, this_machine
from real.testbed.collectives import Ranks
from real.testbed.fit import fit
from real.testbed.ground import Testbed
from real.testbed.noise import between
from real.testbed.trial import Trial, quietly
from real.testbed.verify import LinkOff

LADDER_BPS = tuple(rate * 10**6 for rate in (50, 100, 200, 400, 800, 1600))
_HALVINGS = 2

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
