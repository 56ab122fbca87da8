"""Refusals: what a training loop does that no strategy can make right, named at the line that does it."""

import inspect
from collections.abc import Collection, Sequence
from typing import NoReturn

import torch
from torch import nn
from torch.amp import GradScaler

from fleetbench.errors import ConfigError
from fleetbench.plan.combination import Combination


def refuse_misplaced(model: nn.Module, device: torch.device) -> None:
    """Raise ``ConfigError`` for a model that is not on one device, of the kind on which trainers meet."""
    places = sorted({str(tensor.device) for tensor in (*model.parameters(), *model.buffers())})
    hint = f"call model.to({device.type!r}) before fleet.distributed_model"
    if len(places) > 1:
        raise ConfigError("lies on several devices, and a trainer has one", "the model", ", ".join(places), hint)
    if torch.device(places[0]).type != device.type:
        raise ConfigError(f"is on {places[0]}, and its trainers meet on {device.type}", "the model", hint=hint)


def refuse_sparse(sparse: Collection[str], what: Combination) -> None:
    """Raise ``ConfigError`` for parameters with sparse gradients that the strategy would gather in a flat buffer."""
    if sparse and what.is_local and (what.merges or what.fuses_update):
        hint = "build the embedding with sparse=False, or drop gradient_merge and fuse_all_optimizer_ops"
        where = f"parameters {', '.join(sorted(sparse)[:3])}"
        raise ConfigError("has sparse gradients, which Local SGD neither merges nor updates as one", where, hint=hint)


def refuse_scaler(what: Combination) -> None:
    """Raise ``ConfigError`` where a GradScaler of the script's own calls ``optimizer.step()``, and would not do what it does under DDP."""
    if what.leaves_averages or not _is_stepped_by_scaler():
        return
    fields = "gradient_merge, amp, Local SGD or enable_backward_optimizer_op_deps = false"
    why = f"with {fields} it would not leave out the update that it leaves out under DDP"
    hint = "take the GradScaler out of the script: with amp = true the strategy scales, and all trainers skip an overflow together"
    raise ConfigError(f"is called by a GradScaler of the script's own, and {why}", "optimizer.step()", hint=hint)


def refuse_again(what: Combination, *, is_attached: bool, dropped: bool) -> None:
    """Raise ``ConfigError`` where a second backward before ``optimizer.step()`` cannot give DistributedDataParallel's gradients.

    ``dropped``: the first one's gradients were thrown away. With gradients averaged over all trainers that is
    everybody's decision; a trainer that is alone with its own would count fewer updates than the others.
    """
    accumulate = (
        "put every backward of a step but the last into `with fleet.no_sync():`; "
        "a GradScaler of the script's own, which leaves out optimizer.step() at an overflow, needs amp = true in its place"
    )
    if not is_attached:
        why, hint = "fleet does not know the optimizer", "call fleet.distributed_optimizer before training"
    elif what.merges or what.updates_by_bucket or what.scales:
        fields = "gradient_merge, enable_backward_optimizer_op_deps = false or amp"
        why, hint = f"{fields} has merged, used or unscaled the first one's gradients already", accumulate
    elif what.is_local and dropped:
        why = "the first one's gradients were thrown away, and this trainer would count fewer updates than the others"
        hint = "skip a batch before its backward, and on every trainer; amp = true skips overflows by itself, without a GradScaler"
    else:
        return
    raise ConfigError(f"a second backward comes before optimizer.step(), and {why}", "loss.backward()", hint=hint)


def refuse_apart(places: Sequence[int]) -> None:
    """Raise ``ConfigError``, on every rank, where trainers that average are at different places of their training."""
    if len(set(places)) > 1:
        what = "trainers average after different steps, so that their parameters are mixed"
        told = f"operations {', '.join(map(str, places))} of ranks 0 to {len(places) - 1}"
        hint = "every trainer needs as many steps, and calls fleet.synchronize, fleet.end_epoch and what saves after the same step"
        raise ConfigError(what, "strategy.adaptive_localsgd", told, hint)


def _is_stepped_by_scaler() -> bool:
    """Whether torch's GradScaler, or a subclass, is among the callers; neither its unscaling nor its fused step leaves another trace."""
    frame = inspect.currentframe()
    while frame is not None:
        scaler = frame.f_locals.get("self") if frame.f_globals.get("__name__") == GradScaler.__module__ else None
        if isinstance(scaler, GradScaler) and scaler.is_enabled():
            return True
        frame = frame.f_back
    return False


def refuse_moved(first: nn.Parameter, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``ConfigError`` where a model was moved or converted since its first parameter was of this type, on this device."""
    if first.dtype != dtype or first.device != device:
        what = "was moved or converted after it was distributed"
        hint = "call model.to(...) before fleet.distributed_model"
        raise ConfigError(what, "the model", f"{first.dtype} on {first.device}, before {dtype} on {device}", hint)


def refuse_unfinished(phase: str, rank: int) -> None:
    """Raise ``ConfigError`` at a forward that comes in the middle of a backward."""
    if phase == "backward":
        hint = "after an exception in a backward trainers are at different places: end the script, and go on from a checkpoint"
        raise ConfigError("the last backward did not come to its end", f"rank {rank}", hint=hint)


def refuse_unused(unused: Sequence[str], num_parameters: int) -> NoReturn:
    """Raise ``ConfigError`` for parameters that the loss did not reach."""
    what = "got no gradient in this step"
    hint = "let the loss reach every parameter, set requires_grad = False on those, or strategy.find_unused_parameters = true"
    raise ConfigError(what, f"parameters {', '.join(unused[:5])}", f"none for {len(unused)} of {num_parameters}", hint)


def refuse_update(phase: str, members: Sequence[nn.Parameter], model: nn.Module) -> None:
    """Raise ``ConfigError`` where an optimizer's step would not be the strategy's update."""
    if phase == "kept":
        what = "the gradients are this trainer's alone: the last backward of this step was inside no_sync"
        hint = "leave fleet.no_sync() before the last backward of a step"
        raise ConfigError(what, "optimizer.step()", hint=hint)
    if phase in ("forward", "backward"):
        raise ConfigError("the optimizer steps before a backward has ended", "optimizer.step()", hint="call loss.backward() first")
    if phase == "idle" and any(parameter.grad is not None for parameter in members):
        raise ConfigError("no backward has come since the last step", "optimizer.step()", hint=_way_out(model))


def refuse_in_step(phase: str, where: str) -> None:
    """Raise ``ConfigError`` for what belongs between two steps."""
    if phase != "idle":
        raise ConfigError("comes in the middle of a step", where, hint="call it after optimizer.step(), or before the next forward")


def _way_out(model: nn.Module) -> str:
    if not model.training:
        return "call model.train() before training"
    return "call model(...) itself, not one of its parts, and then the backward, before the next optimizer.step()"
