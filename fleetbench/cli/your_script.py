"""Commands that run the user's own script: ``fleetbench tune [FILE] -- torchrun ... train.py``."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from fleetbench.cli.options import load_experiment
from fleetbench.cli.output import say
from fleetbench.errors import ConfigError
from fleetbench.strategy import DistributedStrategy

if TYPE_CHECKING:
    from fleetbench.experiment import Experiment, Tune

SEPARATOR = "--"
REGISTRY_SCRIPT = "real.workloads.train"
"""Module that trains an experiment's own workload like a user's script."""
TAKE_A_COMMAND = ("why", "profile", "tune", "doctor")
_OF_THE_WORKLOAD = ("target_loss", "eval_every", "steps")
"""Workload fields that may be set. The script decides the others, such as model and data."""
_MODULE = ("-m", "--module")
"""Options after which a command names a module instead of a file."""
_PROTECTION = (
    "let the script neither load nor save a checkpoint where FLEETBENCH_TUNING is in its environment, "
    "or, if it only saves, start it in a folder of its own with --workdir DIR"
)
EPILOG = "After --, give a command that starts your own training script, with torchrun, fleetbench launch or python."


def split_command(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split a command line at its first ``--``, if its command is in ``TAKE_A_COMMAND``.

    The second part is ``--`` itself if nothing follows it, and empty without ``--``.
    """
    words = list(argv)
    if not words or words[0] not in TAKE_A_COMMAND or SEPARATOR not in words:
        return words, ()
    place = words.index(SEPARATOR)
    return words[:place], tuple(words[place + 1 :]) or (SEPARATOR,)


