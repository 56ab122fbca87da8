"""Buckets: where a plan's gradients and parameters lie, so that one collective carries many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from fleetbench.plan.fusion import Bucket
from fleetbench.plan.operations import Operation
from real.communication.communicators import Communicators

copy_all = torch._foreach_copy_  # torch has no public name for copying a list of tensors at once
_SUM_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""In which type gradients of small types are summed up over steps."""


def _put(function: Callable[..., Any], pairs: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Call a function of lists with the pairs that have a gradient."""
    whole = [(view, gradient) for view, gradient in pairs if gradient is not None]
    if whole:
        function(*map(list, zip(*whole, strict=True)))


def views_of(buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of a flat buffer, one a parameter, one after the other, in the parameters' shapes and strides.

    A parameter whose strides leave gaps or overlap has a contiguous view.
    """
    ends = accumulate(parameter.numel() for parameter in parameters)
    return [
        buffer[end - parameter.numel() : end].as_strided(parameter.shape, _strides(parameter))
        for parameter, end in zip(parameters, ends, strict=True)
    ]


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gap or overlap, in whatever order of dimensions."""
    if tensor.numel() == 0:
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    if is_dense(tensor):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


class GradientBucket:
    """A flat buffer of gradients, with a view for each of a bucket's parameters.

    A step's gradient is where autograd put it, until ``pack`` moves it into the buffer and lets
    ``.grad`` be the view. Where steps share an update, ``accumulate`` adds it to a sum beside the
    buffer, and ``release`` makes the sum the gradient, in the buffer.
    """

    def __init__(self, bucket: Bucket, parameters: Sequence[nn.Parameter]) -> None:
        self.id = bucket.id
        self.parameters = tuple(parameters)
        self.merged = 0
        """Steps in the sum."""
        self._numel = bucket.numel
        self._sum: torch.Tensor | None = None
        self._sum_views: list[torch.Tensor] = []

    @cached_property
    def buffer(self) -> torch.Tensor:
        """Made at first use: where a plan replaces another, that one's gradients are still there until the loop clears them."""
        first = self.parameters[0]
        return torch.zeros(self._numel, dtype=first.dtype, device=first.device)

    @property
    def values(self) -> torch.Tensor:
        """The gradients' numbers, after ``pack``."""
        return self.buffer

    @cached_property
    def views(self) -> list[torch.Tensor]:
        """Each parameter's part of the buffer."""
        return views_of(self.buffer, self.parameters)

    @torch.no_grad()
    def pack(self) -> None:
        """Let the gradients live in the buffer; a parameter that has none gets zeros."""
        strange = [(view, parameter) for view, parameter in zip(self.views, self.parameters, strict=True) if parameter.grad is not view]
        _put(copy_all, [(view, parameter.grad) for view, parameter in strange])
        for view, parameter in strange:
            if parameter.grad is None:
                view.zero_()
            parameter.grad = view

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the step's gradients to the sum; they stay where they are."""
        total = self._make_sum()
        gradients = [parameter.grad for parameter in self.parameters]
        if self.merged == 0 and any(gradient is None for gradient in gradients):
            total.zero_()
        _put(copy_all if self.merged == 0 else torch._foreach_add_, zip(self._sum_views, gradients, strict=True))
        self.merged += 1

    @torch.no_grad()
    def release(self, divisor: int) -> None:
        """Make the sum over ``divisor`` the gradient, and begin a new sum."""
        assert self._sum is not None
        if divisor == 1:
            self.buffer.copy_(self._sum)
        elif self._sum.dtype == self.buffer.dtype:
            torch.div(self._sum, divisor, out=self.buffer)
        else:
            self.buffer.copy_(self._sum.div_(divisor))
        for view, parameter in zip(self.views, self.parameters, strict=True):
            parameter.grad = view
        self.merged = 0

    def drop(self) -> None:
        """Begin a new sum."""
        self.merged = 0

    @property
    def sums(self) -> list[torch.Tensor]:
        """The sum so far, one tensor a parameter; none where it has not begun."""
        return self._sum_views if self.merged else []

    @torch.no_grad()
    def resume(self, sums: Sequence[torch.Tensor], merged: int) -> None:
        """Go on with a sum of ``merged`` steps."""
        self._make_sum()
        copy_all(self._sum_views, list(sums))
        self.merged = merged

    def _make_sum(self) -> torch.Tensor:
        if self._sum is None:
            dtype = _SUM_DTYPES.get(self.buffer.dtype, self.buffer.dtype)
            self._sum = torch.zeros_like(self.buffer, dtype=dtype)
            self._sum_views = views_of(self._sum, self.parameters)
        return self._sum


class DeltaBucket:
    """The parameters' distance from a snapshot, which Local SGD averages; ``origin``: the values that it is measured from."""

    def __init__(self, bucket: Bucket, parameters: Sequence[nn.Parameter], origin: Sequence[torch.Tensor]) -> None:
        self.id = bucket.id
        self.names = bucket.gradients
        self.parameters = tuple(parameters)
        first = parameters[0]
        self._snapshot = torch.empty(bucket.numel, dtype=first.dtype, device=first.device)
        self.snapshot = views_of(self._snapshot, parameters)
        with torch.no_grad():
            copy_all(self.snapshot, list(origin))

    @cached_property
    def buffer(self) -> torch.Tensor:
        """The distances, on their way; made at first use."""
        return torch.zeros_like(self._snapshot)

    @torch.no_grad()
    def pack(self) -> None:
        """Put the parameters minus the snapshot into the buffer."""
        copy_all(views_of(self.buffer, self.parameters), self.parameters)
        self.buffer.sub_(self._snapshot)

    @torch.no_grad()
    def merge(self) -> None:
        """Make snapshot plus buffer the new parameters and the new snapshot."""
        self._snapshot.add_(self.buffer)
        copy_all(self.parameters, self.snapshot)

    @property
    def is_at_rest(self) -> bool:
        """Whether the parameters are the snapshot."""
        return all(torch.equal(parameter, kept) for parameter, kept in zip(self.parameters, self.snapshot, strict=True))

    @torch.no_grad()
    def averages(self) -> list[torch.Tensor]:
        """What ``merge`` would make of the buffer, one tensor a parameter; nothing moves."""
        return views_of(self._snapshot + self.buffer, self.parameters)

    @torch.no_grad()
    def resume(self, origin: Sequence[torch.Tensor]) -> None:
        """Measure distances from these values."""
        copy_all(self.snapshot, list(origin))


class BufferAverage:
    """A model's buffers on their way: statistics are averaged, counts take the largest."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._find()
        self._mean = torch.empty(0)
        self._largest = torch.empty(0, dtype=torch.int64)

    def _find(self) -> None:
        """The buffers that the model has now: a module may put others in their place."""
        buffers = [buffer for buffer in self._model.buffers() if buffer.numel()]
        self._floats = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._counts = [buffer for buffer in buffers if not buffer.is_floating_point() and buffer.dtype != torch.bool]

    @property
    def nbytes(self) -> int:
        """Size of all that travels, in bytes."""
        return sum(buffer.numel() * 8 for buffer in (*self._floats, *self._counts))

    @torch.no_grad()
    def pack(self) -> None:
        """Gather the buffers, in float64 and int64."""
        self._find()
        if self._floats:
            self._mean = torch.cat([buffer.reshape(-1).to(torch.float64) for buffer in self._floats])
        if self._counts:
            self._largest = torch.cat([buffer.reshape(-1).to(torch.int64) for buffer in self._counts])

    def run(self, operation: Operation, communicators: Communicators) -> None:
        """Exchange them; runs on a lane."""
        if self._floats:
            communicators.all_reduce(self._mean, "mean", operation.group, operation.communicator)
        if self._counts:
            communicators.all_reduce(self._largest, "max", operation.group, operation.communicator)

    @torch.no_grad()
    def unpack(self) -> None:
        """Put the results into the model."""
        for buffers, flat in ((self._floats, self._mean), (self._counts, self._largest)):
            if buffers:
                pieces = torch.split(flat, [buffer.numel() for buffer in buffers])
                copy_all(buffers, [piece.view(buffer.shape).to(buffer.dtype) for piece, buffer in zip(pieces, buffers, strict=True)])
