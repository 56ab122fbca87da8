"""What sim, real and tune do around the execution itself: load, profile, store."""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from fleetbench.cli import progress
from fleetbench.cli.output import say
from fleetbench.errors import EnvironmentLacks

if TYPE_CHECKING:
    from fleetbench.experiment import Experiment
    from fleetbench.result import RunResult


def load_experiment(arguments: argparse.Namespace) -> Experiment:
    """The experiment that the command line names, with its overrides; notes go to stderr.

    Raises ``ConfigError`` for a file or override that is wrong, and ``EnvironmentLacks`` where
    ``--out`` cannot be written, before anything has run.
    """
    from fleetbench.experiment import Experiment
    from fleetbench.strategy import FieldHasNoEffect

    overrides = list(arguments.overrides)
    if arguments.seed is not None:
        overrides.append(f"run.seed={arguments.seed}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FieldHasNoEffect)
        experiment = Experiment.load(arguments.experiment, overrides)
    for text in dict.fromkeys(str(entry.message) for entry in caught):
        say(f"note: {text}")
    _check_writable(arguments.out)
    return experiment


def with_profile(experiment: Experiment, root: Path) -> Experiment:
    """The experiment with its layer times known: a stored profile, or one taken now.

    A declared table of layers needs neither a profile nor torch.
    """
    from fleetbench.workload import LAYERS

    if experiment.workload.model == LAYERS:
        return experiment
    from real.profile.profiling import ensure_profile

    with progress.steps("profile") as advance:
        return ensure_profile(experiment, root, progress=advance)


def store(result: RunResult, root: Path) -> RunResult:
    """Write a run below ``root``. Raises ``EnvironmentLacks`` where the disk refuses."""
    from fleetbench.store import save_run

    try:
        return save_run(result, root)
    except OSError as error:
        raise _unwritable(root, error.strerror or str(error)) from error


def _check_writable(root: Path) -> None:
    nearest = root.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir():
        raise _unwritable(root, f"{nearest} is not a folder")
    if not os.access(nearest, os.W_OK):
        raise _unwritable(root, f"{nearest} is read-only")
    try:
        Path(tempfile.mkdtemp(dir=nearest)).rmdir()  # root may write anywhere, and some file systems take no folders all the same
    except OSError as error:
        raise _unwritable(root, f"{nearest} takes no folder: {error.strerror}") from error


def _unwritable(root: Path, why: str) -> EnvironmentLacks:
    return EnvironmentLacks(f"run folders cannot be written: {why}", "--out", str(root), "name another folder with --out DIR")
