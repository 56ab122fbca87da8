"""``fleetbench profile --collectives``: times the collectives themselves, in the columns of nccl-tests."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetbench.cli import progress
from fleetbench.cli.output import emit, emit_table, new_table, say
from fleetbench.errors import ConfigError, EnvironmentLacks, GateFailed
from fleetbench.report import units

if TYPE_CHECKING:
    from rich.table import Table

    from fleetbench.experiment import Experiment
    from real.collective_bench_run import CollectiveReport
    from real.collectives.bench import Benchmark, Row

_LISTS = (
    ("kinds", "all_reduce, reduce, broadcast, reduce_scatter, all_gather; default: all"),
    ("types", "float32, float16, bfloat16; default: float32"),
)
_SIZES = (("min_bytes", "smallest size; default: 1 KiB"), ("max_bytes", "largest size; default: 4 MiB"))
_NUMBERS = (
    ("factor", "from one size to the next; default: 4"),
    ("warmup", "iterations before each row that do not count; default: 5"),
    ("iterations", "iterations of each row; default: 20"),
    ("communicators", "collectives in flight at once, each on a communicator of its own; default: 1"),
)


_UNITS = dict.fromkeys(("time", "min", "max", "p99"), "us") | {
    "size": "B",
    "count": "elements",
    "algbw": "GB/s",
    "busbw": "GB/s",
    "cv": "%",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what is timed; every default is the benchmark's own."""
    group = parser.add_argument_group("with --collectives")
    for name, text in _LISTS:
        group.add_argument(_option(name), metavar="A,B", help=text)
    for name, text in _SIZES:
        group.add_argument(_option(name), metavar="SIZE", help=text)
    for name, text in _NUMBERS:
        group.add_argument(_option(name), type=int, metavar="N", help=text)


def run(arguments: argparse.Namespace, experiment: Experiment) -> int:
    """Time collectives among the experiment's trainers; print the tables, and write the JSON beside the runs.

    Raises ``ConfigError`` for sizes, types and such that cannot be timed, and ``GateFailed``, after
    the tables, for results that are wrong.
    """
    benchmark = benchmark_of(arguments)
    from fleetbench.measurements import is_busy
    from real.collective_bench_run import measure_collectives

    with progress.steps("collectives") as advance:
        report = measure_collectives(experiment, benchmark, progress=advance)
    if is_busy(report.foreign_cores):
        busy = f"measured on a busy machine: other programs computed on {report.foreign_cores:.2g} cores"
        say(f"warning: {busy}; measure again when it is quiet")
    data = report.to_dict()
    path = _write(data, arguments.out / "collectives")
    if arguments.json:
        emit(json.dumps(data, indent=1))
        say(f"collectives: {path}")
    else:
        _print(report)
        emit(f"collectives: {path}")
    if report.num_wrong:
        hint = "the sums of a training would be wrong as well: try another torch, backend or device"
        raise GateFailed("collectives gave wrong results", "#wrong", f"{report.num_wrong} elements", hint)
    return 0


def benchmark_of(arguments: argparse.Namespace) -> Benchmark:
    """What the options ask for. Raises ``ConfigError`` that names the option."""
    from real.collectives.bench import Benchmark

    given: dict[str, Any] = {}
    for name, _ in _LISTS:
        text = getattr(arguments, name)
        if text is not None:
            given[name] = tuple(part.strip() for part in text.split(",") if part.strip())
    for name, _ in _SIZES:
        text = getattr(arguments, name)
        if text is not None:
            given[name] = _size(text, _option(name))
    given |= {name: getattr(arguments, name) for name, _ in _NUMBERS if getattr(arguments, name) is not None}
    try:
        return Benchmark(**given)
    except ConfigError as error:
        field, bracket, rest = (error.where or "").partition("[")
        raise ConfigError(error.what, _option(field) + bracket + rest, error.value, error.hint) from None


def _size(text: str, option: str) -> int:
    """``"64 KiB"``, or a bare number of bytes."""
    from fleetbench.quantities import parse_size

    if text.isascii() and text.isdigit():
        return int(text)
    try:
        return parse_size(text)
    except ConfigError as error:
        hint = "write 4096, or '64 KiB' (1024 bytes each), or '64 kB' (1000 bytes each)"
        raise ConfigError(error.what, option, error.value, hint) from None


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def _print(report: CollectiveReport) -> None:
    for name in report.benchmark.kinds:
        emit_table(collectives_table(name, report))
    emit(f"wrong results: {report.num_wrong} elements")
    for entry in report.skipped:
        emit(f"SKIPPED {entry['what']}: {entry['why']}")


def _write(data: dict[str, Any], folder: Path) -> Path:
    from fleetbench.store import new_run_id

    path = folder / f"{data['name']}-{data['experiment']}-{new_run_id()}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1), encoding="utf-8")
    except OSError as error:
        raise EnvironmentLacks(f"cannot be written: {error.strerror}", str(path), hint="choose another folder by --out") from None
    return path


def collectives_table(name: str, report: CollectiveReport) -> Table:
    """One collective's rows, with the columns of nccl-tests."""
    from real.collectives.bench import COLUMNS

    run, benchmark = report.experiment.run, report.benchmark
    flights = "" if benchmark.communicators == 1 else f", {benchmark.communicators} in flight at once"
    title = f"{name}: {report.experiment.cluster.trainers} ranks, {run.backend}, launcher {run.launcher}{flights}"
    columns = {column: f"{column}\n({_UNITS[column]})" if column in _UNITS else f"{column}\n " for column in COLUMNS}
    table = new_table(title, *columns.values(), left=(columns["type"], columns["redop"]))
    for row in report.rows:
        if row.case.collective == name:
            table.add_row(*_collective_cells(row))
    return table


def _collective_cells(row: Row) -> list[str]:
    case, time_s = row.case, row.time_s
    bandwidths = (case.algbw(time_s, row.communicators), case.busbw(time_s, row.communicators))
    return [
        str(case.size_bytes),
        str(case.count),
        case.type,
        case.redop,
        _microseconds(time_s),
        *(f"{bandwidth * 1e-9:.4g}" for bandwidth in bandwidths),
        str(row.num_wrong),
        *(_microseconds(value_s) for value_s in (min(row.samples_s), max(row.samples_s), row.p99_s)),
        units.NONE if row.cv is None else f"{100 * row.cv:.1f}",
    ]


def _microseconds(value_s: float) -> str:
    """With the decimals of nccl-tests: none from 10 ms on, one from 100 us on, else two."""
    value_us = value_s * 1e6
    return f"{value_us:.{0 if value_us >= 10_000 else 1 if value_us >= 100 else 2}f}"
