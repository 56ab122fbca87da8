"""Resumption: what an interrupted tuning of a script leaves, so that the same command goes on with it.

A folder below ``--out``, named by the command, the Python files beside the script, what was asked for,
and where that runs: the machine, versions, and the environment variables that experiments set. It holds
the experiment that the script was found to be, with its profile, the legs that were run, the seconds for
which trainers were held, and which process is at it; it goes when the tuning is done, so that a tuning
that was not interrupted begins anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from fleetbench.config import decode, encode
from fleetbench.digests import write_whole
from fleetbench.environment import RECORDED
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.store import machine, versions
from real.processes.place import Place
from tuner.journal import Journal
from tuner.legs import Runner

_OWNER, _HELD = "owner.json", "held_s"


class Resumption:
    """``claimed`` (no other process is at it) -> ``kept`` (the experiment is known) -> ``closed``."""

    def __init__(self, command: Sequence[str], base: Experiment, out: Path) -> None:
        self.folder = out / f"resume-{base.name}-{_key(command, base)}"

    def claim(self) -> None:
        """From now on this process is at it. Raises ``ConfigError`` where another one of this host is.

        Nothing is made where nothing was kept yet.
        """
        self._refuse_another()
        if self.folder.is_dir():
            self._write(_OWNER, json.dumps(encode(Place.here())))

    def experiment(self) -> Experiment | None:
        """What was found before; none where nothing was, or where its profile is gone."""
        path = self.folder / "experiment.toml"
        if not path.is_file():
            return None
        try:
            found = Experiment.load(path)
            found.digest()  # reads the profile
        except ConfigError:
            return None
        return found

    @property
    def draft(self) -> Path:
        """Where the recommendation's folder lies until it is complete."""
        return self.folder / "draft"

    def held_s(self) -> float:
        """Seconds of all trainers together that are gone so far, in all attempts."""
        return float((self.folder / _HELD).read_text(encoding="ascii"))

    def hold(self, held_s: float) -> None:
        """So many seconds are gone."""
        self._write(_HELD, f"{held_s}\n")

    def keep(self, experiment: Experiment, held_s: float) -> None:
        """What the script is, and what it took to find out; legs from before are of something else.

        Raises ``ConfigError`` where another process of this host has kept something meanwhile.
        """
        self._refuse_another()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.claim()
        self.hold(held_s)
        experiment.save(self.folder / "experiment.toml")

    def journal(self, runner: Runner, on_leg: Callable[[], object]) -> Journal:
        """A runner that goes on with the legs that are there; see ``Journal``."""
        return Journal(runner, self.folder / "legs", on_leg)

    def close(self) -> None:
        """The tuning is done."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _refuse_another(self) -> None:
        try:
            owner = decode(json.loads((self.folder / _OWNER).read_text(encoding="utf-8")), Place, _OWNER)
        except (OSError, ValueError, ConfigError):
            return
        if owner.shares_numbers(Place.here()) and owner.pid != os.getpid() and owner.lives():
            hint = f"wait for it, or give another --out; where that process is no tuning, remove {_OWNER} there"
            raise ConfigError("another process is at this tuning", str(self.folder), f"process {owner.pid}", hint)

    def _write(self, name: str, text: str) -> None:
        write_whole(self.folder / name, text)


def _key(command: Sequence[str], base: Experiment) -> str:
    scripts = [Path(word) for word in command if word.endswith(".py") and Path(word).is_file()]
    beside = sorted({path for script in scripts for path in script.parent.glob("*.py") if path.is_file()})
    what = {
        "command": list(command),
        "scripts": {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in beside},
        "base": encode(base),
        "machine": machine(),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(RECORDED)},
        "versions": versions(),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]
