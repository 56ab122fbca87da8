"""Synchronised batch norm: a layer's batch is that of all trainers together.

On CUDA, torch's own SyncBatchNorm. torch has none for the CPU: there, a layer gets the batches of all trainers by an
all-reduce, normalises them as one, and returns the trainer's own part, so that a backward has an all-reduce as well.
Gradients of weight and bias are a rank's own; the exchange averages them.
"""

import contextlib
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fleetbench.errors import ConfigError
from real.communication.communicators import Errors, collective_errors
from real.compute.living import Forward, Undo, override_forward


def apply_sync_batch_norm(model: nn.Module, group: dist.ProcessGroup, errors: Errors = collective_errors) -> Undo:
    """Make every batch norm of ``model`` use the joint batch of all ranks of ``group``.

    Each module stays the same object, with its parameters, buffers, hooks and names. ``group`` should carry nothing
    else while the model runs, because the batch norms issue collectives on it in forward and backward. Raises
    ``ConfigError`` for a batch norm with its own forward, or with a number of channels not yet known.
    """
    if dist.get_world_size(group) == 1:
        return lambda: None
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and "BatchNorm" in module.original_name:
            hint = "leave the part with the batch norm unscripted, or drop sync_batch_norm"
            raise ConfigError("a scripted or traced batch norm cannot be synchronised", f"sync_batch_norm: {name}", hint=hint)
    norms = [item for item in model.named_modules() if isinstance(item[1], _BatchNorm) and not isinstance(item[1], nn.SyncBatchNorm)]
    for name, module in norms:
        has_torchs = getattr(module.forward, "__func__", None) is _BatchNorm.forward
        if not has_torchs or not isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            what = "this kind of batch norm cannot be synchronised"
            hint = "use BatchNorm1d, 2d or 3d, and let a lazy one see a batch first"
            raise ConfigError(what, f"sync_batch_norm: {name or 'the model itself'}", type(module).__name__, hint)
    change = _become_torchs if _is_on_cuda(model) else partial(_override, errors=errors)
    undo = contextlib.ExitStack()
    for _, module in norms:
        undo.callback(change(module, group))
    return undo.close


def _become_torchs(module: nn.Module, group: dist.ProcessGroup) -> Undo:
    before = type(module)
    module.__dict__["process_group"] = group
    module.__class__ = nn.SyncBatchNorm

    def undo() -> None:
        module.__class__ = before
        del module.__dict__["process_group"]

    return undo


def _override(module: _BatchNorm, group: dist.ProcessGroup, errors: Errors) -> Undo:
    """Give the module a forward whose batch is that of all ranks; in evaluation mode it is the plain one.

    Ranks' batches may have different sizes.
    """

    def wrap(plain: Forward) -> Forward:
        @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's; a graph breaks at a collective
        def forward(input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's name
            if not module.training:
                return cast(torch.Tensor, plain(input))
            sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
            rank = dist.get_rank(group)
            sizes[rank] = len(input)
            with errors():
                dist.all_reduce(sizes, group=group)
            before = int(sizes[:rank].sum())
            joint = _Joint.apply(input, slice(before, before + len(input)), int(sizes.sum()), group, errors)  # type: ignore[no-untyped-call]  # torch's
            return cast(torch.Tensor, plain(joint)[before : before + len(input)])

        return cast(Forward, forward)

    return override_forward(module, wrap)


class _Joint(torch.autograd.Function):
    """The batches of all ranks. Every rank's loss depends on them, so gradients are the sum of all ranks'."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, place: slice, size: int, group: dist.ProcessGroup, errors: Errors) -> torch.Tensor:
        ctx.place, ctx.group, ctx.errors = place, group, errors
        joint = own.new_zeros(size, *own.shape[1:])
        joint[place] = own
        with errors():
            dist.all_reduce(joint, group=group)
        return joint

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        with ctx.errors():
            dist.all_reduce(total, group=ctx.group)
        return total[ctx.place], None, None, None, None


def _is_on_cuda(model: nn.Module) -> bool:
    return any(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
