"""Options that several commands share, and loading of the experiment with its profile."""

from __future__ import annotations

import argparse
import functools
import math
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fleetbench.cli import progress
from fleetbench.cli.output import say
from fleetbench.errors import EnvironmentLacks

if TYPE_CHECKING:
    from fleetbench.experiment import Experiment

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001  # argparse has no public name for it


UNDISTURBED = "cluster.churn is left out here: fleetbench sim, and tune --simulate-only without --sweep, simulate it"


def add_command(commands: Commands, name: str, summary: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    """Add a command's parser; ``run`` takes the parsed arguments and returns the exit code."""
    parser = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    parser.set_defaults(run=run, interrupted="nothing was left over")
    return parser


def add_experiment(parser: argparse.ArgumentParser) -> None:
    """Add the options that all commands with an experiment share."""
    parser.add_argument("experiment", nargs="?", metavar="EXPERIMENT.toml", help="experiment file; default: the built-in quickstart")
    add_overrides(parser, "of the file, such as workload.batch_size=64")
    parser.add_argument("--seed", type=int, metavar="N", help="the same as --set run.seed=N")
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="where run folders go; default: runs")
    parser.set_defaults(strategy=None)


def add_overrides(parser: argparse.ArgumentParser, which: str) -> None:
    """Add ``--set KEY=VALUE``; ``which`` describes the keys, with an example."""
    text = f"change a key {which}; repeatable"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=text)


def add_strategy(parser: argparse.ArgumentParser) -> None:
    """Add ``--strategy``, for a command that runs or simulates the experiment's strategy."""
    parser.add_argument("--strategy", type=Path, metavar="FILE", help="a file such as recommended.toml, in place of the experiment's own")


def add_on(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--on``; ``what`` says what runs there."""
    text = f"where {what} run: on this machine's cores, or on Ray, the cluster of RAY_ADDRESS or one started here; default: local"
    parser.add_argument("--on", choices=("local", "ray"), default="local", help=text)


def add_command_line(parser: argparse.ArgumentParser) -> None:
    """Add a trailing command and the folder that it starts in; call it after adding all other options."""
    parser.add_argument("--workdir", type=Path, metavar="DIR", help="start the command in this folder; default: here")
    show_command(parser)


def show_command(parser: argparse.ArgumentParser) -> None:
    """Add a trailing command to the usage text; call it after adding all options."""
    parser.usage = f"{parser.format_usage().removeprefix('usage: ').rstrip()} [-- COMMAND ...]".replace("%", "%%")


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--json``, which prints ``what`` as JSON, and nothing else, on stdout."""
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON, and nothing else")


def whole(least: int) -> Callable[[str], int]:
    """Return a parser for whole numbers of at least ``least``."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"not a whole number of at least {least}: {text}")
        return int(text)

    return read


def number(what: str, least: float) -> Callable[[str], float]:
    """Return a parser for finite numbers of at least ``least``; ``what`` describes them in the error."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"not {what}: {text}")
        return value

    return read


def load_experiment(arguments: argparse.Namespace) -> Experiment:
    """Load the experiment that the command line names, with its overrides; notes go to stderr.

    Raises ``ConfigError`` for a wrong file or override, and ``EnvironmentLacks`` if ``--out`` is not
    writable, before anything has run.
    """
    experiment, notes = load_with_notes(arguments)
    for text in notes:
        say(f"note: {text}")
    check_writable(arguments.out)
    return experiment


def load_with_notes(arguments: argparse.Namespace, more: Sequence[str] = ()) -> tuple[Experiment, list[str]]:
    """Load the experiment with ``more`` overrides after those of the command line, and return notes about it.

    ``more`` is a point of a sweep, which leaves ``cluster.churn`` out.
    """
    from fleetbench.experiment import Experiment
    from fleetbench.fleet_names import FieldHasNoEffect
    from fleetbench.hardware.presets import described

    seed = [] if arguments.seed is None else [f"run.seed={arguments.seed}"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FieldHasNoEffect)
        data = Experiment.read(arguments.experiment, [*arguments.overrides, *seed, *more], arguments.strategy)
        has_churn = False
        if more and isinstance(cluster := data.get("cluster"), dict):  # before it is checked against the point's nodes
            has_churn = cluster.pop("churn", None) is not None
        experiment = Experiment.from_dict(data)
    has_churn |= experiment.cluster.churn is not None
    left_out = UNDISTURBED if has_churn and _is_undisturbed(vars(arguments)) else None
    notes = (described(data), left_out, *(str(entry.message) for entry in caught))
    return experiment, list(dict.fromkeys(note for note in notes if note is not None))


def _is_undisturbed(options: dict[str, Any]) -> bool:
    """Whether a command with these options takes no node away, even if the experiment declares churn."""
    several = options.get("seeds") is not None or options.get("what_if") or options.get("sweep")
    return bool(several) or options.get("simulate_only") is False


def with_profile(experiment: Experiment, root: Path, *, simulates: bool = True) -> Experiment:
    """Return the experiment with known layer times, from a stored profile or one taken now.

    A declared table of layers needs neither a profile nor torch.
    """
    from fleetbench.workload import LAYERS

    if experiment.workload.model == LAYERS:
        return experiment
    from fleetbench.profile import profile_of
    from real.profile.measuring import ensure_profile

    with progress.steps("profile") as advance:
        experiment = ensure_profile(experiment, root, progress=advance, told=_warn)
    profile = profile_of(experiment)
    if profile is not None and profile.busy:
        _warn(f"warning: {profile.busy}; it serves as long as the machine stays busy, and a new one is taken when it is quiet")
    if simulates and profile is not None and (short := profile.short_of(experiment)) is not None:
        _warn(f"warning: {short}")
    return experiment


@functools.cache
def _warn(text: str) -> None:
    """Print a warning only once, even if every point of a sweep causes it."""
    say(text)


def check_writable(root: Path) -> None:
    """Raise ``EnvironmentLacks`` if no run folder can be created below ``root``."""
    nearest = root.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    try:
        Path(tempfile.mkdtemp(dir=nearest)).rmdir()
    except OSError as error:
        what = f"run folders cannot be written: {nearest} takes no folder: {error.strerror}"
        raise EnvironmentLacks(what, "--out", str(root), "name another folder with --out DIR") from error
