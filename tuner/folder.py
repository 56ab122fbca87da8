"""Folder: state of a tuning from its first leg to its verdict, so that it can be resumed or continued.

The folder is below ``--out``. Its name contains a digest of the command, if any, the Python files beside the
script, the requested settings, and the place: the machine, versions, and the environment variables that
experiments set. It holds the tuned experiment, its profile, the evidence, and the runs. With the recommendation
it gets its final name, and the next tuning starts from scratch.

A tuning that continues another one reuses legs, and the error that looks have spent, if nothing has changed that
the processes run. Legs are found by their digest, so runs to another target, or pairs that are judged
differently, are not reused. Changed links do not invalidate legs on real machines (launchers ``local`` and
``command``) without emulated compute. Changed layer times invalidate legs only if compute is emulated or delayed
by injected stragglers. Simulations are always repeated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from fleetbench.config import decode, encode, flat
from fleetbench.digests import MANIFEST, file_digest, json_digest, read_json, reading, sealed_json, write_whole
from fleetbench.environment import RECORDED
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.profile import profile_of
from fleetbench.store import commit, machine, new_run_id, versions
from real.processes.place import OWNER, Place
from tuner.evidence import Evidence
from tuner.notes import Note, Remark, left_out
from tuner.recommendation import Recommendation

RUNS = "runs"
_INPUTS, _PROFILE, _EVIDENCE, _EXPERIMENT = "inputs.json", "profile.toml", "evidence.json", "experiment.toml"
_SET_BY_LIBRARIES = ("KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK")
"""Environment variables that importing scikit-learn sets in this process."""
_METHOD = 3
"""Version of the method of runs to the target, raised for changes that no commit shows. Version 3 fits a line to a
script's losses, and has no warm-up."""
_TARGET = ("workload.target_loss", "workload.eval_every", "workload.steps")
_LINKS = ("cluster.intra.", "cluster.inter.")
FRESH_S = 3600.0
"""Age in seconds up to which the profile of a script's earlier tuning is reused automatically."""


