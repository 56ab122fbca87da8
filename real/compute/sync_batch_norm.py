"""Synchronised batch norm: a layer's batch is that of all trainers together.

With n samples per channel over all ranks: mean = sum(x) / n, var = sum((x - mean)^2) / n, in two all-reduces,
because the difference of two large sums would lose the variance of data far from zero. Autograd passes
through both, so that a backward has two all-reduces as well. Gradients of weight and bias are a rank's own;
the exchange averages them.

On CUDA, torch's own SyncBatchNorm does the same with fused kernels.
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
from real.compute.mixed_precision import in_float32


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

    Batches of different sizes are weighted by size; a rank's batch may be empty. Statistics are float32 for
    half precision, and the output has the input's type. The forward raises ``ConfigError`` if all ranks
    together have one value per channel.
    """

    def wrap(plain: Forward) -> Forward:
        def forward(input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's name
            if not module.training:
                return cast(torch.Tensor, plain(input))
            module._check_input_dim(input)  # noqa: SLF001  # as its own forward does
            output: torch.Tensor
            output, mean, squares, count = _normalise(input, module.weight, module.bias, module.eps, group, errors)
            if module.track_running_stats and module.running_mean is not None and module.running_var is not None:
                _move_statistics(module, mean, squares / (count - 1))
            return output

        return forward

    return override_forward(module, wrap)


@torch.no_grad()
def _move_statistics(module: _BatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
    assert module.running_mean is not None
    assert module.running_var is not None
    assert module.num_batches_tracked is not None
    module.num_batches_tracked.add_(1)
    share = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
    module.running_mean.mul_(1 - share).add_(mean.to(module.running_mean.dtype), alpha=share)
    module.running_var.mul_(1 - share).add_(variance.to(module.running_var.dtype), alpha=share)


class _Sum(torch.autograd.Function):
    """A tensor's sum over the ranks of a group.

    Every rank's loss depends on it, so its gradient is the sum of all ranks' gradients.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, errors: Errors) -> torch.Tensor:
        ctx.group, ctx.errors = group, errors
        total = tensor.clone(memory_format=torch.contiguous_format)
        with errors():
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Sum.apply(gradient, ctx.group, ctx.errors), None, None  # type: ignore[no-untyped-call]  # torch's


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's; a graph breaks at a collective
def _normalise(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, group: dist.ProcessGroup, errors: Errors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return output, mean, sum of squared distances from it, and count."""
    values = in_float32(x)
    others = [dimension for dimension in range(x.dim()) if dimension != 1]
    size = values.new_tensor([x.numel() // x.shape[1]])
    sums = _Sum.apply(torch.cat([values.sum(others), size]), group, errors)  # type: ignore[no-untyped-call]  # torch's
    count = sums[-1].detach()
    if count.item() <= 1:
        raise ConfigError("needs more than one value per channel over all ranks", "sync_batch_norm", str(tuple(x.shape)), "a larger batch")
    mean = sums[:-1] / count
    centred = values - _over_channels(mean, x)
    squares = _Sum.apply(centred.square().sum(others), group, errors)  # type: ignore[no-untyped-call]  # torch's
    output = centred * _over_channels(torch.rsqrt(squares / count + eps), x)
    if weight is not None:
        output = output * _over_channels(weight, x)
    if bias is not None:
        output = output + _over_channels(bias, x)
    return output.to(x.dtype), mean.detach(), squares.detach(), count


def _over_channels(vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return vector.view(1, -1, *([1] * (x.dim() - 2)))


def _is_on_cuda(model: nn.Module) -> bool:
    return any(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
