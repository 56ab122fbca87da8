"""Gradients: what a backward has left in ``.grad``, and the tensors in a forward's output."""

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fleetbench.plan.combination import Combination
from real.communication.lanes import host_reads

COUNT = attrgetter("_version")
"""Returns how often a tensor was written to in place; torch documents the attribute ``_version``."""


Marks = tuple[list[torch.Tensor], list[int], torch.Tensor]
"""Fingerprint of gradients: the tensors; the number of in-place writes to each (empty without buckets); and the FP64
sum and norm of each gradient or bucket, as int64 bits in a tensor ``(2 * num,)`` for ``num`` of them."""


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's output, in any nesting of containers and dataclasses."""
    found = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return found


def shard_of(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a tensor, or the whole tensor if it is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]  # a DTensor's


def is_dropped(what: Combination, gradients_of: Sequence[nn.Parameter]) -> bool:
    """Whether a backward's gradients are discarded, so that its step does not count.

    That is the case if they were cleared, or are not finite, so that a GradScaler skips the step; but only under
    strategies that leave averages in ``.grad`` until the update.
    """
    if not what.leaves_averages:
        return False
    return is_cleared(gradients_of) or not all(values.isfinite().all() for values in _values(gradients_of))


def versions(gradients_of: Sequence[nn.Parameter]) -> list[tuple[int, int]]:
    """Return the ``id`` and the number of in-place writes of every gradient that is not None."""
    return [(id(gradient), COUNT(gradient)) for own in gradients_of if (gradient := own.grad) is not None]


def is_cleared(gradients_of: Sequence[nn.Parameter]) -> bool:
    """Whether every parameter's gradient is None or all zeros."""
    return not any(values.any() for values in _values(gradients_of))


def _values(gradients_of: Sequence[nn.Parameter]) -> Iterator[torch.Tensor]:
    gradients = (parameter.grad for parameter in gradients_of if parameter.grad is not None)
    return (gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients)


@torch.no_grad()
def marks_of(gradients_of: Sequence[nn.Parameter], buckets: Sequence[torch.Tensor] | None, device: torch.device) -> Marks:
    """Return marks with which ``are_same`` tells whether gradients have changed.

    ``buckets`` are flat tensors that hold the values of all gradients; None if there are none. Sums and norms reveal
    writes that torch does not count, such as those of ``torch.amp.GradScaler`` and ``grad.data.mul_()``. They are
    compared as bits, so that NaN equals NaN. The sums and norms of buckets do not change if the gradients of other
    parameters are cleared.
    """
    gradients = [gradient for parameter in gradients_of if (gradient := parameter.grad) is not None]
    values = [own._values() if own.is_sparse else own for own in gradients] if buckets is None else buckets  # noqa: SLF001  # documented
    real = [torch.view_as_real(own) if own.is_complex() else own for own in values]
    numbers = [one for own in real for one in (own.sum(dtype=torch.float64), torch.linalg.vector_norm(own, dtype=torch.float64))]
    bits = torch.stack(numbers).view(torch.int64) if numbers else torch.empty(0, device=device)
    return gradients, [*map(COUNT, gradients)] if buckets is not None else [], bits


def are_same(before: Marks, now: Marks) -> bool:
    """Whether no gradient was replaced or changed in between. The host waits for the device."""
    if [*map(id, before[0])] != [*map(id, now[0])]:
        return False
    with host_reads():
        return before[1] == now[1] and torch.equal(before[2], now[2])


class Averaged:
    """Remembers the averaged gradients of the last update, and whether they are unchanged."""

    def __init__(self) -> None:
        self._noted: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def note(self, gradients_of: Sequence[nn.Parameter]) -> None:
        """Remember the gradients of these parameters."""
        gradients = [own for parameter in gradients_of if (own := parameter.grad) is not None]
        self._noted = [*zip(map(weakref.ref, gradients), map(COUNT, gradients), strict=True)]  # in C: each step does it

    def has(self, gradients_of: Sequence[nn.Parameter]) -> bool:
        """Whether gradients exist, and none was written to since ``note``, except to clear it.

        A backward that the engine does not notice would write to them.
        """
        noted = {id(own): version for kept, version in self._noted if (own := kept()) is not None}
        changed = [parameter for parameter in gradients_of if (own := parameter.grad) is not None and noted.get(id(own)) != COUNT(own)]
        return any(parameter.grad is not None for parameter in gradients_of) and is_cleared(changed)
