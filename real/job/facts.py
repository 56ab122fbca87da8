"""Facts about a user's script that planning, simulation and the verdict need."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fleetbench.cluster import Cluster
from fleetbench.config import Config
from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy

if TYPE_CHECKING:
    import torch

MODEL = "script:"
"""Prefix of the model name of a script's workload."""
_LEAST_LR = 1e-12
"""Smallest learning rate: it replaces 0, with which a schedule may begin but which no workload accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts(Config):
    """Facts about a script, collected on rank 0 after a few steps under the script's own strategy."""

    trainers: int
    trainers_per_node: int
    backend: Literal["gloo", "nccl"]
    device: Literal["cpu", "cuda"]
    strategy: DistributedStrategy
    """Strategy that the script passes to ``fleet.init``."""
    optimizer: str
    """Name of the optimizer's class."""
    lr: float
    momentum: float
    weight_decay: float
    dtype: str
    """Type of the first trained parameter."""
    batch_size: int | None = None
    """First dimension of the model's first input; ``None`` if the model gets no tensor."""
    reports_loss: bool = False
    """Whether the script calls ``fleet.report``."""
    notes: tuple[str, ...] = ()
    """Notes about the script."""


def facts_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **known: Any) -> Facts:
    """Return the facts about a script's model and optimizer; ``known`` has the other fields."""
    group, first = optimizer.param_groups[0], next(parameter for parameter in model.parameters() if parameter.requires_grad)
    return Facts(
        optimizer=type(optimizer).__name__,
        lr=float(group["lr"]),
        momentum=float(group.get("momentum", 0.0)),
        weight_decay=float(group.get("weight_decay", 0.0)),
        dtype=str(first.dtype).removeprefix("torch."),
        **known,
    )


def optimizer_name(facts: Facts) -> Literal["sgd", "momentum", "adagrad", "adam"]:
    """Return the registry optimizer with as many state tensors per parameter as the script's."""
    if facts.optimizer == "SGD":
        return "momentum" if facts.momentum else "sgd"
    return "adagrad" if facts.optimizer in ("Adagrad", "RMSprop") else "adam"


def experiment_of(base: Experiment, facts: Facts, command: tuple[str, ...]) -> Experiment:
    """Return a script's experiment. Its workload, cluster and strategy are those of ``facts``.

    Tuning, target and links are those of ``base``.
    """
    nodes, rest = divmod(facts.trainers, facts.trainers_per_node)
    cluster = Cluster(nodes=1 if rest else nodes, trainers_per_node=facts.trainers if rest else facts.trainers_per_node)
    workload = replace(
        base.workload,
        model=MODEL + script_name(command),
        model_options={},
        layers=(),
        data="script",
        data_options={},
        dtype="float64" if facts.dtype == "float64" else "float32",
        batch_size=facts.batch_size or 1,
        optimizer=optimizer_name(facts),
        lr=max(facts.lr, _LEAST_LR) if math.isfinite(facts.lr) else _LEAST_LR,
        momentum=facts.momentum if 0 <= facts.momentum < 1 else 0.0,
        weight_decay=max(0.0, facts.weight_decay),
        target_loss=base.workload.target_loss if facts.reports_loss else None,
        profile=None,
    )
    return base.replace(
        workload=workload,
        cluster=replace(cluster, intra=base.cluster.intra, inter=base.cluster.inter, cores_per_node=base.cluster.cores_per_node),
        strategy=facts.strategy,
        run=replace(base.run, device=facts.device, backend=facts.backend, launcher="command"),
    )


def script_name(command: tuple[str, ...]) -> str:
    """Return the last Python file of a command line, or else its first word, without folders."""
    files = [word for word in command if word.endswith(".py")]
    return Path(files[-1] if files else command[0]).name
