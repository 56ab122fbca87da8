"""``fleetbench launch``: starts a training script of the user's, one process a trainer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fleetbench.cli.options import add_command
from fleetbench.cli.output import echo, emit
from fleetbench.errors import ConfigError

if TYPE_CHECKING:
    from fleetbench.cli.options import Commands


def register(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "launch", "start a training script on several processes of this machine", run)
    parser.add_argument("--nproc", type=_positive, required=True, metavar="N", help="number of trainers")
    parser.add_argument("--port", type=_port, metavar="P", help="rendezvous port; default: a file, and no port")
    parser.add_argument("--log-dir", type=Path, default=Path("log"), metavar="DIR", help="a file a rank goes here; default: log")
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its own arguments")
    parser.set_defaults(interrupted="all trainers were stopped")


def run(arguments: argparse.Namespace) -> int:
    """Print the environment, start the trainers, wait for them. Raises ``WorkerFailed`` naming the rank."""
    if not Path(arguments.script).is_file():
        raise ConfigError("no such script", arguments.script, hint="fleetbench launch --nproc 2 train.py [its arguments]")
    from fleetbench.overview import overview
    from real.launching import launch_script

    environment = {
        "trainers": arguments.nproc,
        "rendezvous": "a file" if arguments.port is None else f"127.0.0.1:{arguments.port}",
        "logs": arguments.log_dir,
        "script": arguments.script,
    }
    emit(overview(None, environment))
    script = [arguments.script, *arguments.arguments]
    launch_script(arguments.nproc, script, log_dir=arguments.log_dir, port=arguments.port, echo=echo)
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"not a whole number of at least 1: {text}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"not a port (1 to 65535): {text}")
    return int(text)
