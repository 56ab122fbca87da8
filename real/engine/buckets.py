"""Buckets: where a plan's gradients and parameters lie, so that one collective carries many."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import TypeGuard

import torch

from fleetbench.plan.fusion import Bucket

copy_all = torch._foreach_copy_  # torch has no public name for copying a list of tensors at once
_SUM_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""In which type gradients of small types are summed up over steps."""


def _are_whole(gradients: list[torch.Tensor | None]) -> TypeGuard[list[torch.Tensor]]:
    return all([gradient is not None for gradient in gradients])  # noqa: C419  # a generator takes twice as long


def views_of(buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of a flat buffer, one a parameter, one behind the other, in the parameters' shapes and strides.

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

    def __init__(self, bucket: Bucket, parameters: Sequence[torch.nn.Parameter]) -> None:
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
        gradients = self._gradients()
        strange = [gradient is not view for gradient, view in zip(gradients, self.views, strict=True)]
        if not any(strange):
            return
        if all(strange) and _are_whole(gradients):  # so it goes in nearly every step, and every step pays
            copy_all(self.views, gradients)
        else:
            pairs = list(zip(self.views, gradients, strict=True))
            moving = [(view, gradient) for view, gradient in pairs if gradient is not None and gradient is not view]
            if moving:
                copy_all([view for view, _ in moving], [gradient for _, gradient in moving])
            for view, gradient in pairs:
                if gradient is None:
                    view.zero_()
        for view, parameter in zip(self.views, self.parameters, strict=True):
            parameter.grad = view

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the step's gradients to the sum; they stay where they are."""
        total = self._make_sum()
        put = copy_all if self.merged == 0 else torch._foreach_add_
        gradients = self._gradients()
        if _are_whole(gradients):
            put(self._sum_views, gradients)
        else:
            if self.merged == 0:
                total.zero_()
            pairs = [(view, gradient) for view, gradient in zip(self._sum_views, gradients, strict=True) if gradient is not None]
            if pairs:
                put([view for view, _ in pairs], [gradient for _, gradient in pairs])
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

    def _gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self.parameters]


class SparseBucket:
    """The gradient of one embedding: rows and their values, wherever they are.

    ``pack`` takes the rows that this rank touched, an exchange puts everybody's into ``gathered``,
    and ``finish`` makes these the gradient. What the exchange allocates on its lane stays until it
    is replaced there, so that no other stream's memory is given away under it.
    """

    def __init__(self, bucket: Bucket, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.id = bucket.id
        (self.parameter,) = self.parameters = tuple(parameters)
        self.own = self._none()
        """Indices ``(rows,)`` and values ``(rows, ...)`` of this rank, each row once."""
        self.gathered: tuple[torch.Tensor, torch.Tensor] | None = None
        """The same of all ranks, one rank behind the other."""
        self.merged = 0
        self._sum: torch.Tensor | None = None

    @torch.no_grad()
    def pack(self) -> None:
        """Take the rows; a parameter that got no gradient has none."""
        gradient = self._gradient().coalesce()
        self.own = gradient.indices()[0], gradient.values()

    @torch.no_grad()
    def finish(self) -> None:
        """Make the gathered rows the gradient; those of one index add up."""
        if self.gathered is not None:
            indices, values = self.gathered
            self.parameter.grad = self._of_rows(indices, values).coalesce()

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the step's rows to the sum."""
        gradient = self._gradient()
        self._sum = gradient.clone() if self._sum is None else (self._sum + gradient).coalesce()
        self.merged += 1

    @torch.no_grad()
    def release(self, divisor: int) -> None:
        """Make the sum over ``divisor`` the gradient, and begin a new sum."""
        assert self._sum is not None
        self.parameter.grad = self._sum.coalesce() / divisor
        self.drop()

    def drop(self) -> None:
        """Begin a new sum."""
        self.merged, self._sum = 0, None

    @property
    def values(self) -> torch.Tensor:
        """The gradient's numbers, after ``finish``."""
        return self._gradient()._values()  # noqa: SLF001  # values() wants coalesced ones

    @property
    def sums(self) -> list[torch.Tensor]:
        """The sum so far, sparse; none where it has not begun."""
        return [self._sum] if self._sum is not None else []

    def resume(self, sums: Sequence[torch.Tensor], merged: int) -> None:
        """Go on with a sum of ``merged`` steps."""
        (self._sum,) = sums
        self.merged = merged

    def _gradient(self) -> torch.Tensor:
        if self.parameter.grad is None:
            self.parameter.grad = self._of_rows(*self._none())
        return self.parameter.grad

    def _none(self) -> tuple[torch.Tensor, torch.Tensor]:
        indices = torch.empty(0, dtype=torch.int64, device=self.parameter.device)
        return indices, self.parameter.detach().new_empty((0, *self.parameter.shape[1:]))

    def _of_rows(self, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.sparse_coo_tensor(indices[None], values, self.parameter.shape, check_invariants=False)


class DeltaBucket:
    """The parameters' distance from a snapshot, which Local SGD averages; ``origin``: the values that it is measured from."""

    def __init__(self, bucket: Bucket, parameters: Sequence[torch.nn.Parameter], origin: Sequence[torch.Tensor]) -> None:
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
