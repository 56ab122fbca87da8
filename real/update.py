"""A step of the user's optimizer that must pass without effect: its gradients are hidden meanwhile.

Updates that happen elsewhere are made by a twin of the optimizer (real/twins.py), on flat buffers if
that is asked for (real/fused.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def hide(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Take the gradients away: an ``optimizer.step()`` before ``restore`` changes no parameter and no state.

    Returns what ``restore`` puts back. A closure handed to the step makes gradients anew, and undoes this.
    """
    hidden = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in hidden:
        parameter.grad = None
    return hidden


def restore(hidden: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """Put back the gradients that ``hide`` took."""
    for parameter, gradient in hidden:
        parameter.grad = gradient
