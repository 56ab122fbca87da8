"""Refusals: what a training loop does that no strategy can make right, named at the line that does it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NoReturn

import torch
from torch import nn

from fleetbench.errors import ConfigError
from fleetbench.strategy import DistributedStrategy
from real.engine.readiness import any_gradient


def refuse_misfits(first: nn.Parameter, device: torch.device, strategy: DistributedStrategy, sparse: Collection[str]) -> None:
    """Raise ``ConfigError`` where the model, the device on which trainers meet, and the strategy do not go together.

    ``first`` is one of the model's parameters, and tells where it is.
    """
    if first.device.type != device.type:
        hint = f"call model.to({device.type!r}) before fleet.distributed_model"
        raise ConfigError(f"is on {first.device.type}, and its trainers meet on {device.type}", "the model", hint=hint)
    dense_only = strategy.build_strategy.fuse_all_optimizer_ops or strategy.gradient_merge
    if sparse and strategy.is_local and dense_only:
        raise ConfigError(
            "has sparse gradients, which Local SGD neither merges nor updates as one",
            f"parameters {', '.join(sorted(sparse)[:3])}",
            hint="build the embedding with sparse=False, or drop gradient_merge and fuse_all_optimizer_ops",
        )


def refuse_moved(first: nn.Parameter, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``ConfigError`` where a model was moved or converted since its first parameter was of this type, on this device."""
    if first.dtype != dtype or first.device != device:
        raise ConfigError(
            "was moved or converted after it was distributed",
            "the model",
            f"{first.dtype} on {first.device}, before {dtype} on {device}",
            "call model.to(...) before fleet.distributed_model",
        )


def refuse_unfinished(phase: str, rank: int) -> None:
    """Raise ``ConfigError`` at a forward that comes in the middle of a backward."""
    if phase == "backward":
        raise ConfigError(
            "the last backward did not come to its end",
            f"rank {rank}",
            hint="behind an exception in a backward trainers are at different places: end the script, and go on from a checkpoint",
        )


def refuse_stray(name: str | None, model: nn.Module) -> NoReturn:
    """Raise ``ConfigError`` for a gradient that comes where none is expected."""
    raise ConfigError(
        "got a gradient outside its step, or twice in one backward", f"parameter {name}" if name else "a parameter", hint=_way_out(model)
    )


def refuse_unused(unused: Sequence[str], num_parameters: int) -> NoReturn:
    """Raise ``ConfigError`` for parameters that the loss did not reach."""
    raise ConfigError(
        "got no gradient in this step",
        f"parameters {', '.join(unused[:5])}",
        f"none for {len(unused)} of {num_parameters}",
        "let the loss reach every parameter, set requires_grad = False on those, or strategy.find_unused_parameters = true",
    )


def refuse_update(phase: str, members: Sequence[nn.Parameter], model: nn.Module) -> None:
    """Raise ``ConfigError`` where an optimizer's step would not be the strategy's update."""
    if phase == "kept":
        raise ConfigError(
            "the gradients are this trainer's alone: every backward of this step was inside no_sync",
            "optimizer.step()",
            hint="leave fleet.no_sync() before the last backward of a step",
        )
    if phase in ("forward", "backward"):
        raise ConfigError("the optimizer steps before a backward has ended", "optimizer.step()", hint="call loss.backward() first")
    if phase == "idle" and any_gradient(members):
        raise ConfigError("no backward has come since the last step", "optimizer.step()", hint=_way_out(model))


def refuse_in_step(phase: str, where: str) -> None:
    """Raise ``ConfigError`` for what belongs between two steps."""
    if phase != "idle":
        raise ConfigError("comes in the middle of a step", where, hint="call it behind optimizer.step(), or before the next forward")


def _way_out(model: nn.Module) -> str:
    if not model.training:
        return "call model.train() before training"
    return "call model(...) itself, not one of its parts, and then the backward, before the next optimizer.step()"
