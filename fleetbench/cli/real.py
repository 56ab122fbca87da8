"""``fleetbench real``: how long does an experiment take on real processes?"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from fleetbench.cli import progress
from fleetbench.cli.options import Commands, add_command, add_experiment, add_json, add_strategy, load_experiment, with_profile
from fleetbench.cli.output import emit, say
from fleetbench.cli.your_script import REGISTRY_SCRIPT
from fleetbench.errors import ConfigError

if TYPE_CHECKING:
    from fleetbench.experiment import Experiment
    from fleetbench.result import Summary


def register(commands: Commands) -> None:
    """Add the command's parser."""
    parser = add_command(commands, "real", "run an experiment on real processes: how long does it take?", run)
    add_experiment(parser)
    add_strategy(parser)
    add_json(parser, "the run's summary.json")
    parser.set_defaults(interrupted="the workers were stopped, and no run was stored")


def run(arguments: argparse.Namespace) -> int:
    """Measure, store the run, and print its summary next to the simulator's prediction."""
    from real.processes.roles import role_of

    if (num := role_of(os.environ).trainers) > 1:
        hint = f"start it once; torchrun -m {REGISTRY_SCRIPT} EXPERIMENT.toml trains, and fleetbench tune can drive from inside"
        raise ConfigError("starts its trainers itself, on this machine", "fleetbench real", f"{num} processes", hint)
    experiment = load_experiment(arguments)
    from fleetbench.store import save_run
    from fleetbench.workload import LAYERS
    from real.job.session import measure
    from real.supported import refuse_unsupported

    if experiment.workload.model != LAYERS:  # before the profile, which takes a minute
        refuse_unsupported(experiment, experiment.strategy)
    experiment = with_profile(experiment, arguments.out, simulates=False)

    with progress.steps("measure") as advance:
        result = measure(experiment, progress=advance)
    result = save_run(result, arguments.out)
    if result.summary.busy:
        say(f"warning: {result.summary.busy}")
    if arguments.json:
        emit(result.summary.to_json())
        say(f"run: {result.path}")
        return 0
    from fleetbench.cli import tables

    simulated = _simulated(experiment)
    beside = {} if simulated is None else {"simulated": simulated}
    tables.print_runs(beside | {"real": result.summary}, result.experiment)
    if result.testbed is not None:
        from fleetbench.cli.testbed import run_lines

        for line in run_lines(result.testbed):
            emit(line)
    emit(f"run: {result.path}")
    return 0


def _simulated(experiment: Experiment) -> Summary | None:
    """Return the summary of a simulation of the experiment; None, with a note, if it cannot be simulated."""
    from sim.run import simulate

    try:
        with progress.steps("simulate") as advance:
            return simulate(experiment, progress=advance, timeline=False).summary
    except ConfigError as error:
        say(f"note: SKIPPED the simulated column: {error}")
        return None
