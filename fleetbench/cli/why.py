"""``fleetbench why``: why is it slow, and what do I type? On the script as it is."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from fleetbench.cli import progress, your_script
from fleetbench.cli.options import Commands, add_command, add_command_line, add_json, number
from fleetbench.cli.output import columns, emit, say
from fleetbench.errors import ConfigError

if TYPE_CHECKING:
    from fleetbench.experiment import Experiment
    from tuner.why.explaining import Explanation

_SECONDS = 60.0


def register(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "why", "look at a training script as it is: why is it slow, and what would help?", run)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="change a key, such as run.timeout=300; repeatable",
    )
    seconds = number("a number of seconds above zero", math.ulp(0.0))
    text = f"how long to look, about, from the command's start; default: {_SECONDS:g}"
    parser.add_argument("--seconds", type=seconds, default=_SECONDS, metavar="S", help=text)
    share = number("a percentage above zero", math.ulp(0.0))
    text = "exit with 1 if more than so many per cent of a step are not compute"
    parser.add_argument("--fail-above", type=share, metavar="PERCENT", help=text)
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="where the answer's folder goes; default: runs")
    add_json(parser, "the answer")
    add_command_line(parser)
    parser.epilog = your_script.EPILOG
    parser.set_defaults(interrupted="the command was stopped", experiment=None, strategy=None, seed=None)


def run(arguments: argparse.Namespace) -> int:
    """Look, print the answer and where it is stored."""
    if not arguments.command_line:
        hint = "fleetbench why -- torchrun --nproc-per-node 2 train.py"
        raise ConfigError("needs a command that trains", "fleetbench why", hint=hint)
    return your_script.drive_script(arguments, _explain)


def _explain(arguments: argparse.Namespace, command: tuple[str, ...], base: Experiment) -> int:
    from tuner.why.explaining import explain

    with (
        your_script.telling((arguments.workdir or Path()).resolve(), arguments.out),
        progress.stages(lines=True) as advance,
    ):
        found = explain(command, base.run, seconds=arguments.seconds, workdir=arguments.workdir, progress=advance)
    return show(found, arguments)


def show(found: Explanation, arguments: argparse.Namespace) -> int:
    """Print an answer; 1 if more of a step than ``--fail-above`` is not compute."""
    from fleetbench.report.why import text_of

    emit(json.dumps(dataclasses.asdict(found), indent=1) if arguments.json else text_of(found, columns()))
    wasted = 100 * (1 - found.shares.compute_s / found.shares.step_s)
    if arguments.fail_above is not None and wasted > arguments.fail_above:
        say(f"{wasted:.0f} % of a step are not compute, more than --fail-above {arguments.fail_above:g}")
        return 1
    return 0
