"""Survey: build an experiment's testbed, measure every link and gloo's all-reduces on it, and take it down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fleetbench.cluster import Cluster
from fleetbench.errors import ConfigError
from real.testbed.ceilings import require_carried
from real.testbed.collectives import SIZES, Ranks
from real.testbed.fit import Fit, fit, wire_s
from real.testbed.ground import Testbed
from real.testbed.topology import num_hosts
from real.testbed.trial import Trial, quietly
from real.testbed.verify import LinkRate

_STAGES = 4
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """One size of all-reduce among all hosts. Times in seconds."""

    nbytes: int
    measured_s: float
    """Median."""
    closed_form_s: float
    """alpha + 2 ((P - 1) / P) S / payload rate of the slowest link, with one alpha for all sizes."""

    @property
    def error(self) -> float:
        """Measured over closed form, minus one."""
        return self.measured_s / self.closed_form_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a testbed is like."""

    hosts: int
    record: dict[str, Any]
    """What was built."""
    links: tuple[LinkRate, ...]
    fit: Fit
    all_reduces: tuple[AllReduce, ...]
    trial: Trial[dict[int, float]]
    ceiling_bps: int | None
    skipped: tuple[dict[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "schema": 1,
            **self.record,
            "ceiling_bps": self.ceiling_bps,
            "alpha_s": self.fit.alpha_s,
            "holds": self.fit.holds,
            "all_reduces": [{**asdict(entry), "error": entry.error} for entry in self.all_reduces],
            "counts": self.trial.counts,
            "void_runs": self.trial.num_void,
            "blocks": [block.to_dict() for block in self.trial.blocks],
            "skipped": list(self.skipped),
        }


def survey(cluster: Cluster, root: Path, folder: Path, *, rootless: bool | None = None, progress: Progress | None = None) -> Survey:
    """Look at the testbed of a cluster. ``root``: where calibrations are kept; ``folder``: for files while it lasts.

    Raises ``ConfigError`` for a cluster without a link, and ``EnvironmentLacks`` as the testbed does.
    """

    def done(stage: int) -> None:
        if progress is not None:
            progress(stage, _STAGES)

    require_hosts(cluster)
    with Testbed(cluster, folder, rootless=rootless) as testbed:
        done(1)
        topology = testbed.topology
        ceiling, uncalibrated = require_carried(topology, root, rootless=testbed.rootless)
        testbed.verify()
        done(2)
        with Ranks(testbed, folder) as ranks:
            ranks.open()
            done(3)
            trial = quietly(testbed, lambda: ranks.medians(topology.slowest_bps))
        found = fit(trial.value, topology.num_hosts, topology.slowest_bps)
        done(_STAGES)
        return Survey(
            hosts=topology.num_hosts,
            record=testbed.record(),
            links=tuple(testbed.links),
            fit=found,
            all_reduces=tuple(
                AllReduce(
                    nbytes=nbytes,
                    measured_s=trial.value[nbytes],
                    closed_form_s=found.alpha_s + wire_s(nbytes, topology.num_hosts, topology.slowest_bps),
                )
                for nbytes in SIZES
            ),
            trial=trial,
            ceiling_bps=ceiling.rate_bps if ceiling is not None else None,
            skipped=(*testbed.skipped(), *uncalibrated),
        )


def require_hosts(cluster: Cluster) -> int:
    """The number of hosts. Raises ``ConfigError`` for a single one, which has no link."""
    hosts = num_hosts(cluster)
    if hosts < 2:
        raise ConfigError("one host has no link to look at", "cluster.nodes", str(cluster.nodes), "set cluster.nodes = 2 or more")
    return hosts
