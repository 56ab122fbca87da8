"""``fleetbench calibrate``: which parameters explain these measurements? How long is a step on more GPUs?"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
from importlib import resources
from typing import TYPE_CHECKING, Any

from fleetbench import units
from fleetbench.cli import progress
from fleetbench.cli.options import (
    Commands,
    add_command,
    add_experiment,
    add_json,
    add_on,
    load_experiment,
    number,
    whole,
    with_profile,
)
from fleetbench.cli.output import emit, emit_table, new_table, say
from fleetbench.errors import ConfigError
from fleetbench.quantities import hours_or_days

SECONDS_PER_HOUR = 3600

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.calibrate.cells import Cell
    from tuner.calibrate.fit import Calibration, Fitted
    from tuner.calibrate.larger import Larger


def register(commands: Commands) -> None:
    """Add the command's parser."""
    parser = add_command(commands, "calibrate", "fit an experiment to measured times, or forecast more GPUs from a few", run)
    add_experiment(parser)
    parser.add_argument("cells", metavar="CELLS", help="a CSV file of settings and seconds, or the output of nccl-tests")
    asked = parser.add_mutually_exclusive_group(required=True)
    text = "compute (all layer times), or a declared quantity such as cluster.inter.bandwidth; repeatable"
    asked.add_argument("--fit", action="append", metavar="KEY", help=text)
    text = "predict the step time on N GPUs, with an interval; needs no model, profile or layers"
    asked.add_argument("--gpus", metavar="N,N,...", help=text)
    text = "with --gpus: samples per step over all GPUs; default: the samples per GPU of the largest measured size"
    parser.add_argument("--global-batch", type=whole(1), metavar="N", help=text)
    positive = number("a number of at least 1", 1)
    text = "with --gpus: the model's parameters, such as 340e6, with gradients of four bytes each"
    parser.add_argument("--parameters", type=positive, metavar="N", help=text)
    text = "with --gpus: floating-point operations of one sample's forward and backward, such as 23e9"
    parser.add_argument("--flops", type=positive, metavar="N", help=text)
    add_json(parser, "parameters, intervals and errors")
    add_on(parser, "the fits of --fit without one measurement")
    parser.set_defaults(interrupted="nothing was written")


def run(arguments: argparse.Namespace) -> int:
    """Fit parameters, print them, and write the calibrated experiment; or forecast larger sizes."""
    from tuner.calibrate.cells import read_cells

    if arguments.gpus is None:
        _refuse_sizes(arguments)
    cells = read_cells(arguments.cells, lambda left_out: say(f"note: {left_out}"))
    if arguments.gpus is not None:
        return _forecast(arguments, cells)
    experiment = load_experiment(arguments)
    if any(cell.all_reduce_bytes is None for cell in cells):
        experiment = with_profile(experiment, arguments.out)
    from tuner.calibrate.fit import calibrate

    with progress.steps("calibrate") as advance:
        found = calibrate(experiment, cells, arguments.fit, advance, on=arguments.on)
    path = arguments.out / f"{experiment.name}-calibrated.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    found.save(path)
    if arguments.json:
        emit(json.dumps(_data(found, str(path)), indent=1))
    else:
        _print(found)
        emit(f"experiment: {path}")
    if not found.errors_left_out:
        say("note: as many parameters as measurements: they fit whatever was measured, without an interval and an error to expect")
    for parameter in found.parameters:
        if parameter.held:
            kept = f"it keeps its declared {_shown(parameter, parameter.declared)}"
            kept = f"{kept}; leave it out of --fit, or add cells that tell it"
            say(f"note: the cells do not identify {parameter.key}: {kept}")
        elif (parameter.low is None) != (parameter.high is None):
            side = "smaller" if parameter.low is None else "larger"
            say(f"note: the cells bound {parameter.key} on one side only: any {side} value fits as well")
    return 0


def _refuse_sizes(arguments: argparse.Namespace) -> None:
    for option in ("global_batch", "parameters", "flops"):
        if (value := getattr(arguments, option)) is not None:
            hint = "drop it, or ask for larger sizes with --gpus"
            raise ConfigError("does not go with --fit", f"--{option.replace('_', '-')}", f"{value:g}", hint)


def _forecast(arguments: argparse.Namespace, cells: Sequence[Cell]) -> int:
    from tuner.calibrate.larger import known_of, larger

    parts = arguments.gpus.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ConfigError("not numbers of GPUs", "--gpus", repr(arguments.gpus), "for example --gpus 16,32,64")
    has_model = arguments.experiment is not None
    if not has_model:  # without a model, the preset's links are those of NCCL
        arguments.experiment = str(resources.files("fleetbench").joinpath("script.toml"))
        arguments.overrides = ["run.device=cuda", "run.backend=nccl", *arguments.overrides]
    experiment = load_experiment(arguments)
    has_batch = has_model or any(text.startswith("workload.batch_size=") for text in arguments.overrides)
    known = known_of(experiment, arguments.out, arguments.parameters, arguments.flops, has_model=has_model)
    batch = experiment.workload.batch_size if has_batch else None
    found = larger(experiment, cells, [int(part) for part in parts], known, global_batch=arguments.global_batch, batch=batch)
    if arguments.json:
        emit(json.dumps(found.plain(), indent=1))
    else:
        _print_sizes(found)
    return 0


