"""Survey: build an experiment's testbed, measure every link and gloo's all-reduces on it, and take it down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetbench.cluster import Cluster
from fleetbench.errors import ConfigError
from real.testbed.calibration import require_carried
from real.testbed.collectives import Fit, Ranks, fit
from real.testbed.ground import Testbed
from real.testbed.noise import Trial, quietly
from real.testbed.topology import num_hosts
from real.testbed.verify import LinkRate

_STAGES = 4
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a testbed is like."""

    hosts: int
    record: dict[str, Any]
    """What was built."""
    links: tuple[LinkRate, ...]
    fit: Fit
    all_reduces: tuple[dict[str, float], ...]
    """Of every size, ``nbytes``, ``measured_s`` (median), ``closed_form_s`` and ``error``, the one over the other, minus one."""
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
            "all_reduces": list(self.all_reduces),
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
                {"nbytes": nbytes, "measured_s": took_s, "closed_form_s": took_s / (1 + error), "error": error}
                for (nbytes, took_s), error in zip(trial.value.items(), found.residuals.values(), strict=True)
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
