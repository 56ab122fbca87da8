"""``fleetbench tune``: what should I use?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from fleetbench.cli import progress, tune_simulated, your_script
from fleetbench.cli.options import add_command, add_command_line, add_experiment, add_json, load_experiment
from fleetbench.cli.output import emit, emit_table, new_table, say
from fleetbench.report import units

if TYPE_CHECKING:
    from rich.table import Table

    from fleetbench.cli.options import Commands
    from tuner.recommendation import Recommendation


def register(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "tune", "search the simulator, check with real runs, recommend: what should I use?", run)
    add_experiment(parser)
    add_json(parser, "the recommendation")
    tune_simulated.add_options(parser)
    add_command_line(parser)
    parser.epilog = your_script.EPILOG
    parser.set_defaults(interrupted="the workers were stopped; the same command goes on after the last leg that is complete")


def run(arguments: argparse.Namespace) -> int:
    """Tune, write the report, print the verdict and where everything is. KEEP DEFAULT is success."""
    if tune_simulated.wanted(arguments):
        return tune_simulated.run(arguments)
    arguments.command_line = arguments.command_line or your_script.command_of_job(arguments)
    if arguments.command_line:
        return your_script.tune(arguments, show)
    your_script.refuse_workdir(arguments)
    experiment = load_experiment(arguments)
    say(your_script.what_runs(experiment))
    from tuner.tune import tune

    with progress.stages(lines=True) as advance:
        recommendation, folder = tune(experiment, out=arguments.out, progress=advance)
    return show(recommendation, folder, arguments)


def show(recommendation: Recommendation, folder: Path, arguments: argparse.Namespace) -> int:
    """Write a tuning's report, print the verdict and where everything is."""
    from fleetbench.config import encode
    from fleetbench.report.html import write_report

    report = write_report(folder)
    if arguments.json:
        emit(json.dumps(encode(recommendation), indent=1))
        say(f"recommendation: {folder / 'recommended.toml'}\nreport: {report}")
        return 0
    emit_table(_arms_table(recommendation))
    for arm in recommendation.arms:
        if arm.rejected is not None:
            emit(f"rejected: {arm.name}: {arm.rejected}")
    for note in recommendation.notes:
        emit(f"note: {note}")
    emit(recommendation.line)
    emit(f"recommendation: {folder / 'recommended.toml'}")
    emit(f"report: {report}")
    return 0


def _arms_table(recommendation: Recommendation) -> Table:
    """The strategies that ran for real: what the simulator said of them, and what was measured."""
    has_memory = any(arm.peak_bytes is not None for arm in recommendation.arms)
    has_void = any(arm.void_runs for arm in recommendation.arms)
    more = [name for name, shown in (("memory", has_memory), ("void legs", has_void)) if shown]
    columns = ("arm", "simulated ms", "real ms", "error", *more, "target", "strategy")
    table = new_table(f"{recommendation.name}: step times, simulated and real", *columns, left=("target", "strategy"))
    for arm in recommendation.arms:
        target = "" if arm.target is None else "reached" if arm.target.reached else "not reached"
        if arm.target is not None and len(arm.target.updates) > 1:
            target = f"{target} ({arm.target.num_reached} of {len(arm.target.updates)})"
        table.add_row(
            arm.name,
            units.milliseconds(arm.simulated_s),
            units.milliseconds(arm.real_s),
            "" if arm.error is None else units.percent(arm.error, sign=True),
            *([units.NONE if arm.peak_bytes is None else units.size(arm.peak_bytes)] if has_memory else []),
            *([str(len(arm.void_runs))] if has_void else []),
            target,
            units.changes(arm.strategy.changes()),
        )
    return table