def _print_sizes(found: Larger) -> None:
    from tuner.calibrate.larger import verdict

    cost = [] if found.price is None else ["cost"]
    columns = ("GPUs", "batch per GPU", "step", "samples/s", "takes", *cost, "faster")
    table = new_table("one run: median and 90 % interval", *columns, left=("faster",))
    for one in found.forecasts:
        size, spent = one.size, found.cost(one)
        table.add_row(
            f"{size.nodes} x {size.gpus_per_node}",
            f"{size.local_batch:g}",
            _triple([units.seconds(value) for value in one.step_s]),
            f"{one.samples_per_s[1]:,.4g}",
            units.seconds(took) if (took := found.seconds(one)[1]) < SECONDS_PER_HOUR else hours_or_days(took / SECONDS_PER_HOUR),
            *([] if spent is None else [_triple([f"{money:,.2f}" for money in spent])]),
            "measured" if size in found.measured else verdict(one),
        )
    emit_table(table)
    emit(f"takes{' and cost' if cost else ''}: for {found.samples:,.6g} samples (tune.samples)")
    emit("faster: the probability of more samples/s than the fastest measured size")
    emit(f"spread from run to run: {units.percent(found.forecasts[0].run_to_run)}")
    table = new_table("what the law assumes", "", "from", "median", "90 % interval", left=("from", "90 % interval"))
    for row in found.parameters:
        table.add_row(row["words"], row["from"], f"{row['median']:.3g}", f"{row['low']:.3g} to {row['high']:.3g}")
    emit_table(table)
    names = {"gradient_bytes": "bytes of the gradients", "inside": "bytes/s and GPU inside a node"}
    names |= {"between": "bytes/s and node between nodes", "work_s": "seconds of work per sample (estimated)"}
    given = [f"{value:.4g} {names[name]}" for name, value in dataclasses.asdict(found.known).items() if value and name in names]
    emit(f"declared: {', '.join(given) or 'nothing'}")


def _triple(texts: Sequence[str]) -> str:
    low, median, high = texts
    return f"{median} [{low}, {high}]"


def _print(found: Calibration) -> None:
    table = new_table(f"parameters, of {len(found.cells)} measurements", "", "declared", "fitted", "95 % interval", left=("95 % interval",))
    for parameter in found.parameters:
        low, high = (None if end is None else _shown(parameter, end) for end in (parameter.low, parameter.high))
        fitted = "not identified" if parameter.held else _shown(parameter, parameter.value)
        interval = f"{low} to {high}" if low and high else f"at least {low}" if low else f"at most {high}" if high else "any"
        interval = interval if found.errors_left_out else "not known"
        table.add_row(parameter.key, _shown(parameter, parameter.declared), fitted, interval)
    emit_table(table)
    errors = new_table("simulated / measured - 1", "", "mean of absolute", "largest", "mean", "largest is of", left=("largest is of",))
    rows = (("as declared", found.errors_declared), ("calibrated", found.errors), ("each left out of the fit", found.errors_left_out))
    for name, own in rows if found.errors_left_out else rows[:2]:
        largest = max(range(len(own)), key=lambda index: abs(own[index]))
        mean = statistics.fmean(map(abs, own))
        errors.add_row(name, f"{mean:.1%}", f"{own[largest]:+.1%}", f"{statistics.fmean(own):+.1%}", found.cells[largest].name)
    emit_table(errors)


def _shown(parameter: Fitted, value: float) -> str:
    if parameter.unit == "ns":
        return units.seconds(value * 1e-9)
    if parameter.unit == "bit/s":
        return units.rate(value)
    return f"{value:.4g}"


def _data(found: Calibration, path: str) -> dict[str, Any]:
    return {
        "experiment": path,
        "parameters": [dataclasses.asdict(parameter) for parameter in found.parameters],
        "cells": [
            {"where": cell.where, "settings": dict(cell.settings), "all_reduce_bytes": cell.all_reduce_bytes, "measured_s": measured_s}
            | {"error_declared": declared, "error": error, "error_left_out": left_out}
            for cell, measured_s, declared, error, left_out in itertools.zip_longest(
                found.cells, found.measured_s, found.errors_declared, found.errors, found.errors_left_out
            )
        ],
    }
