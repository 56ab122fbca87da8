"""Measure collectives: one launch of the experiment's trainers that trains nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psutil

from fleetbench.config import encode
from fleetbench.errors import EnvironmentLacks
from fleetbench.experiment import Experiment
from fleetbench.store import machine, versions
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import Workload
from real.collectives.bench import NUM_BUFFERS, Benchmark, Row
from real.session import Session

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveReport:
    """A benchmark's rows, and what they hold for."""

    experiment: Experiment
    """Of which the cluster, the launcher, the backend and the device count here."""
    benchmark: Benchmark
    rows: tuple[Row, ...]
    skipped: tuple[dict[str, str], ...]
    """Lines of the experiment that the launch did not realise."""
    testbed: dict[str, Any] | None = None
    """Links as verified and blocks as watched, of a launch on the testbed."""
    foreign_cores: float | None = None
    """Cores that other programs computed on in the meantime, on average; none where it was not measured."""

    @property
    def num_wrong(self) -> int:
        """Elements of all results that are wrong."""
        return sum(row.num_wrong for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON's data."""
        run = self.experiment.run
        return {
            "schema": SCHEMA,
            "name": self.experiment.name,
            "experiment": self.experiment.digest(),
            "created": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
            "launcher": run.launcher,
            "backend": run.backend,
            "device": _device(run.device),
            "trainers": self.experiment.cluster.trainers,
            "nodes": self.experiment.cluster.nodes,
            "host": machine(),
            "versions": versions(),
            "benchmark": encode(self.benchmark),
            "time": "mean over the iterations of the rank with the largest mean; min, max, p99 and cv over that rank's iterations",
            "num_wrong": self.num_wrong,
            "skipped": list(self.skipped),
            "testbed": self.testbed,
            "foreign_cores": self.foreign_cores,
            "rows": [row.to_dict() for row in self.rows],
        }


def measure_collectives(
    experiment: Experiment, benchmark: Benchmark, *, progress: Callable[[int, int], None] | None = None
) -> CollectiveReport:
    """Time collectives among the experiment's trainers, on its launcher, backend and device.

    Model, strategy and stragglers do not count; an emulated device moves the same bytes as a CPU. Raises ``ConfigError`` for what cannot be
    executed, ``EnvironmentLacks`` where the buffers do not fit into memory, ``WorkerFailed`` naming
    the rank.
    """
    run = experiment.run
    quiet = experiment.replace(
        workload=Workload(batch_size=1, steps=1),
        strategy=DistributedStrategy(),
        cluster=dataclasses.replace(experiment.cluster, stragglers=(), servers=0, server_placement="own"),
        run=dataclasses.replace(run, device=_device(run.device)),
    )
    trainers = experiment.cluster.trainers
    if quiet.run.device == "cpu":
        _require_memory(benchmark, trainers)
    with Session(quiet) as session:
        measured = session.run_collectives(benchmark, progress)
    cases = zip(benchmark.cases(trainers), zip(*measured.ranks, strict=True), strict=True)
    return CollectiveReport(
        experiment=experiment,
        benchmark=benchmark,
        rows=tuple(Row.of(case, benchmark.communicators, parts) for case, parts in cases),
        skipped=tuple(measured.skipped),
        testbed=measured.testbed,
        foreign_cores=session.foreign_cores,
    )


def _device(name: str) -> Any:
    return "cpu" if name == "emulated" else name


def _require_memory(benchmark: Benchmark, trainers: int) -> None:
    """Raise ``EnvironmentLacks`` where this machine, which holds all trainers, lacks the memory for the largest size."""
    needed, free = NUM_BUFFERS * benchmark.max_bytes * benchmark.communicators * trainers, psutil.virtual_memory().available
    if needed > free:
        raise EnvironmentLacks(
            f"the buffers of {trainers} trainers do not fit into memory",
            "--max-bytes",
            f"{needed / 2**30:.1f} GiB needed, {free / 2**30:.1f} GiB free",
            "a smaller --max-bytes, or fewer --communicators",
        )
