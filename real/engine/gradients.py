"""Gradients: what a backward has left in ``.grad``, and the tensors that a forward has put out."""

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fleetbench.plan.combination import Combination


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The tensors of a model's output, in any nest of containers and dataclasses."""
    found = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return found


def shard_of(tensor: Any) -> torch.Tensor:
    """This rank's shard of a tensor; all of one that is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]  # a DTensor's


def is_dropped(what: Combination, gradients_of: Sequence[nn.Parameter]) -> bool:
    """Whether the gradients of a backward are thrown away, and its step never was: cleared, or no numbers, which a GradScaler leaves out.

    Only where a second backward could take their place.
    """
    if not what.leaves_averages:
        return False
    return is_cleared(gradients_of) or not all(values.isfinite().all() for values in _values(gradients_of))


def versions(gradients_of: Sequence[nn.Parameter]) -> list[tuple[int, int]]:
    """Which gradients there are, and how often each was written to."""
    return [(id(gradient), gradient._version) for own in gradients_of if (gradient := own.grad) is not None]  # noqa: SLF001  # torch documents it


def is_cleared(gradients_of: Sequence[nn.Parameter]) -> bool:
    """Whether no parameter has a gradient but zeros."""
    return not any(values.any() for values in _values(gradients_of))


def _values(gradients_of: Sequence[nn.Parameter]) -> Iterator[torch.Tensor]:
    gradients = (parameter.grad for parameter in gradients_of if parameter.grad is not None)
    return (gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients)


class Averaged:
    """Knows which gradients still are the averages that the last update was made from."""

    def __init__(self) -> None:
        self._noted: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def note(self, gradients_of: Sequence[nn.Parameter]) -> None:
        """These are."""
        gradients = [own for parameter in gradients_of if (own := parameter.grad) is not None]
        self._noted = [(weakref.ref(own), own._version) for own in gradients]  # noqa: SLF001  # torch documents it

    def has(self, gradients_of: Sequence[nn.Parameter]) -> bool:
        """Whether there are gradients, and none was written to since, but to clear it, as a backward that is not heard of does."""
        noted = {id(own): version for kept, version in self._noted if (own := kept()) is not None}
        changed = [parameter for parameter in gradients_of if (own := parameter.grad) is not None and noted.get(id(own)) != own._version]  # noqa: SLF001  # torch documents it
        return any(parameter.grad is not None for parameter in gradients_of) and is_cleared(changed)
