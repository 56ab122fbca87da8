"""``fleetbench sim``: how long will it take?"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fleetbench.cli import progress, sim_many
from fleetbench.cli.execution import load_experiment, with_profile
from fleetbench.cli.options import add_command, add_experiment, add_json
from fleetbench.cli.output import emit, say

if TYPE_CHECKING:
    from fleetbench.cli.options import Commands
    from fleetbench.experiment import Experiment

_MANY_PUSHES = 50_000
"""That take half a minute, at half a millisecond each (``reports/simulator_engines``)."""
_CROWDED = 300_000
"""Pushes times trainers or servers, whichever are more, where servers share trainers' hosts or are the more: all under way are looked at.

Chosen between two that were timed: 1,000 pushes of 100 trainers took 6 s, 3,000 of 300 trainers 57 s.
"""


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
    parser.add_argument("--table", action="store_true", help="write steps.parquet also above five million rows")
    sim_many.add_options(parser)
    parser.set_defaults(interrupted="the simulation was stopped, and no run was stored")


def run(arguments: argparse.Namespace) -> int:
    """Simulate, store the run, print its summary; or simulate several, and print what they say together."""
    if sim_many.wanted(arguments):
        return sim_many.run(arguments)
    experiment = with_profile(load_experiment(arguments), arguments.out)
    _warn_of_many(experiment)
    from fleetbench.store import save_run
    from sim.run import simulate

    with progress.steps("simulate") as advance:
        result = simulate(experiment, progress=advance, engine=arguments.engine, table=arguments.table or None)
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


def _warn_of_many(experiment: Experiment) -> None:
    """Say before a long simulation of parameter servers that it is one."""
    strategy, cluster = experiment.strategy, experiment.cluster
    pushes = cluster.trainers * cluster.servers * (experiment.workload.steps + experiment.run.warmup_steps)
    is_asynchronous = strategy.mode == "ps" and strategy.a_sync and strategy.a_sync_configs.k_steps == 0
    crowds = cluster.server_placement == "shared" or cluster.servers > cluster.trainers
    is_crowded = crowds and pushes * max(cluster.trainers, cluster.servers) > _CROWDED
    is_long = pushes > _MANY_PUSHES or is_crowded
    if is_asynchronous and is_long:
        say(f"note: up to {pushes:,} pushes, event by event, may take minutes; fewer steps tell as much of a step")
