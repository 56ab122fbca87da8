"""An optimizer's state as a part of a checkpoint: by ``state_dict()`` and ``load_state_dict()``, whose it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fleetbench.errors import ConfigError
from real.checkpoints.plain import Tensors, pack, unpack

_WHERE = "the optimizer"


def pack_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Tensors, name: str) -> dict[str, Any]:
    """The optimizer as plain data; its tensors go to ``tensors``, under names that begin with ``name``.

    Raises ``ConfigError`` for state that is no plain data.
    """
    return {
        "class": type(optimizer).__qualname__,
        "groups": groups_of(optimizer, model),
        "state": pack(optimizer.state_dict(), tensors, name, _WHERE),
    }


def groups_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """The names of each group's parameters in the model; empty names for others, which are not trained."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]


def refuse_other(optimizer: torch.optim.Optimizer, model: nn.Module, data: Mapping[str, Any], where: str) -> None:
    """Raise ``ConfigError`` unless ``data`` was packed from an optimizer of the same class, with the same groups."""
    own = type(optimizer).__qualname__
    if data["class"] != own:
        raise ConfigError("is another optimizer's", where, f"saved {data['class']}, here {own}", "use the optimizer that was saved")
    groups = groups_of(optimizer, model)
    if len(data["groups"]) != len(groups):
        counts = f"saved {len(data['groups'])}, here {len(groups)}"
        raise ConfigError("has another number of parameter groups", where, counts, "build the optimizer as it was built when it was saved")
    for number, (saved, here) in enumerate(zip(data["groups"], groups, strict=True)):
        if saved != here:
            differs = next((f"{a!r}, here {b!r}" for a, b in zip(saved, here, strict=False) if a != b), f"{len(saved)}, here {len(here)}")
            raise ConfigError(
                f"group {number} holds other parameters, or in another order",
                where,
                f"saved {differs}",
                "build the groups as they were saved",
            )


def unpack_optimizer(optimizer: torch.optim.Optimizer, data: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Load what ``pack_optimizer`` made. State keeps the type it was saved in."""
    state = unpack(data["state"], tensors)
    optimizer.load_state_dict(state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, saved in state.get("state", {}).items():
        if isinstance(index, int) and isinstance(saved, dict):
            _keep_types(optimizer.state.get(parameters[index], {}), saved, parameters[index].device)


def _keep_types(loaded: dict[str, Any], saved: Mapping[str, Any], device: torch.device) -> None:
    """Torch casts floating state to the parameter's type, though it was wider where an optimizer keeps it wider."""
    for name, value in saved.items():
        kept = loaded.get(name)
        if isinstance(value, torch.Tensor) and isinstance(kept, torch.Tensor) and kept.dtype != value.dtype:
            loaded[name] = value.to(device)
