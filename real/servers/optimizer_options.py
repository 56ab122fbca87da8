"""What a server is told of the user's optimizer: which of its own it is, and with what options."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fleetbench.errors import ConfigError
from fleetbench.workload import Workload
from real.servers.parameters import Parameters
from real.servers.spec import OPTIONS

Told = tuple[str, dict[str, float]]
"""Name and options of an optimizer, as ``real.servers.spec.OPTIONS`` has them."""
_HINT = "servers have torch.optim.SGD, Adagrad, Adam and SparseAdam"
_KINDS = {
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    torch.optim.Adam: "adam",
    torch.optim.SparseAdam: "sparse_adam",
}
_NOT_THERE = ("maximize", "amsgrad", "dampening", "decoupled_weight_decay")


def options_of(optimizer: torch.optim.Optimizer, parameters: Parameters) -> Told:
    """Name and options. Raises ``ConfigError`` for another optimizer, several groups that differ, or options that servers do not have."""
    name, group = _KINDS.get(type(optimizer)), optimizer.param_groups[0]
    if name is None:
        raise ConfigError("is no optimizer of a server", "optimizer", type(optimizer).__name__, _HINT)
    refuse_changes(optimizer, fixed_options(optimizer))
    rate_of(optimizer)
    held = {id(parameter) for every in optimizer.param_groups for parameter in every["params"]}
    for missing in (named for named, own in parameters.named.items() if id(own) not in held):
        hint = "servers update all; set requires_grad = False for the others"
        raise ConfigError("is trained by no optimizer", f"parameter {missing}", hint=hint)
    for option in _NOT_THERE:
        if group.get(option):
            hint = f"set {option} = {'0' if option == 'dampening' else 'False'}"
            raise ConfigError(f"has {option}, which servers do not have", "optimizer", repr(group[option]), hint)
    if group.get("weight_decay") and parameters.tables:
        what = "has a weight decay, and embeddings have sparse gradients"
        raise ConfigError(what, "optimizer", repr(float(group["weight_decay"])), "set weight_decay = 0")
    if name == "sparse_adam" and parameters.dense_names:
        what = "has a dense gradient, and SparseAdam trains sparse ones alone"
        raise ConfigError(what, f"parameter {parameters.dense_names[0]}", hint="servers' Adam trains both")
    if name == "sgd" and group["momentum"]:
        name = "momentum"
    first, second = group.get("betas", (0.0, 0.0))
    given = {"weight_decay": 0.0, **group, "beta1": first, "beta2": second}
    return name, {option: float(given[option]) for option in OPTIONS[name]}


def options_for(workload: Workload) -> Told:
    """The same of an experiment's optimizer, which nobody has made."""
    options = {**OPTIONS[workload.optimizer], "weight_decay": workload.weight_decay}
    if "momentum" in options:
        options["momentum"] = workload.momentum
    return workload.optimizer, options


def fixed_options(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """What servers are told of an optimizer's options once, as its first group has it: all but the learning rate."""
    return {name: optimizer.param_groups[0][name] for name in optimizer.defaults if name != "lr"}


def refuse_changes(optimizer: torch.optim.Optimizer, fixed: Mapping[str, object]) -> None:
    """Raise ``ConfigError`` where a group has another option than ``fixed``: servers would go on with that one."""
    for group in optimizer.param_groups:
        for name, value in fixed.items():
            if group[name] != value:
                raise _differing(optimizer, name) if optimizer.param_groups[0][name] == value else _changed(name, group[name])


def rate_of(optimizer: torch.optim.Optimizer) -> float:
    """The learning rate of a step. Raises ``ConfigError`` where groups have several, or it is no number."""
    rate = float(optimizer.param_groups[0]["lr"])
    if any(float(group["lr"]) != rate for group in optimizer.param_groups[1:]):
        raise _differing(optimizer, "lr")
    if not math.isfinite(rate):
        raise ConfigError("has a learning rate that is no number", "optimizer", repr(rate), "look at what schedules it")
    return rate


def _differing(optimizer: torch.optim.Optimizer, name: str) -> ConfigError:
    what = f"has groups with other options: {name}"
    return ConfigError(what, "optimizer", type(optimizer).__name__, "servers apply one set of options to all parameters")


def _changed(name: str, value: object) -> ConfigError:
    hint = "servers were told the options when training began; of a scheduler's, OneCycleLR(cycle_momentum=False) leaves them alone"
    return ConfigError(f"has changed its {name}, and servers follow the learning rate alone", "optimizer", repr(value), hint)