class Folder:
    """Folder of a tuning: ``claimed`` (locked) -> ``begun`` (experiment known) -> ``finished``, or ``discarded``."""

    def __init__(self, command: Sequence[str], asked: Experiment, out: Path, earlier: Path | None = None) -> None:
        self.inputs, self._out = inputs_of(command), out
        key = json_digest(self.inputs | {"base": encode(asked), "from": earlier and str(earlier.resolve())})[:12]
        self.path = out / f"resume-{asked.name}-{key}"

    @property
    def runs(self) -> Path:
        """Folder in which runs are stored."""
        return self.path / RUNS

    def claim(self) -> None:
        """Lock the folder for this process, if the folder exists.

        Raises ``ConfigError`` if another process of this host holds it.
        """
        self._refuse_another()
        if self.path.is_dir():
            write_whole(self.path / OWNER, json.dumps(encode(Place.here())))

    def experiment(self) -> Experiment | None:
        """Return the stored experiment; None if there is none, or if its profile is missing."""
        try:
            found = Experiment.load(self.path / _EXPERIMENT)
            found.digest()  # reads the profile
        except ConfigError:
            return None
        return found

    def begin(self, experiment: Experiment, evidence: Evidence) -> None:
        """Store the tuned experiment and the known evidence.

        Older contents of the folder, which could not be resumed, are removed. Raises ``ConfigError`` if another
        process of this host has claimed the folder since.
        """
        self._refuse_another()
        shutil.rmtree(self.path, ignore_errors=True)
        self.runs.mkdir(parents=True)
        self.claim()
        experiment.save(self.path / _EXPERIMENT)
        write_whole(self.path / _INPUTS, sealed_json(self.inputs))
        if experiment.workload.profile is not None:
            shutil.copy2(experiment.workload.profile, self.path / _PROFILE)
        self.keep(evidence)

    def keep(self, evidence: Evidence) -> None:
        """Store the evidence."""
        write_whole(self.path / _EVIDENCE, sealed_json(encode(evidence)))

    def evidence(self) -> Evidence | None:
        """Return the stored evidence up to the first outcome whose run is missing; None if it cannot be read."""
        try:
            found = _evidence_in(self.path)
        except ConfigError:
            return None
        whole = takewhile(lambda one: one.run is None or (self.runs / one.run / MANIFEST).is_file(), found.outcomes)
        return dataclasses.replace(found, outcomes=tuple(whole))

    def finish(self, recommendation: Recommendation, experiment: Experiment, earlier: Earlier | None) -> Path:
        """Add the recommendation and the earlier tuning's runs, rename the folder, and return its final path."""
        before = [] if earlier is None else [one.run for one in earlier.evidence.inherited(0, 0.0).earlier if one.run is not None]
        for run in before:
            if not (self.runs / run).is_dir() and (earlier_run := earlier.path / RUNS / run).is_dir():  # type: ignore[union-attr]  # it has runs
                shutil.copytree(earlier_run, self.runs / run)
        recommendation.save(self.path)
        for path in self.runs.iterdir():
            if path.name not in (*recommendation.runs, *before):
                shutil.rmtree(path)
        (self.path / OWNER).unlink(missing_ok=True)
        return self.path.rename(self._out / f"{experiment.name}-tune-{experiment.digest()}-{new_run_id()}")

    def discard(self) -> None:
        """Remove the folder, so that nothing is resumed."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _refuse_another(self) -> None:
        try:
            owner = decode(json.loads((self.path / OWNER).read_text(encoding="utf-8")), Place, OWNER)
        except (OSError, ValueError, ConfigError):
            return
        if owner.shares_numbers(Place.here()) and owner.pid != os.getpid() and owner.lives():
            hint = f"wait for it, or give another --out; where that process is no tuning, remove {OWNER} there"
            raise ConfigError("another process is at this tuning", str(self.path), f"process {owner.pid}", hint)


@dataclass(frozen=True, slots=True)
class Earlier:
    """The folder of a complete tuning."""

    path: Path
    experiment: Experiment
    """Experiment as it was tuned, with the path of the profile that is stored in the folder."""
    inputs: Mapping[str, Any]
    evidence: Evidence

    @classmethod
    def load(cls, path: Path) -> Earlier:
        """Read the folder of a complete tuning.

        Raises ``ConfigError`` if ``path`` is not such a folder.
        """
        if not all((path / name).is_file() for name in (_INPUTS, _EVIDENCE, "recommendation.json")):
            hint = "name a folder that this version's fleetbench tune has printed as that of its recommendation: runs/NAME-tune-..."
            raise ConfigError("is no folder of a complete tuning", "--from", str(path), hint)
        with reading(path, "tune without --from"):
            inputs, experiment = read_json((path / _INPUTS).read_text(encoding="utf-8")), Experiment.load(path / _EXPERIMENT)
        profile = str((path / _PROFILE).resolve()) if (path / _PROFILE).is_file() else None
        experiment = experiment.replace(workload=dataclasses.replace(experiment.workload, profile=profile))
        return cls(path, experiment, inputs, _evidence_in(path))

    def script(self, asked: Experiment, inputs: Mapping[str, Any]) -> Experiment | None:
        """Return the experiment of a user's script, with its stored profile and the requested settings.

        None if the script has to be examined again.
        """
        old, has_target = self.experiment, asked.workload.target_loss is not None
        if self.inputs != inputs or old.run.launcher != "command" or (old.workload.target_loss is not None) != has_target:
            return None
        target = {name: getattr(asked.workload, name) for name in ("target_loss", "eval_every", "steps")}
        links = {name: getattr(asked.cluster, name) for name in ("intra", "inter", "cores_per_node")}
        return asked.replace(
            workload=dataclasses.replace(old.workload, **target),
            cluster=dataclasses.replace(old.cluster, **links),
            strategy=old.strategy,
            run=dataclasses.replace(asked.run, device=old.run.device, backend=old.run.backend, launcher="command"),
        )

    def beside(self, experiment: Experiment, inputs: Mapping[str, Any]) -> tuple[Evidence, Note]:
        """Return the evidence that a tuning of ``experiment`` can reuse, and a note about it.

        ``inputs``: those of the new tuning; see ``inputs_of``.
        """
        both, run = (self.experiment, experiment), experiment.run
        is_real = run.launcher in ("local", "command") and run.device != "emulated"
        free = ("name", "tune.", "workload.profile", *_TARGET, *(_LINKS if is_real else ()))
        before, now = (
            {key: value for key, value in flat(encode(one)) if key == "tune.leg_steps" or not key.startswith(free)} for one in both
        )
        changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        changed += [f"the {name}" for name in inputs if self.inputs.get(name) != inputs[name]]
        if run.device == "emulated" or experiment.cluster.stragglers:
            old, new = (None if (path := one.workload.profile) is None else file_digest(Path(path)) for one in both)
            changed += ["layer times"] if old != new else []
        if changed:
            return Evidence(), left_out(f"legs of {self.path.name}", "are measured again", f"changed since: {', '.join(changed)}")
        note = Remark(text=f"legs of {self.path.name}, and runs to the same target, are taken over")
        return self.evidence.inherited(experiment.tune.pairs, experiment.tune.min_gain), note


def recent(out: Path, inputs: Mapping[str, Any]) -> Earlier | None:
    """Return the tuning below ``out`` with the newest profile and the same ``inputs``.

    None if no profile of a quiet machine is younger than ``FRESH_S``.
    """
    since = time.time() - FRESH_S
    profiles = [path for path in out.glob(f"*-tune-*/{_PROFILE}") if path.stat().st_mtime > since]
    for path in sorted(profiles, key=lambda path: path.stat().st_mtime, reverse=True):
        with contextlib.suppress(ConfigError):
            found = Earlier.load(path.parent)
            profile = profile_of(found.experiment)
            if found.inputs == inputs and profile is not None and profile.busy is None:
                return found
    return None


def inputs_of(command: Sequence[str]) -> dict[str, Any]:
    """Return everything that measurements depend on besides their experiment: command, files, code and place.

    The files are those that the command names, including a module after ``-m``, and the Python files beside
    a named Python file.
    """
    modules = [f"{word.replace('.', '/')}.py" for option, word in pairwise(command) if option == "-m"]
    named = [Path(word) for word in (*command, *modules) if Path(word).is_file()]
    beside = sorted({*named, *(path for file in named if file.suffix == ".py" for path in file.parent.glob("*.py") if path.is_file())})
    return {
        "command": list(command),
        "folder": str(Path.cwd()),
        "files": {str(path): file_digest(path) for path in beside},
        "code of fleetbench": commit(),
        "method": _METHOD,
        "machine": machine() | {"host": platform.node()},
        "environment": {name: value for name, value in os.environ.items() if name.startswith(RECORDED) and name not in _SET_BY_LIBRARIES},
        "versions": versions(),
    }


def _evidence_in(path: Path) -> Evidence:
    """Read the evidence. Raises ``ConfigError`` if it cannot be read."""
    with reading(path / _EVIDENCE, "tune without --from"):
        return decode(read_json((path / _EVIDENCE).read_text(encoding="utf-8")), Evidence, str(path / _EVIDENCE))
