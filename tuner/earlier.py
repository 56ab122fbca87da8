"""An earlier tuning, from whose folder another one goes on: what has moved since, and what of it still holds.

Legs hold while nothing has moved that the processes run; runs to the target, while the target and its metric, too, are what they were.
A strategy that has run keeps its time over the default's, which was taken in one round, and a finalist its pairs, unless what they are
judged by has moved. While legs hold, all tunings share the error of one: what their looks have spent stays spent. Links of machines that
are as they are (launchers ``local`` and ``command``) move no legs, and layer times those alone whose compute is emulated or delayed by
them. What is simulated is simulated again.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetbench.config import encode, flat
from fleetbench.digests import file_digest, read_json, reading, sealed_json, write_whole
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.profile import table_for
from tuner.recommendation import Arm, Recommendation
from tuner.sequential import ERROR, gone

INPUTS, PROFILE, RUNS = "inputs.json", "profile.toml", "runs"
_TARGET = ("target_loss", "eval_every", "steps")
_LINKS = ("cluster.intra.", "cluster.inter.")
_SHOWN = 8


def keep_inputs(folder: Path, experiment: Experiment, inputs: Mapping[str, Any]) -> None:
    """Leave in a tuning's folder what a later one compares itself with, its profile among it."""
    write_whole(folder / INPUTS, sealed_json(dict(inputs)))
    if experiment.workload.profile is not None:
        shutil.copy(experiment.workload.profile, folder / PROFILE)


@dataclass(frozen=True, slots=True)
class Earlier:
    """A complete tuning. Raises ``ConfigError`` where the folder holds none."""

    folder: Path
    recommendation: Recommendation
    experiment: Experiment
    inputs: Mapping[str, Any]

    @classmethod
    def load(cls, folder: Path) -> Earlier:
        """Read what a tuning has left; ``experiment`` names the profile that it had then."""
        if not (folder / INPUTS).is_file() or not (folder / "recommendation.json").is_file():
            hint = "name a folder that this version's fleetbench tune has printed as that of its recommendation: runs/NAME-tune-..."
            raise ConfigError("is no folder of a complete tuning", "--from", str(folder), hint)
        with reading(folder, "tune without --from"):
            inputs, experiment = read_json((folder / INPUTS).read_text(encoding="utf-8")), Experiment.load(folder / "experiment.toml")
        profile = str((folder / PROFILE).resolve()) if (folder / PROFILE).is_file() else None
        experiment = experiment.replace(workload=dataclasses.replace(experiment.workload, profile=profile))
        return cls(folder, Recommendation.load(folder), experiment, inputs)

    def script(self, base: Experiment, inputs: Mapping[str, Any]) -> Experiment | None:
        """What a user's script was, with its profile, under what ``base`` asks for; none where that is to be found out again."""
        old, asks = self.experiment, base.workload.target_loss is not None
        if self.inputs != inputs or old.run.launcher != "command" or (old.workload.target_loss is not None) != asks:
            return None
        asked = {name: getattr(base.workload, name) for name in _TARGET}
        links = {name: getattr(base.cluster, name) for name in ("intra", "inter", "cores_per_node")}
        return base.replace(
            workload=dataclasses.replace(old.workload, **asked),
            cluster=dataclasses.replace(old.cluster, **links),
            strategy=old.strategy,
            run=dataclasses.replace(base.run, device=old.run.device, backend=old.run.backend, launcher="command"),
        )

    def beside(self, experiment: Experiment, inputs: Mapping[str, Any]) -> Held:
        """What of it holds for ``experiment``, measured where ``inputs`` say."""
        before, now = (dict(flat(encode(one))) for one in (self.experiment, experiment))
        moved = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in ("name", "workload.profile")]
        lines = [f"{key} {before.get(key, 'none')} -> {now.get(key, 'none')}" for key in moved]
        profiles = [None if (path := one.workload.profile) is None else file_digest(Path(path)) for one in (self.experiment, experiment)]
        if other_times := profiles[0] != profiles[1]:
            tables = [table_for(one) for one in (self.experiment, experiment)]
            times = [f"{(table.forward_ns + table.backward_ns) * 1e-6:.4g}" for table in tables]
            lines.append(f"layer times, of a step {times[0]} -> {times[1]} ms")
        elsewhere = [name for name in inputs if self.inputs.get(name) != inputs[name]]
        lines += [f"the {name}" for name in elsewhere]

        run = experiment.run
        by_times = run.device == "emulated" or bool(experiment.cluster.stragglers)
        as_they_are = _LINKS if run.launcher in ("local", "command") and run.device != "emulated" else ()
        target = {f"workload.{name}" for name in _TARGET} & {*moved}
        rest = [key for key in moved if key not in target]
        ran = [key for key in rest if key == "tune.leg_steps" or not key.startswith(("tune.", *as_they_are))]
        legs = not ran and not elsewhere and not (other_times and by_times)
        return Held(
            earlier=self,
            moved=tuple(lines),
            legs=legs,
            targets=legs and not target and "tune.metric" not in moved,
            has_pairs=legs and not {"tune.pairs", "tune.min_gain"} & {*moved},
        )


@dataclass(frozen=True, slots=True)
class Held:
    """What of an earlier tuning holds, by kind."""

    earlier: Earlier
    moved: tuple[str, ...]
    legs: bool
    targets: bool
    has_pairs: bool

    @property
    def note(self) -> str:
        """What has moved, and what is not measured again."""
        more = f" and {len(self.moved) - _SHOWN} more" if len(self.moved) > _SHOWN else ""
        held = "legs, runs to the target" if self.targets else "legs" if self.legs else "nothing"
        return f"since {self.earlier.folder.name} moved: {'; '.join(self.moved[:_SHOWN]) or 'nothing'}{more}. Taken from it: {held}"

    def arm(self, now: Arm) -> Arm | None:
        """What ran under an arm's strategy, and what its legs run, to its ranking at least."""
        arms = self.earlier.recommendation.arms if self.legs else ()
        arm = next((arm for arm in arms if (arm.strategy, arm.timed) == (now.strategy, now.timed) and arm.ratio is not None), None)
        return arm if arm is None or self.targets else dataclasses.replace(arm, target=None)

    @property
    def error_left(self) -> float:
        """Chance of a USE without the gain that finalists may have, but for the one whose pairs hold."""
        found, pairs = self.earlier.recommendation, self.earlier.experiment.tune.pairs
        unspent = 0.0 if self.has_pairs else found.error * (1 - gone(len(found.pairs), pairs, found.ended))
        return found.error_left + unspent if self.legs else ERROR

    def compared(self, now: Arm) -> Recommendation | None:
        """The earlier verdict, if its pairs hold and are this arm's."""
        found = self.earlier.recommendation
        is_finalist = any((arm.name, arm.strategy, arm.timed) == (found.finalist, now.strategy, now.timed) for arm in found.arms)
        return found if self.has_pairs and is_finalist and found.pairs else None

    def copy_runs(self, arm: Arm, runs: Path) -> None:
        """Let the new tuning's folder have the runs of an arm."""
        for name in arm.measured_runs:
            if (self.earlier.folder / RUNS / name).is_dir():
                shutil.copytree(self.earlier.folder / RUNS / name, runs / name, dirs_exist_ok=True)
