"""``fleetbench profile --collectives``: times the collectives themselves, in the columns of nccl-tests."""

from __future__ import annotations

import argparse
import dataclasses
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fleetbench.cli import progress
from fleetbench.cli.output import emit, emit_table, new_table, say
from fleetbench.errors import ConfigError, GateFailed
from fleetbench.report import units

if TYPE_CHECKING:
    from rich.table import Table

    from fleetbench.experiment import Experiment
    from real.communication.benchmark import Benchmark

SCHEMA = 2
_OPTIONS = (
    ("kinds", "A,B", "all_reduce, reduce, broadcast, reduce_scatter, all_gather; default: all"),
    ("min_bytes", "SIZE", "smallest size; default: 1 KiB"),
    ("max_bytes", "SIZE", "largest size; default: 4 MiB"),
    ("factor", "N", "from one size to the next; default: 4"),
    ("warmup", "N", "iterations before each row that do not count; default: 5"),
    ("iterations", "N", "iterations of each row; default: 20"),
)
"""Fields of ``Benchmark``, which has the defaults."""
_COLUMNS = {
    "size": ("B", "size_bytes"),
    "count": ("elements", "count"),
    "time": ("us", "time_us"),
    "algbw": ("GB/s", "algbw_gb_per_s"),
    "busbw": ("GB/s", "busbw_gb_per_s"),
    "#wrong": ("", "num_wrong"),
    "min": ("us", "min_us"),
    "max": ("us", "max_us"),
    "p99": ("us", "p99_us"),
    "cv": ("%", "cv"),
}
"""Of the printed table: nccl-tests' names, each with its unit and the key of a row."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what is timed."""
    group = parser.add_argument_group("with --collectives")
    for name, metavar, text in _OPTIONS:
        group.add_argument(_option(name), type=int if metavar == "N" else str, metavar=metavar, help=text)


def run(arguments: argparse.Namespace, experiment: Experiment) -> int:
    """Time collectives among the experiment's trainers; print the tables, or the JSON with every iteration.

    Raises ``ConfigError`` for sizes and such that cannot be timed, and ``GateFailed``, after
    the tables, for results that are wrong.
    """
    benchmark = benchmark_of(arguments)
    from fleetbench.measurements import is_busy

    data = _measured(experiment, benchmark)
    if is_busy(data["foreign_cores"]):
        busy = f"measured on a busy machine: other programs computed on {data['foreign_cores']:.2g} cores"
        say(f"warning: {busy}; measure again when it is quiet")
    if arguments.json:
        emit(json.dumps(data, indent=1))
    else:
        for name in benchmark.kinds:
            emit_table(_table(name, data))
        emit(f"wrong results: {data['num_wrong']} elements")
        for entry in data["skipped"]:
            emit(f"SKIPPED {entry['what']}: {entry['why']}")
    if data["num_wrong"]:
        hint = "the sums of a training would be wrong as well: try another torch, backend or device"
        raise GateFailed("collectives gave wrong results", "#wrong", f"{data['num_wrong']} elements", hint)
    return 0


def benchmark_of(arguments: argparse.Namespace) -> Benchmark:
    """What the options ask for. Raises ``ConfigError`` that names the option."""
    from fleetbench.config import decode
    from real.communication.benchmark import Benchmark

    given: dict[str, Any] = {}
    for name, metavar, _ in _OPTIONS:
        value = getattr(arguments, name)
        if value is not None and metavar == "A,B":
            given[name] = [part.strip() for part in value.split(",") if part.strip()]
        elif value is not None:
            given[name] = f"{value} B" if metavar == "SIZE" and value.isdigit() else value
    try:
        return decode(given, Benchmark, "")
    except ConfigError as error:
        field, bracket, rest = (error.where or "").partition("[")
        raise ConfigError(error.what, _option(field) + bracket + rest, error.value, error.hint) from None


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def _measured(experiment: Experiment, benchmark: Benchmark) -> dict[str, Any]:
    """Time collectives in one launch of the experiment's trainers, on its launcher, backend and device, as JSON's data.

    Model, strategy and stragglers do not count; an emulated device moves the same bytes as a CPU. Raises ``ConfigError`` for what cannot be
    executed, ``WorkerFailed`` naming the rank.
    """
    from fleetbench.config import encode
    from fleetbench.store import machine, versions
    from fleetbench.strategy import DistributedStrategy
    from fleetbench.workload import Workload
    from real.communication.benchmark import row_of
    from real.job.session import Session

    run, trainers = experiment.run, experiment.cluster.trainers
    if run.device == "emulated":
        run = dataclasses.replace(run, device="cpu")
    quiet = experiment.replace(
        workload=Workload(batch_size=1, steps=1),
        strategy=DistributedStrategy(),
        cluster=dataclasses.replace(experiment.cluster, stragglers=(), servers=0, server_placement="own"),
        run=run,
    )
    with progress.steps("collectives") as advance, Session(quiet) as session:
        measured = session.run_collectives(benchmark, advance)
    rows = [row_of(case, parts) for case, parts in zip(benchmark.cases(trainers), zip(*measured.ranks, strict=True), strict=True)]
    return {
        "schema": SCHEMA,
        "name": experiment.name,
        "experiment": experiment.digest(),
        "created": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
        "launcher": run.launcher,
        "backend": run.backend,
        "device": run.device,
        "trainers": trainers,
        "nodes": experiment.cluster.nodes,
        "host": machine(),
        "versions": versions(),
        "benchmark": encode(benchmark),
        "time": "mean over the iterations of the rank with the largest mean; min, max, p99 and cv over that rank's iterations",
        "num_wrong": sum(row["num_wrong"] for row in rows),
        "skipped": measured.skipped,
        "testbed": measured.testbed,
        "foreign_cores": session.foreign_cores,
        "rows": rows,
    }


def _table(name: str, data: dict[str, Any]) -> Table:
    """One collective's rows, with the columns of nccl-tests."""
    title = f"{name}: {data['trainers']} ranks, {data['backend']}, launcher {data['launcher']}"
    columns = {column: f"{column}\n({unit})" if unit else f"{column}\n " for column, (unit, _) in _COLUMNS.items()}
    table = new_table(title, *columns.values())
    for row in data["rows"]:
        if row["collective"] == name:
            table.add_row(*(_cell(unit, row[key]) for unit, key in _COLUMNS.values()))
    return table


def _cell(unit: str, value: Any) -> str:
    """A row's value as nccl-tests prints it; microseconds have no decimal from 10 ms on, one from 100 us on, else two."""
    if value is None:
        return units.NONE
    if unit == "us":
        return f"{value:.{0 if value >= 10_000 else 1 if value >= 100 else 2}f}"
    return f"{value:.4g}" if unit == "GB/s" else f"{100 * value:.1f}" if unit == "%" else str(value)
