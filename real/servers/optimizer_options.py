"""What a server is told of the user's optimizer: which of its own it is, and with what options."""

from __future__ import annotations

from typing import Any

import torch

from fleetbench.errors import ConfigError
from real.servers.parameters import Parameters

_HINT = "servers have torch.optim.SGD, Adagrad, Adam and SparseAdam"


def options_of(optimizer: torch.optim.Optimizer, parameters: Parameters) -> tuple[str, dict[str, float]]:
    """Name and options. Raises ``ConfigError`` for another optimizer, several groups that differ, or options that servers do not have."""
    kind = type(optimizer)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    group = groups[0]
    if any(other != group for other in groups):
        raise ConfigError("has groups with other options", "optimizer", kind.__name__, "servers apply one set of options to all parameters")
    held = {id(parameter) for every in optimizer.param_groups for parameter in every["params"]}
    missing = [
        name for name, own in zip(parameters.dense_names + parameters.table_names, _members(parameters), strict=True) if id(own) not in held
    ]
    if missing:
        raise ConfigError(
            "is trained by no optimizer", f"parameter {missing[0]}", hint="servers update all; set requires_grad = False for the others"
        )
    if group.get("maximize") or group.get("amsgrad") or group.get("dampening"):
        raise ConfigError("has an option that servers do not have", "optimizer", "maximize, amsgrad or dampening", "switch it off")
    decay = float(group.get("weight_decay", 0.0))
    if decay and parameters.tables:
        raise ConfigError("has a weight decay, and embeddings have sparse gradients", "optimizer", repr(decay), "set weight_decay = 0")
    if kind is torch.optim.SGD:
        if not group["momentum"]:
            return "sgd", {"weight_decay": decay}
        return "momentum", {"momentum": float(group["momentum"]), "nesterov": float(group["nesterov"]), "weight_decay": decay}
    if kind is torch.optim.Adagrad:
        names = ("lr_decay", "weight_decay", "initial_accumulator_value", "eps")
        return "adagrad", {name: float(group[name]) for name in names}
    if kind in (torch.optim.Adam, torch.optim.SparseAdam):
        first, second = group["betas"]
        if group.get("decoupled_weight_decay"):
            raise ConfigError("has an option that servers do not have", "optimizer", "decoupled_weight_decay", "switch it off")
        return "adam", {"beta1": float(first), "beta2": float(second), "eps": float(group["eps"]), "weight_decay": decay}
    raise ConfigError("is no optimizer of a server", "optimizer", kind.__name__, _HINT)


def _members(parameters: Parameters) -> list[Any]:
    return [*parameters._dense, *parameters._tables]  # noqa: SLF001  # a friend
