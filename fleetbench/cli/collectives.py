"""``fleetbench profile --collectives``: times the collectives themselves, in the columns of nccl-tests."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetbench.cli import progress
from fleetbench.cli.output import emit, emit_table, say
from fleetbench.errors import ConfigError, EnvironmentLacks, GateFailed

if TYPE_CHECKING:
    from fleetbench.experiment import Experiment
    from real.collective_bench_run import CollectiveReport
    from real.collectives.bench import Benchmark

_LISTS = (
    ("kinds", "all_reduce, reduce, broadcast, reduce_scatter, all_gather; default: all"),
    ("types", "float32, float16, bfloat16, int32; default: float32"),
    ("redops", "sum, avg, max; default: sum"),
)
_SIZES = (("min_bytes", "smallest size; default: 1 KiB"), ("max_bytes", "largest size; default: 4 MiB"))
_NUMBERS = (
    ("factor", "from one size to the next; default: 4"),
    ("warmup", "iterations before each row that do not count; default: 5"),
    ("iterations", "iterations of each row; default: 20"),
    ("communicators", "collectives in flight at once, each on a communicator of its own; default: 1"),
)


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

    Raises ``ConfigError`` for sizes, types and such that cannot be timed, and ``GateFailed``, behind
    the tables, for results that are wrong.
    """
    benchmark = benchmark_of(arguments)
    from fleetbench.measurements import is_busy
    from real.collective_bench_run import measure_collectives

    with progress.steps("collectives") as advance:
        report = measure_collectives(experiment, benchmark, root=arguments.out, progress=advance)
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
    from fleetbench.cli import tables

    for name in report.benchmark.kinds:
        emit_table(tables.collectives_table(name, report))
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
