"""Unscaling: gradients of a scaled loss, divided by the scale, and whether they overflowed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def own_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """What holds this rank's gradients, to be changed in place."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]  # noqa: SLF001  # values() wants coalesced ones


@torch.no_grad()
def unscale(tensors: list[torch.Tensor], scale: float, device: torch.device) -> torch.Tensor:
    """Divide ``tensors`` by ``scale``, in place; returns one element on the device: 1 where something is not finite, else 0."""
    found = torch.zeros(1, device=device)
    inverse = torch.full((1,), 1.0 / scale, device=device)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        torch._amp_foreach_non_finite_check_and_unscale_(group, found, inverse)  # as torch.amp.GradScaler does
    return found
