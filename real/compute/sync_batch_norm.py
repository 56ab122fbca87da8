"""Synchronised batch norm: a layer's batch is that of all trainers together.

With n samples a channel over all ranks, forward: mean = sum(x) / n, var = sum((x - mean)^2) / n,
two all-reduces, because the difference of two large sums would lose the variance of data far from
zero. Backward, with xhat the normalised input and dy the gradient: dx = weight / std x
(dy - (sum(dy) + xhat sum(dy xhat)) / n), one all-reduce of the two sums (Ioffe and Szegedy, arXiv
1502.03167, section 3). Gradients of weight and bias are a rank's own; averaging them is the
exchange's business.

On CUDA torch's own SyncBatchNorm does the same with fused kernels.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from fleetbench.errors import ConfigError
from real.communication.communicators import Errors, collective_errors
from real.compute.living import Forward, Undo, nothing_to_undo, override_forward


def apply_sync_batch_norm(model: nn.Module, group: dist.ProcessGroup, errors: Errors = collective_errors) -> Undo:
    """Make every batch norm of ``model`` one over the ranks of ``group``.

    A module stays the object that it is, with its parameters, buffers, hooks and names. ``group`` should carry
    nothing else while the model runs, because these collectives are issued from the forward and the backward.
    Raises ``ConfigError`` for a batch norm that has a forward of its own, or has not seen its number of channels yet.
    """
    if dist.get_world_size(group) == 1:
        return nothing_to_undo
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

    Unequal batches are weighed by their sizes; a rank's may be empty. Statistics are float32 for
    half precision, and the output has the input's type. The forward raises ``ConfigError`` where all ranks
    together have one value a channel.
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


class _Normalise(torch.autograd.Function):
    """Input, weight, bias (or None), eps, group, errors -> output, mean, sum of squared distances from it, count."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
        errors: Errors,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        values = _at_least_float32(x)
        others = _all_but_channels(x)
        sums = torch.cat([values.sum(others), values.new_tensor([x.numel() // x.shape[1]])])
        with errors():
            dist.all_reduce(sums, group=group)
        count = sums[-1]
        if count.item() <= 1:
            raise ConfigError(
                "needs more than one value a channel over all ranks", "sync_batch_norm", str(tuple(x.shape)), "a larger batch"
            )
        mean = sums[:-1] / count
        centred = values - _over_channels(mean, x)
        squares = centred.square().sum(others)
        with errors():
            dist.all_reduce(squares, group=group)
        inverse_std = torch.rsqrt(squares / count + eps)
        output = centred * _over_channels(inverse_std if weight is None else inverse_std * weight, x)
        if bias is not None:
            output += _over_channels(bias, x)
        ctx.save_for_backward(x, weight, mean, inverse_std, count)
        ctx.group, ctx.errors = group, errors
        ctx.has_bias = bias is not None
        ctx.mark_non_differentiable(mean, squares, count)
        return output.to(x.dtype), mean, squares, count

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: torch.Tensor, *_statistics: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None, None]:
        x, weight, mean, inverse_std, count = ctx.saved_tensors
        others = _all_but_channels(x)
        dy = _at_least_float32(dy)
        normalised = (_at_least_float32(x) - _over_channels(mean, x)) * _over_channels(inverse_std, x)
        sum_dy, sum_dy_normalised = dy.sum(others), (dy * normalised).sum(others)
        dx = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([sum_dy, sum_dy_normalised])
            with ctx.errors():
                dist.all_reduce(sums, group=ctx.group)
            shared = _over_channels(sums[0] / count, x) + normalised * _over_channels(sums[1] / count, x)
            dx = ((dy - shared) * _over_channels(inverse_std if weight is None else inverse_std * weight, x)).to(x.dtype)
        dweight = None if weight is None else sum_dy_normalised.to(weight.dtype)
        dbias = sum_dy.to(mean.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return dx, dweight, dbias, None, None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's; a graph breaks at a collective
def _normalise(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, group: dist.ProcessGroup, errors: Errors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _Normalise.apply(x, weight, bias, eps, group, errors)  # type: ignore[no-untyped-call, no-any-return]  # torch's


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [dimension for dimension in range(x.dim()) if dimension != 1]


def _over_channels(vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return vector.view(1, -1, *([1] * (x.dim() - 2)))


def _is_on_cuda(model: nn.Module) -> bool:
    return any(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
