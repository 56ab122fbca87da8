"""What sim, real and tune do around the execution itself: load, profile."""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fleetbench.cli import progress
from fleetbench.cli.output import say
from fleetbench.errors import EnvironmentLacks

if TYPE_CHECKING:
    from fleetbench.experiment import Experiment


def load_experiment(arguments: argparse.Namespace) -> Experiment:
    """The experiment that the command line names, with its overrides; notes go to stderr.

    Raises ``ConfigError`` for a file or override that is wrong, and ``EnvironmentLacks`` where
    ``--out`` cannot be written, before anything has run.
    """
    experiment, notes = load_with_notes(arguments)
    for text in notes:
        say(f"note: {text}")
    check_writable(arguments.out)
    return experiment


def load_with_notes(arguments: argparse.Namespace, more: Sequence[str] = ()) -> tuple[Experiment, list[str]]:
    """The experiment with ``more`` overrides after those of the command line, and what is to be said of it."""
    from fleetbench.experiment import Experiment
    from fleetbench.fleet_names import FieldHasNoEffect
    from fleetbench.hardware.presets import described

    seed = [] if arguments.seed is None else [f"run.seed={arguments.seed}"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FieldHasNoEffect)
        data = Experiment.read(arguments.experiment, [*arguments.overrides, *seed, *more])
        experiment = Experiment.from_dict(data)
    stands_for = described(data)
    notes = [stands_for] if stands_for is not None else []
    return experiment, list(dict.fromkeys([*notes, *(str(entry.message) for entry in caught)]))


def with_profile(experiment: Experiment, root: Path, *, lines: bool = False) -> Experiment:
    """The experiment with its layer times known: a stored profile, or one taken now.

    A declared table of layers needs neither a profile nor torch. ``lines``: of progress, where there is no terminal.
    """
    from fleetbench.workload import LAYERS

    if experiment.workload.model == LAYERS:
        return experiment
    from fleetbench.profile import profile_of
    from real.profile.measuring import ensure_profile

    with progress.steps("profile", lines=lines) as advance:
        experiment = ensure_profile(experiment, root, progress=advance)
    profile = profile_of(experiment)
    if profile is not None and profile.busy:
        say(f"warning: {profile.busy}; profile again when it is quiet")
    return experiment


def check_writable(root: Path) -> None:
    """Raise ``EnvironmentLacks`` where no run folder can be made below ``root``."""
    nearest = root.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    try:
        Path(tempfile.mkdtemp(dir=nearest)).rmdir()
    except OSError as error:
        raise unwritable(root, f"{nearest} takes no folder: {error.strerror}") from error


def unwritable(root: Path, why: str) -> EnvironmentLacks:
    """The error of a folder for runs that takes none."""
    return EnvironmentLacks(f"run folders cannot be written: {why}", "--out", str(root), "name another folder with --out DIR")
