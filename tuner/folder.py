"""Folder: where a tuning keeps what it has, from its first leg to its verdict, so that it may be taken up again, and gone on from.

It lies below ``--out``, named by the command, if any, the Python files beside the script, what was asked for, and where that runs: the
machine, versions, and the environment variables that experiments set. It holds the experiment that is tuned (found out, for a script),
with its profile, the evidence, and the runs; with the recommendation it takes its name for good, and the next tuning begins again.

What another tuning takes of it depends on what has moved since. Legs hold while nothing has moved that the processes run, and with them
the error that looks have spent; each is found by its digest, so that runs to another target, or pairs that are judged otherwise, are not.
Links of machines that are as they are (launchers ``local`` and ``command``) move no legs, and layer times those alone whose compute is
emulated or delayed by them. What is simulated is simulated again.
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
from fleetbench.profile import profile_of, table_for
from fleetbench.store import commit, machine, new_run_id, versions
from real.processes.place import OWNER, Place
from tuner.evidence import Evidence
from tuner.notes import Moved
from tuner.recommendation import Recommendation

RUNS = "runs"
_INPUTS, _PROFILE, _EVIDENCE, _EXPERIMENT = "inputs.json", "profile.toml", "evidence.json", "experiment.toml"
_SET_BY_LIBRARIES = ("KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK")
"""Variables that importing scikit-learn sets in this process."""
_METHOD = 3
"""Of runs to the target, where no commit tells it; 3: on a line through a script's losses, which has no warm-up."""
_TARGET = ("target_loss", "eval_every", "steps")
_LINKS = ("cluster.intra.", "cluster.inter.")
FRESH_S = 3600.0
"""Age, in seconds, up to which a script's profile is used again without being asked for."""


