"""``fleetbench sim``: how long will it take?"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fleetbench.cli import progress, sim_many
from fleetbench.cli.options import add_command, add_experiment, add_json, load_experiment
from fleetbench.cli.output import emit, say

if TYPE_CHECKING:
    from fleetbench.cli.options import Commands


def register(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "sim", "simulate an experiment: how long will it take?", run)
    add_experiment(parser)
    add_json(parser, "the run's summary.json, or what several runs say,")
    parser.add_argument(
        "--engine",
        choices=("auto", "reference", "vector"),
        default="auto",
        help="who simulates: event by event, or over arrays of ranks, the same in every nanosecond; default: auto",
    )
    loss = "train virtual trainers first: final loss, time to workload.target_loss, and the K of adaptive steps"
    parser.add_argument("--loss", action="store_true", help=loss)
    parser.add_argument("--table", action="store_true", help="write steps.parquet also above five million rows")
    sim_many.add_options(parser)
    parser.set_defaults(interrupted="the simulation was stopped, and no run was stored")


def run(arguments: argparse.Namespace) -> int:
    """Simulate, store the run, print its summary; or simulate several, and print what they say together."""
    if sim_many.wanted(arguments):
        return sim_many.run(arguments)
    experiment = sim_many.with_times(load_experiment(arguments), arguments)
    from fleetbench.store import save_run
    from sim.run import simulate

    learnt = None
    if (known := sim_many.trajectories(arguments)) is not None:
        with progress.steps("train virtually") as advance:
            learnt = known.of(experiment, advance)
    with progress.steps("simulate") as advance:
        result = simulate(experiment, progress=advance, engine=arguments.engine, table=arguments.table or None, learnt=learnt)
    result = save_run(result, arguments.out)
    if arguments.json:
        emit(result.summary.to_json())
        say(f"run: {result.path}")
        return 0
    from fleetbench.cli import tables

    tables.print_runs({"simulated": result.summary}, result.experiment)
    if result.summary.engine is not None:
        emit(f"engine: {result.summary.engine}")
    emit(f"run: {result.path}")
    return 0
