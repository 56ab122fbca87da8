"""``strategy.auto``: the recommendation that is stored for a script's model on its trainers."""

from __future__ import annotations

import torch
from torch import nn

from fleetbench.errors import ConfigError
from fleetbench.recommended import folder_of, key_of, text_of
from fleetbench.strategy import DistributedStrategy
from real.checkpoints.meeting import Meeting


def refuse_beside_auto(strategy: DistributedStrategy) -> None:
    """Raise ``ConfigError`` for a strategy that asks for a recommendation and sets other fields."""
    others = [name for name in strategy.changes() if name != "auto"]
    if others:
        hint = "leave them out, or load the recommendation and change it: DistributedStrategy.load(FILE).replace(...)"
        raise ConfigError("is what chooses these fields", "strategy.auto", ", ".join(others), hint)


def model_key(model: nn.Module, *, trainers: int, trainers_per_node: int, device: torch.device) -> str:
    """Under which name a recommendation for this model on these trainers is stored."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    gradients = [(name, parameter.numel(), str(parameter.dtype).removeprefix("torch.")) for name, parameter in trained]
    return key_of(gradients, trainers=trainers, trainers_per_node=trainers_per_node, device=device.type)


def recommended(model: nn.Module, meeting: Meeting, device: torch.device, trainers_per_node: int) -> DistributedStrategy:
    """The strategy that rank 0 finds; every trainer calls it. Raises ``ConfigError`` where there is none, on all trainers."""
    folder = folder_of()
    key = model_key(model, trainers=meeting.trainers, trainers_per_node=trainers_per_node, device=device)
    text = ""
    with meeting.together("strategy.auto"):
        if meeting.rank == 0:
            text = text_of(folder, key)
    return DistributedStrategy.parse(meeting.texts(text)[0], str(folder / f"{key}.toml"))
