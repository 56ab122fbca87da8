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

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from fleetbench.errors import ConfigError
from real.communication.communicators import Errors, collective_errors
from real.compute.living import Undo, nothing_to_undo


def apply_sync_batch_norm(model: nn.Module, group: dist.ProcessGroup, errors: Errors = collective_errors) -> Undo:
    """Make every batch norm of ``model`` one over the ranks of ``group``.

    A module stays the object that it is, with its parameters, buffers, hooks and names: only its
    class changes. ``group`` should carry nothing else while the model runs, because these collectives
    are issued from the forward and the backward. Raises ``ConfigError`` for a batch norm that has a
    forward of its own, or has not seen its number of channels yet.
    """
    if dist.get_world_size(group) == 1:
        return nothing_to_undo
    norms = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    changed: list[tuple[_BatchNorm, type[nn.Module], tuple[str, ...]]] = []
    synchronised = [(module, _synchronised(name, module)) for name, module in norms if not isinstance(module, nn.SyncBatchNorm)]
    on_cuda = _is_on_cuda(model)
    for module, own_class in synchronised:
        added: dict[str, Any] = {"process_group": group} if on_cuda else {"_shared_group": _Group(group, errors)}
        changed.append((module, type(module), tuple(added)))
        module.__dict__.update(added)
        _set_class(module, nn.SyncBatchNorm if on_cuda else own_class)

    def undo() -> None:
        while changed:
            module, before, added = changed.pop()
            _set_class(module, before)
            for name in added:
                del module.__dict__[name]

    return undo


class _Group:
    """A process group that copies of its module share; torch's own cannot be copied. ``errors`` stands around every collective."""

    def __init__(self, group: dist.ProcessGroup, errors: Errors) -> None:
        self.group = group
        self.errors = errors

    def __deepcopy__(self, _memo: object) -> _Group:
        return self


class _Synchronised(_BatchNorm):
    """The forward of a batch norm whose batch is that of all ranks; in evaluation mode a plain one.

    Unequal batches are weighed by their sizes; a rank's may be empty. Statistics are float32 for
    half precision, and the output has the input's type.
    """

    _shared_group: _Group

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's name
        """Normalise ``input`` of shape ``(batch, channels, ...)`` or ``(batch, channels)``.

        Raises ``ConfigError`` where all ranks together have one value a channel.
        """
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]  # torch's
        output: torch.Tensor
        output, mean, squares, count = _normalise(input, self.weight, self.bias, self.eps, self._shared_group)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            self._move_statistics(mean, squares / (count - 1))
        return output

    @torch.no_grad()
    def _move_statistics(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.mul_(1 - share).add_(mean.to(self.running_mean.dtype), alpha=share)
        self.running_var.mul_(1 - share).add_(variance.to(self.running_var.dtype), alpha=share)


class _Synchronised1d(_Synchronised, nn.BatchNorm1d):
    pass


class _Synchronised2d(_Synchronised, nn.BatchNorm2d):
    pass


class _Synchronised3d(_Synchronised, nn.BatchNorm3d):
    pass


class _Normalise(torch.autograd.Function):
    """Input, weight, bias (or None), eps, group -> output, mean, sum of squared distances from it, count."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, group: _Group
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        values = _at_least_float32(x)
        others = _all_but_channels(x)
        sums = torch.cat([values.sum(others), values.new_tensor([x.numel() // x.shape[1]])])
        with group.errors():
            dist.all_reduce(sums, group=group.group)
        count = sums[-1]
        if count.item() <= 1:
            raise ConfigError(
                "needs more than one value a channel over all ranks", "sync_batch_norm", str(tuple(x.shape)), "a larger batch"
            )
        mean = sums[:-1] / count
        centred = values - _over_channels(mean, x)
        squares = centred.square().sum(others)
        with group.errors():
            dist.all_reduce(squares, group=group.group)
        inverse_std = torch.rsqrt(squares / count + eps)
        output = centred * _over_channels(inverse_std if weight is None else inverse_std * weight, x)
        if bias is not None:
            output += _over_channels(bias, x)
        ctx.save_for_backward(x, weight, mean, inverse_std, count)
        ctx.group = group
        ctx.has_bias = bias is not None
        ctx.mark_non_differentiable(mean, squares, count)
        return output.to(x.dtype), mean, squares, count

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: torch.Tensor, *_statistics: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None]:
        x, weight, mean, inverse_std, count = ctx.saved_tensors
        others = _all_but_channels(x)
        dy = _at_least_float32(dy)
        normalised = (_at_least_float32(x) - _over_channels(mean, x)) * _over_channels(inverse_std, x)
        sum_dy, sum_dy_normalised = dy.sum(others), (dy * normalised).sum(others)
        dx = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([sum_dy, sum_dy_normalised])
            with ctx.group.errors():
                dist.all_reduce(sums, group=ctx.group.group)
            shared = _over_channels(sums[0] / count, x) + normalised * _over_channels(sums[1] / count, x)
            dx = ((dy - shared) * _over_channels(inverse_std if weight is None else inverse_std * weight, x)).to(x.dtype)
        dweight = None if weight is None else sum_dy_normalised.to(weight.dtype)
        dbias = sum_dy.to(mean.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return dx, dweight, dbias, None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's; a graph breaks at a collective
def _normalise(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, group: _Group
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _Normalise.apply(x, weight, bias, eps, group)  # type: ignore[no-untyped-call, no-any-return]  # torch's


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [dimension for dimension in range(x.dim()) if dimension != 1]


def _over_channels(vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return vector.view(1, -1, *([1] * (x.dim() - 2)))


_CLASSES: dict[type[nn.Module], type[_Synchronised]] = {
    nn.BatchNorm1d: _Synchronised1d,
    nn.BatchNorm2d: _Synchronised2d,
    nn.BatchNorm3d: _Synchronised3d,
}


def _is_on_cuda(model: nn.Module) -> bool:
    return any(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))


def _synchronised(name: str, module: nn.Module) -> type[_Synchronised]:
    for plain, synchronised in _CLASSES.items():
        if isinstance(module, plain) and type(module).forward is _BatchNorm.forward:
            if type(module) is not plain:
                return type(type(module).__name__, (synchronised, type(module)), {})
            return synchronised
    raise ConfigError(
        "this kind of batch norm cannot be synchronised",
        f"sync_batch_norm: {name or 'the model itself'}",
        type(module).__name__,
        "use BatchNorm1d, 2d or 3d, and let a lazy one see a batch first",
    )


def _set_class(module: nn.Module, new: type[nn.Module]) -> None:
    # nn.Module refuses no class assignment, but its __setattr__ costs a look into three dicts and means nothing here.
    object.__setattr__(module, "__class__", new)
