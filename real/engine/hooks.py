"""What an engine leaves on a user's model, so that a copy of the model, or its pickle, has nothing of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree


class NoSync:
    """``model.no_sync()``, which a DistributedDataParallel has, too; that of a copy, or in a pickle, changes nothing."""

    def __init__(self, enter: Callable[[], AbstractContextManager[None]]) -> None:
        self._enter = enter

    def __call__(self) -> AbstractContextManager[None]:
        """What to enter."""
        return self._enter()

    def __reduce__(self) -> tuple[type[partial[Any]], tuple[type[nullcontext[None]]]]:
        return partial, (nullcontext,)


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The tensors of a model's output, in whatever nest; dataclasses count as nests."""
    if isinstance(output, torch.Tensor):
        return [output]
    found = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return found
