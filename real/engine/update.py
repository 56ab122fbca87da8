"""A step of the user's optimizer that must pass without effect: it finds nothing to update.

Updates that happen elsewhere are made by a twin of the optimizer (real/engine/twins.py), on flat buffers if
that is asked for (real/engine/fused.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn
from torch.optim import Optimizer


def hide(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> Callable[[], None]:
    """Let an ``optimizer.step()`` before the returned function is called change no parameter and no state.

    torch's own optimizers find their groups empty, which costs nothing a parameter. Any other may
    keep lists of its own: its gradients are taken away meanwhile.
    """
    if type(optimizer).__module__.partition(".")[0] == "torch":
        return _without_parameters(optimizer)
    return _without_gradients(parameters)


def _without_parameters(optimizer: Optimizer) -> Callable[[], None]:
    groups = list(optimizer.param_groups)
    members = [group["params"] for group in groups]
    for group in groups:
        group["params"] = []

    def restore() -> None:
        for group, parameters in zip(groups, members, strict=True):
            group["params"] = parameters

    return restore


def _without_gradients(parameters: Iterable[nn.Parameter]) -> Callable[[], None]:
    hidden = [(parameter, gradient) for parameter in parameters if (gradient := parameter.grad) is not None]
    for parameter, _ in hidden:
        parameter.grad = None

    def restore() -> None:
        for parameter, gradient in hidden:
            parameter.grad = gradient

    return restore