def command_of_job(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the command that trains the experiment's own workload, for a process started as one of several.

    Return an empty command if the process was started alone. Raises ``ConfigError`` without an experiment.
    """
    from real.processes.roles import role_of

    num = role_of(os.environ).trainers
    if num == 1:
        return ()
    if arguments.experiment is None:
        hint = "name an experiment, or a command after --; to start trainers of its own, fleetbench is started once"
        raise ConfigError(f"{num} processes were started, and nothing says what they train", "EXPERIMENT.toml", hint=hint)
    seed = [] if arguments.seed is None else [f"run.seed={arguments.seed}"]
    return (sys.executable, "-u", "-P", "-m", REGISTRY_SCRIPT, arguments.experiment, *arguments.overrides, *seed)


def drive_script(arguments: argparse.Namespace, drive: Callable[[argparse.Namespace, tuple[str, ...], Experiment], int]) -> int:
    """Call ``drive`` for the user's script, on rank 0 if this process is one of several; the others serve it."""
    from real.job.inside import driving, role_inside, serve

    role = role_inside()
    if role is None:
        if arguments.workdir is not None:
            arguments.workdir.mkdir(parents=True, exist_ok=True)
            named = ((word, Path(word)) for word in arguments.command_line)  # a script is named from there
            arguments.command_line = tuple(str(path.resolve()) if path.suffix == ".py" and path.is_file() else word for word, path in named)
        return drive(arguments, *_asked(arguments))
    if arguments.workdir is not None:
        hint = "let the job's script start it there: (cd DIR && torchrun ...)"
        raise ConfigError("the job has been started already", "--workdir", str(arguments.workdir), hint)
    command, base = _asked(arguments)
    if role.rank > 0:
        return serve(role, command, base.run.environment)
    with driving(role, arguments.out):
        return drive(arguments, command, base)


def refuse_workdir(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for a working folder if no command is started."""
    if arguments.workdir is not None:
        hint = "fleetbench tune --workdir scratch -- torchrun --nproc-per-node 2 train.py"
        raise ConfigError("needs a command to start in that folder", "--workdir", str(arguments.workdir), hint)


def budget(tune: Tune) -> str:
    """Return a line that states the budget of real runs."""
    bounds = [] if tune.budget_minutes is None else [f"{tune.budget_minutes:g} minutes from the first launch on"]
    if tune.budget_gpu_hours is not None:
        bounds.append(f"{tune.budget_gpu_hours:g} trainer hours, for all of them together from the first launch on")
    return f"budget: {'; '.join(bounds) or 'none; --set tune.budget_minutes=30 would bound the time for which trainers are held'}"


def _asked(arguments: argparse.Namespace) -> tuple[tuple[str, ...], Experiment]:
    """Return the script's command, and the experiment of the file or of the built-in ``script.toml``."""
    command: tuple[str, ...] = arguments.command_line
    if command == (SEPARATOR,):
        raise ConfigError("no command follows it", SEPARATOR, hint="fleetbench tune -- torchrun --nproc-per-node 2 train.py")
    if arguments.strategy is not None:
        hint = "give the file to the script, which loads it with DistributedStrategy.load; an experiment file may have its [strategy]"
        raise ConfigError("does not reach the processes of a command", "--strategy", str(arguments.strategy), hint)
    require_script(command, arguments.workdir)
    is_named = arguments.experiment is not None or any(text.partition("=")[0].strip() == "name" for text in arguments.overrides)
    if arguments.experiment is None:
        arguments.experiment = str(resources.files("fleetbench").joinpath("script.toml"))
    base, overrides = load_experiment(arguments), arguments.overrides
    if REGISTRY_SCRIPT in command:  # this script reads strategy and workload from the file itself
        base, overrides = base.replace(strategy=DistributedStrategy()), ()
    refuse_what_is_the_scripts(base, overrides)
    return command, base if is_named else base.replace(name=_name(command))


def require_script(command: Sequence[str], workdir: Path | None) -> None:
    """Raise ``ConfigError`` if a known launcher is to start a Python file that does not exist."""
    known = re.fullmatch(r"python[\d.]*|torchrun|accelerate|deepspeed|fleetbench", Path(command[0]).name)
    script = next((word for word in command[1:] if word.endswith(".py") or word in _MODULE), None)
    if known and script is not None and script not in _MODULE and not Path(workdir or "", script).is_file():
        where = "" if workdir is None else f" in {workdir}"
        hint = "name the training script's file, relative to where the command starts"
        raise ConfigError(f"no such script{where}", SEPARATOR, script, hint)


def _name(command: Sequence[str]) -> str:
    """Return the name of run folders: the script's file name without its ending."""
    from real.job.facts import script_name

    return re.sub(r"[^A-Za-z0-9_-]+", "-", Path(script_name(tuple(command))).stem).strip("-") or "script"


def refuse_what_is_the_scripts(base: Experiment, overrides: Sequence[str] = ()) -> None:
    """Raise ``ConfigError`` for settings that a user's script decides itself or cannot have."""
    if base.cluster.stragglers:
        what = "stragglers are not injected into a user's script: it has those of its machines"
        raise ConfigError(
            what, "cluster.stragglers", f"{len(base.cluster.stragglers)} entries", "drop them; profile measures what there is"
        )
    if base.strategy != DistributedStrategy():
        hint = "drop it: what the script gives to DistributedDataParallel or to fleet.init is what others are compared with"
        raise ConfigError("is the script's own", "strategy", repr(base.strategy.changes()), hint)
    for override in overrides:
        key, _, value = override.partition("=")
        section, _, name = key.strip().partition(".")
        if section == "workload" and name.split(".")[0] not in _OF_THE_WORKLOAD:
            allowed = ", ".join(f"workload.{field}" for field in _OF_THE_WORKLOAD)
            raise ConfigError("is the script's own", key.strip(), value.strip(), f"change the script; what can be set of it is {allowed}")


def note_files(arguments: argparse.Namespace, often: str = ", over and over,") -> None:
    """Print a note that the script writes files where it starts."""
    folder = (arguments.workdir or Path()).resolve()
    say(f"note: the script really runs{often} and writes its files below {folder}: {_PROTECTION}")
