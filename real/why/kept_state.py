"""KeptState: a copy of a rank's training state, to restore after steps that other ranks did not share."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_SCHEDULED = ("params", "lr", "momentum", "betas")
"""Entries of an optimizer's groups that are not restored, because schedules set them by the number of
steps."""


class KeptState:
    """Copies models' tensors and gradients and optimizers' state (``keep``), and puts them back (``restore``)."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = tuple(models)
        found = (one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer))
        self._optimizers = list({id(one.state): one for one in found}.values())  # a library's wrapper has the state of the optimizer inside
        self._kept: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes that a copy takes."""
        return sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(self._living()) if isinstance(leaf, torch.Tensor))

    def keep(self) -> None:
        """Copy everything that training changes."""
        self._kept = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), self._living())

    def restore(self) -> None:
        """Restore the state of ``keep``, as if there had been no step since."""
        with torch.no_grad():
            for living, (kept, grad) in zip(self._tensors(), self._kept["tensors"], strict=True):
                living.copy_(kept)
                living.grad = grad
        for optimizer, (state, groups) in zip(self._optimizers, self._kept["optimizers"], strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, kept in zip(optimizer.param_groups, groups, strict=True):
                group.update(kept)

    def _tensors(self) -> list[torch.Tensor]:
        found = [buffer for model in self._models for buffer in model.buffers()]
        found += [parameter for model in self._models for parameter in model.parameters() if parameter.requires_grad]
        found += [parameter for optimizer in self._optimizers for group in optimizer.param_groups for parameter in group["params"]]
        return list({id(tensor): tensor for tensor in found}.values())

    def _living(self) -> dict[str, Any]:
        groups = [
            [{name: value for name, value in group.items() if name not in _SCHEDULED} for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]
        states = [dict(optimizer.state) for optimizer in self._optimizers]
        return {
            "tensors": [(tensor, tensor.grad) for tensor in self._tensors()],
            "optimizers": list(zip(states, groups, strict=True)),
        }