class Folder:
    """``claimed`` (no other process is at it) -> ``begun`` (the experiment is known) -> ``finished``, or ``discarded``."""

    def __init__(self, command: Sequence[str], asked: Experiment, out: Path, earlier: Path | None = None) -> None:
        self.inputs, self._out = inputs_of(command), out
        key = json_digest(self.inputs | {"base": encode(asked), "from": earlier and str(earlier.resolve())})[:12]
        self.path = out / f"resume-{asked.name}-{key}"

    @property
    def runs(self) -> Path:
        """Where runs are stored."""
        return self.path / RUNS

    def claim(self) -> None:
        """From now on this process is at it. Raises ``ConfigError`` where another one of this host is.

        Nothing is made where nothing was kept yet.
        """
        self._refuse_another()
        if self.path.is_dir():
            write_whole(self.path / OWNER, json.dumps(encode(Place.here())))

    def experiment(self) -> Experiment | None:
        """What was found before; none where nothing was, or where its profile is gone."""
        try:
            found = Experiment.load(self.path / _EXPERIMENT)
            found.digest()  # reads the profile
        except ConfigError:
            return None
        return found

    def begin(self, experiment: Experiment, evidence: Evidence) -> None:
        """What is tuned, and what is known of it; what lies there from before is of something else.

        Raises ``ConfigError`` where another process of this host has begun in the meantime.
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
        """From now on this is the evidence."""
        write_whole(self.path / _EVIDENCE, sealed_json(encode(evidence)))

    def evidence(self) -> Evidence | None:
        """What was measured before, as far as its runs are there; none where that cannot be read."""
        try:
            found = _evidence_in(self.path)
        except ConfigError:
            return None
        whole = takewhile(lambda one: one.run is None or (self.runs / one.run / MANIFEST).is_file(), found.outcomes)
        return dataclasses.replace(found, outcomes=tuple(whole))

    def finish(self, recommendation: Recommendation, experiment: Experiment, earlier: Earlier | None) -> Path:
        """Give the folder the recommendation, with its runs and those of the earlier tuning's evidence, and its own name."""
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
        """Nothing of it is to be gone on with."""
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
    """As it was tuned; it names the profile that it had then."""
    inputs: Mapping[str, Any]
    evidence: Evidence
    learnt: Mapping[str, tuple[float, ...]]
    """See ``Recommendation``."""

    @classmethod
    def load(cls, path: Path) -> Earlier:
        """Read what a tuning has left. Raises ``ConfigError`` where the folder holds none."""
        if not all((path / name).is_file() for name in (_INPUTS, _EVIDENCE, "recommendation.json")):
            hint = "name a folder that this version's fleetbench tune has printed as that of its recommendation: runs/NAME-tune-..."
            raise ConfigError("is no folder of a complete tuning", "--from", str(path), hint)
        with reading(path, "tune without --from"):
            inputs, experiment = read_json((path / _INPUTS).read_text(encoding="utf-8")), Experiment.load(path / _EXPERIMENT)
        profile = str((path / _PROFILE).resolve()) if (path / _PROFILE).is_file() else None
        experiment = experiment.replace(workload=dataclasses.replace(experiment.workload, profile=profile))
        return cls(path, experiment, inputs, _evidence_in(path), Recommendation.load(path).learnt)

    def script(self, asked: Experiment, inputs: Mapping[str, Any]) -> Experiment | None:
        """What a user's script was, with its profile, under what is asked for; none where that is to be found out again."""
        old, has_target = self.experiment, asked.workload.target_loss is not None
        if self.inputs != inputs or old.run.launcher != "command" or (old.workload.target_loss is not None) != has_target:
            return None
        target = {name: getattr(asked.workload, name) for name in _TARGET}
        links = {name: getattr(asked.cluster, name) for name in ("intra", "inter", "cores_per_node")}
        return asked.replace(
            workload=dataclasses.replace(old.workload, **target),
            cluster=dataclasses.replace(old.cluster, **links),
            strategy=old.strategy,
            run=dataclasses.replace(asked.run, device=old.run.device, backend=old.run.backend, launcher="command"),
        )

    def beside(self, experiment: Experiment, inputs: Mapping[str, Any]) -> tuple[Evidence, Moved]:
        """The evidence that a tuning of ``experiment``, measured where ``inputs`` say, begins with; and what has moved."""
        before, now = (dict(flat(encode(one))) for one in (self.experiment, experiment))
        moved = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in ("name", "workload.profile")]
        elsewhere = [name for name in inputs if self.inputs.get(name) != inputs[name]]
        times = self._other_times(experiment)
        lines = [f"{key} {before.get(key, 'none')} -> {now.get(key, 'none')}" for key in moved]
        lines += [*times, *(f"the {name}" for name in elsewhere)]

        run = experiment.run
        by_times = run.device == "emulated" or bool(experiment.cluster.stragglers)
        as_they_are = _LINKS if run.launcher in ("local", "command") and run.device != "emulated" else ()
        target = {f"workload.{name}" for name in _TARGET} & {*moved}
        rest = [key for key in moved if key not in target]
        ran = [key for key in rest if key == "tune.leg_steps" or not key.startswith(("tune.", *as_they_are))]
        holds = not ran and not elsewhere and not (times and by_times)
        held = "nothing" if not holds else "legs" if target or "tune.metric" in moved else "legs, runs to the target"
        note = Moved(since=self.path.name, changes=tuple(lines), taken=held)
        return self.evidence.inherited(experiment.tune.pairs, experiment.tune.min_gain) if holds else Evidence(), note

    def _other_times(self, experiment: Experiment) -> list[str]:
        """That layer times differ, in words."""
        both = (self.experiment, experiment)
        old, new = (None if (path := one.workload.profile) is None else file_digest(Path(path)) for one in both)
        if old == new:
            return []
        times = [f"{(table.forward_ns + table.backward_ns) * 1e-6:.4g}" for table in map(table_for, both)]
        return [f"layer times, of a step {times[0]} -> {times[1]} ms"]


def recent(out: Path, inputs: Mapping[str, Any]) -> Earlier | None:
    """A tuning below ``out`` of the same command and files on the same machine whose profile is fresh: the freshest, or one of them."""
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
    """What measurements depend on beside their experiment, as plain data: the command, its files, this code, and where it runs.

    Of the files: those that the command names, a module after ``-m`` among them, and Python files beside them; no data.
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
    """Raises ``ConfigError`` for what cannot be read."""
    with reading(path / _EVIDENCE, "tune without --from"):
        return decode(read_json((path / _EVIDENCE).read_text(encoding="utf-8")), Evidence, str(path / _EVIDENCE))
