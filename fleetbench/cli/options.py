"""Options that several commands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  # argparse has no public name for it


def add_command(commands: Commands, name: str, summary: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    """A command's parser; ``run`` takes the parsed arguments and returns the exit code."""
    parser = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    parser.set_defaults(run=run, interrupted="nothing was left over")
    return parser


def add_experiment(parser: argparse.ArgumentParser) -> None:
    """What every command takes that executes an experiment."""
    parser.add_argument("experiment", nargs="?", metavar="EXPERIMENT.toml", help="experiment file; default: the built-in quickstart")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="change a key of the file, such as workload.batch_size=64; repeatable",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the same as --set run.seed=N")
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="where run folders go; default: runs")


def add_command_line(parser: argparse.ArgumentParser) -> None:
    """Let a command follow, and the usage say so; to be called after all other options."""
    parser.add_argument("--workdir", type=Path, metavar="DIR", help="start the command in this folder; default: here")
    parser.usage = f"{parser.format_usage().removeprefix('usage: ').rstrip()} [-- COMMAND ...]".replace("%", "%%")


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """``--json``: machine-readable output and nothing else on stdout."""
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON, and nothing else")


def whole(least: int) -> Callable[[str], int]:
    """Reads a whole number of at least ``least``."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"not a whole number of at least {least}: {text}")
        return int(text)

    return read


def number(what: str, least: float) -> Callable[[str], float]:
    """Reads a finite number of at least ``least``; ``what`` says so in the error."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"not {what}: {text}")
        return value

    return read
