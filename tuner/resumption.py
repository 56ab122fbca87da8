"""Resumption: what an interrupted tuning of a script leaves, so that the same command goes on with it.

A folder below ``--out``, named by the command, the file of the script, and what was asked for. It holds the
experiment that the script was found to be, with its profile, and the legs that were run; it goes when
the tuning is done, so that a tuning that was not interrupted begins anew.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from fleetbench.config import encode
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.store import machine, versions
from tuner.journal import Journal
from tuner.legs import Runner


class Resumption:
    """``open`` -> ``kept`` (the experiment is known) -> ``closed``."""

    def __init__(self, command: Sequence[str], base: Experiment, out: Path) -> None:
        self.folder = out / f"resume-{base.name}-{_key(command, base)}"

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
        """Seconds of all trainers together that were gone when the experiment was known."""
        return float((self.folder / "held_s").read_text(encoding="ascii"))

    def keep(self, experiment: Experiment, held_s: float) -> None:
        """What the script is, and what it took to find out; legs from before are of something else."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        (self.folder / "held_s").write_text(f"{held_s}\n", encoding="ascii")
        partial = self.folder / "experiment.toml.partial"
        partial.write_text(experiment.to_toml(), encoding="utf-8")
        partial.replace(self.folder / "experiment.toml")

    def journal(self, runner: Runner) -> Journal:
        """A runner that goes on with the legs that are there."""
        return Journal(runner, self.folder / "legs")

    def close(self) -> None:
        """The tuning is done."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _key(command: Sequence[str], base: Experiment) -> str:
    scripts = [hashlib.sha256(Path(word).read_bytes()).hexdigest() for word in command if word.endswith(".py") and Path(word).is_file()]
    what = {"command": list(command), "scripts": scripts, "base": encode(base), "machine": machine(), "torch": versions()["torch"]}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]
