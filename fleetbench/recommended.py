"""Stored recommendations, which ``strategy.auto`` loads: one strategy file for each workload and cluster.

A workload is identified by its gradients, from which the plan is made, and a cluster by its trainers.
``KEY.toml`` holds a ``[strategy]`` table, which may be edited.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from fleetbench.digests import json_digest, read_text
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.layers import LayerTable
from fleetbench.strategy import DistributedStrategy

VARIABLE = "FLEETBENCH_RECOMMENDED"
"""Environment variable that names the folder. Default: ``runs/recommended`` in the working directory."""


def key_of(gradients: Sequence[tuple[str, int, str]], *, trainers: int, trainers_per_node: int, device: str) -> str:
    """Return 16 hexadecimal digits that identify a workload and cluster.

    ``gradients`` are names, element counts and types, in any order.
    """
    known = {"gradients": sorted(list(item) for item in gradients), "trainers": [trainers, trainers_per_node], "device": device}
    return json_digest(known)[:16]


def key_of_profiled(experiment: Experiment, table: LayerTable) -> str:
    """Return the key of an experiment or script whose layers are those of ``table``."""
    gradients = [(gradient.name, gradient.numel, gradient.dtype) for layer in table.layers for gradient in layer.gradients]
    cluster = experiment.cluster
    device = "cuda" if experiment.run.device == "cuda" else "cpu"  # an emulated device's tensors are the host's
    return key_of(gradients, trainers=cluster.trainers, trainers_per_node=cluster.trainers_per_node, device=device)


def folder_of(environment: Mapping[str, str] = os.environ, out: Path = Path("runs")) -> Path:
    """Return the folder of recommendations: below ``out``, unless the environment names a folder."""
    return Path(environment.get(VARIABLE) or out / "recommended")


def keep(folder: Path, key: str, strategy: DistributedStrategy, verdict: str) -> Path:
    """Store a strategy together with its verdict, replacing an older one, and return the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}.toml"
    strategy.save(path, *verdict.splitlines())
    return path


def text_of(folder: Path, key: str) -> str:
    """Return the text of the recommendation stored for ``key``. Raises ``ConfigError`` if there is none."""
    path = folder / f"{key}.toml"
    if not path.is_file():
        others = len(list(folder.glob("*.toml"))) if folder.is_dir() else 0
        what = "there is no recommendation for this model on these trainers"
        hint = f"fleetbench tune -- COMMAND stores one; {VARIABLE} names its folder; or fleet.init(DistributedStrategy.load(FILE))"
        raise ConfigError(what, "strategy.auto", f"{path}; {others} for others", hint)
    return read_text(path, "tune again, or remove the file")
