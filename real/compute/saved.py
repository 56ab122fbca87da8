"""Saved: what autograd keeps for the backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch
from torch import nn


class SavedForBackward:
    """Counts the bytes that forwards inside the ``with`` keep for their backward.

    A storage counts once and whole, where it was saved first; those of the model's parameters and
    buffers do not count. While it counts, it keeps them all alive: let no backward run inside.
    """

    def __init__(self, model: nn.Module, where: Callable[[], str] = str) -> None:
        """``where()`` names what is running: the counts' key."""
        self.by_name: Counter[str] = Counter()
        """Bytes by what ``where()`` said."""
        self._model = model
        self._where = where
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._own: set[int] = set()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    @property
    def num_bytes(self) -> int:
        """All of them."""
        return self.by_name.total()

    def __enter__(self) -> Self:
        self._own = {tensor.untyped_storage().data_ptr() for tensor in (*self._model.parameters(), *self._model.buffers())}
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._hooks.__exit__(kind, error, traceback)
        self._kept.clear()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._own and storage.data_ptr() not in self._kept:
                self._kept[storage.data_ptr()] = storage
                self.by_name[self._where()] += storage.nbytes()
        return tensor.detach()  # an output that its own node saves would keep itself alive


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
