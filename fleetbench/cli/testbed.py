"""``fleetbench testbed``: the experiment's cluster in one box: is it as declared, and how fast may it be?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from fleetbench.cli import progress
from fleetbench.cli.execution import load_experiment
from fleetbench.cli.options import add_command, add_experiment, add_json
from fleetbench.cli.output import emit, emit_table, say

if TYPE_CHECKING:
    from fleetbench.cli.options import Commands
    from fleetbench.experiment import Experiment


def register(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "testbed", "build an experiment's cluster on this machine, and measure its links", run)
    add_experiment(parser)
    parser.add_argument("--calibrate", action="store_true", help="find the highest rate that this machine carries for as many hosts")
    add_json(parser, "the findings")
    parser.set_defaults(interrupted="the testbed was taken down")


def run(arguments: argparse.Namespace) -> int:
    """Survey the testbed, or calibrate the machine."""
    experiment = load_experiment(arguments)
    from real.processes.folders import temporary_folder

    with temporary_folder() as folder:
        look = _calibrate if arguments.calibrate else _survey
        return look(experiment, arguments.out, folder, as_json=arguments.json)


def _survey(experiment: Experiment, root: Path, folder: Path, *, as_json: bool) -> int:
    from real.testbed.survey import survey

    with progress.steps("testbed") as advance:
        found = survey(experiment.cluster, root, folder, progress=advance)
    if as_json:
        emit(json.dumps(found.to_dict(), indent=1))
        return 0
    from fleetbench.cli import testbed_tables as tables

    emit_table(tables.links_table(found))
    emit_table(tables.all_reduce_table(found))
    for line in tables.noise_lines(found):
        emit(line)
    return 0


def _calibrate(experiment: Experiment, root: Path, folder: Path, *, as_json: bool) -> int:
    from real.testbed.calibrate import calibrate
    from real.testbed.ceilings import save
    from real.testbed.survey import require_hosts

    hosts = require_hosts(experiment.cluster)
    with progress.steps("calibrate") as advance:
        ceiling = calibrate(hosts, folder, progress=advance)
    path = save(ceiling, root)
    if as_json:
        emit(json.dumps(ceiling.to_dict(), indent=1))
        say(f"ceiling: {path}")
        return 0
    from fleetbench.cli import testbed_tables as tables

    emit_table(tables.ceiling_table(ceiling))
    for line in tables.ceiling_lines(ceiling):
        emit(line)
    emit(f"ceiling: {path}")
    return 0
