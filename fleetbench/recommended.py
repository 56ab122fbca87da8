"""Stored recommendations, which ``strategy.auto`` loads: a strategy file for each workload and cluster.

A workload is known by what its plan is made from, the gradients; a cluster by its trainers. The file
``KEY.toml`` holds a ``[strategy]`` table below its digest, and can be read and, without that line, changed as any strategy file.
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
"""Environment variable that names the folder; otherwise ``runs/recommended`` of the working directory."""


def key_of(gradients: Sequence[tuple[str, int, str]], *, trainers: int, trainers_per_node: int, device: str) -> str:
    """Sixteen hexadecimal digits of a workload and cluster: ``gradients`` are names, element counts and types, in any order."""
    known = {"gradients": sorted(list(item) for item in gradients), "trainers": [trainers, trainers_per_node], "device": device}
    return json_digest(known)[:16]


def key_of_profiled(experiment: Experiment, table: LayerTable) -> str:
    """The key of an experiment, or a script, whose layers are known: equal to that of its model on its trainers."""
    gradients = [(gradient.name, gradient.numel, gradient.dtype) for layer in table.layers for gradient in layer.gradients]
    cluster = experiment.cluster
    device = "cuda" if experiment.run.device == "cuda" else "cpu"  # an emulated device's tensors are the host's
    return key_of(gradients, trainers=cluster.trainers, trainers_per_node=cluster.trainers_per_node, device=device)


def folder_of(environment: Mapping[str, str] = os.environ, out: Path = Path("runs")) -> Path:
    """Where recommendations are stored: below ``out``, unless the environment names a folder."""
    return Path(environment.get(VARIABLE) or out / "recommended")


def keep(folder: Path, key: str, strategy: DistributedStrategy, verdict: str) -> Path:
    """Store a strategy, in place of an older one, under the verdict that it stands for; returns its file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}.toml"
    strategy.save(path, *verdict.splitlines())
    return path


def text_of(folder: Path, key: str) -> str:
    """The file of a stored recommendation, as text. Raises ``ConfigError`` where there is none for this workload and cluster."""
    path = folder / f"{key}.toml"
    if not path.is_file():
        what = "there is no recommendation for this model on these trainers"
        hint = f"fleetbench tune -- COMMAND stores one; {VARIABLE} names its folder; or fleet.init(DistributedStrategy.load(FILE))"
        raise ConfigError(what, "strategy.auto", str(path), hint)
    return read_text(path, "tune again, or remove the file")
