"""Store of trajectories: each is trained once, and then known by its key, in this process and below ``--out``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from fleetbench.digests import MANIFEST, read_manifest, reading
from fleetbench.experiment import Experiment
from fleetbench.store import new_folder, new_run_id
from sim.learning.training import Progress, train
from sim.learning.trajectory import Trajectory, key_of, learnt_from

FOLDER = "learnt"
_HINT = "remove this folder: the virtual trainers then train again"


class Trajectories:
    """Trains what is not known yet."""

    def __init__(self, root: Path, say: Callable[[str], None]) -> None:
        """``root``: ``--out``; ``say`` hears of the memory before a training takes it."""
        self._root = root / FOLDER
        self._say = say
        self._known: dict[str, Trajectory] = {}

    def of(self, experiment: Experiment, progress: Progress | None = None) -> Trajectory:
        """What the experiment's trainers learn. Raises ``ConfigError`` for what virtual trainers do not execute."""
        key = key_of(experiment)
        if key not in self._known:
            found = next((path.parent for path in self._root.glob(f"*-{key}-*/{MANIFEST}")), None)
            self._known[key] = self._trained(experiment, key, progress) if found is None else _read(found)
        return self._known[key]

    def _trained(self, experiment: Experiment, key: str, progress: Progress | None) -> Trajectory:
        found = train(experiment, progress, say=self._say)
        with new_folder(learnt_from(experiment), "trajectory", self._root, f"{key}-{new_run_id()}") as (folder, _manifest):
            pd.DataFrame(found.losses, columns=[str(rank) for rank in range(found.losses.shape[1])]).to_parquet(folder / "losses.parquet")
            (folder / "trajectory.json").write_text(json.dumps(found.to_dict()), encoding="utf-8")
        return found


def _read(folder: Path) -> Trajectory:
    read_manifest(folder, _HINT)
    with reading(folder, _HINT):
        losses = pd.read_parquet(folder / "losses.parquet").to_numpy()
        return Trajectory.from_dict(json.loads((folder / "trajectory.json").read_text(encoding="utf-8")), losses)
