"""``fleetbench calibrate``: which parameters of the experiment explain these measurements?"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
from typing import TYPE_CHECKING, Any

from fleetbench import units
from fleetbench.cli import progress
from fleetbench.cli.options import Commands, add_command, add_experiment, add_json, load_experiment, with_profile
from fleetbench.cli.output import emit, emit_table, new_table, say

if TYPE_CHECKING:
    from tuner.calibrate.fit import Calibration, Fitted


def register(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "calibrate", "fit parameters of an experiment to measured times", run)
    add_experiment(parser)
    parser.add_argument("cells", metavar="CELLS", help="a CSV file of settings and seconds, or the output of nccl-tests or osu_allreduce")
    parser.add_argument(
        "--fit",
        action="append",
        required=True,
        metavar="KEY",
        help="compute (all layer times), or a declared quantity such as cluster.inter.bandwidth; repeatable",
    )
    add_json(parser, "parameters, intervals and errors")
    parser.set_defaults(interrupted="nothing was written")


def run(arguments: argparse.Namespace) -> int:
    """Fit, print what was found, and write the calibrated experiment."""
    experiment = load_experiment(arguments)
    from tuner.calibrate.cells import read_cells

    cells = read_cells(arguments.cells, lambda left_out: say(f"note: {left_out}"))
    if any(cell.all_reduce_bytes is None for cell in cells):
        experiment = with_profile(experiment, arguments.out)
    from tuner.calibrate.fit import calibrate

    with progress.steps("calibrate") as advance:
        found = calibrate(experiment, cells, arguments.fit, advance)
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
