"""What a testbed is like: are its links as declared, and do gloo's all-reduces take what their closed form says?

T = alpha + 2 ((P - 1) / P) S / (R x 1448 / 1514), with one alpha a rate.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fleetbench.cluster import Cluster
from fleetbench.errors import ConfigError, WorkerFailed
from fleetbench.experiment import Experiment, Run
from fleetbench.quantities import Bytes
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import Workload
from real.collectives.bench import Benchmark, Row
from real.session import Session
from real.testbed.topology import topology_of, wire_s

LARGE_BYTES = 1_000_000
"""Largest message that alpha is fitted to; larger ones are only checked."""
TOLERANCE = 0.03
LARGE_TOLERANCE = 0.05
# A link that was idle is up to 3 % faster for its first 2.1 MB (``commands.settling_s``): medians and warm-ups leave these out.
_BENCHMARKS = (
    Benchmark(kinds=("all_reduce",), min_bytes=Bytes(125_000), max_bytes=Bytes(LARGE_BYTES), factor=2, warmup=8, iterations=15),
    Benchmark(kinds=("all_reduce",), min_bytes=Bytes(4_000_000), max_bytes=Bytes(4_000_000), warmup=1, iterations=5),
)
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The closed form with the alpha that fits best."""

    alpha_s: float
    residuals: dict[int, float]
    """By bytes: measured over closed form, minus one."""

    @property
    def holds(self) -> bool:
        """Whether the closed form is right within 3 % up to 1 MB, and within 5 % above."""
        return all(abs(error) <= (TOLERANCE if nbytes <= LARGE_BYTES else LARGE_TOLERANCE) for nbytes, error in self.residuals.items())


def fit(times_s: Mapping[int, float], hosts: int, rate_bps: float) -> Fit:
    """Fit alpha to times by bytes; least squares of relative errors, over the messages of at most 1 MB."""
    wires = {nbytes: wire_s(nbytes, hosts, rate_bps) for nbytes in times_s}
    weights = {nbytes: time_s**-2 for nbytes, time_s in times_s.items() if nbytes <= LARGE_BYTES}
    alpha = sum(weight * (times_s[nbytes] - wires[nbytes]) for nbytes, weight in weights.items()) / sum(weights.values())
    return Fit(alpha_s=alpha, residuals={nbytes: times_s[nbytes] / (alpha + wires[nbytes]) - 1.0 for nbytes in times_s})


def survey(cluster: Cluster, progress: Progress | None = None) -> dict[str, Any]:
    """Build a cluster's testbed, measure every link, and gloo's all-reduces among a process on each node; plain data.

    Beside the testbed's record it has ``alpha_s``, ``holds``, ``skipped``, and of every size in ``all_reduces``: ``nbytes``,
    ``measured_s`` (median), ``closed_form_s``, and ``error``, the one over the other, minus one.

    Raises ``ConfigError`` for a cluster without a link between nodes, and ``EnvironmentLacks`` as the testbed does.
    """
    if cluster.nodes < 2:
        raise ConfigError("one host has no link to look at", "cluster.nodes", str(cluster.nodes), "set cluster.nodes = 2 or more")
    experiment = Experiment(
        name="testbed",
        workload=Workload(batch_size=1, steps=1),
        strategy=DistributedStrategy(mode="ps" if cluster.servers else "collective"),
        cluster=dataclasses.replace(cluster, trainers_per_node=1, stragglers=()),
        run=Run(launcher="testbed"),
    )
    rate_bps, num_stages = topology_of(cluster).slowest_bps, 1 + len(_BENCHMARKS)
    measured, times_s = [], {}
    with Session(experiment) as session:
        for done, benchmark in enumerate(_BENCHMARKS, start=1):
            if progress is not None:
                progress(done, num_stages)
            measured.append(session.run_collectives(benchmark))
            for case, parts in zip(benchmark.cases(cluster.nodes), zip(*measured[-1].ranks, strict=True), strict=True):
                row = Row.of(case, 1, parts)
                if row.num_wrong:
                    raise WorkerFailed("an all-reduce of known numbers gave a wrong sum", "testbed", f"{case.size_bytes} bytes")
                times_s[case.size_bytes] = statistics.median(row.samples_s)
    if progress is not None:
        progress(num_stages, num_stages)
    records = [part.testbed or {} for part in measured]
    found = fit(times_s, cluster.nodes, rate_bps)
    return {
        **records[-1],
        "counts": all(record["counts"] for record in records),
        "void_runs": sum(record["void_runs"] for record in records),
        "blocks": [block for record in records for block in record["blocks"]],
        "alpha_s": found.alpha_s,
        "holds": found.holds,
        "all_reduces": [
            {"nbytes": nbytes, "measured_s": time_s, "closed_form_s": time_s / (1 + error), "error": error}
            for (nbytes, time_s), error in zip(times_s.items(), found.residuals.values(), strict=True)
        ],
        "skipped": measured[-1].skipped,
    }
