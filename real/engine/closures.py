"""Closures: an ``optimizer.step(closure)`` whose closure is called once, before the update, so that its backward is a step's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fleetbench.errors import ConfigError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of ``optimizer.step``, the optimizer first."""


def call_closure(arguments: Sequence[Any], named: Mapping[str, Any]) -> Arguments | None:
    """Call the closure among the arguments of ``optimizer.step``, and return arguments with its loss in its place.

    None where there is no closure. Raises ``ConfigError`` for any other argument: updates that happen
    elsewhere than in the user's ``step()`` would not know of it.
    """
    optimizer, *rest = arguments
    given: dict[Any, Any] = {**dict(enumerate(rest)), **named}
    told = {where: item for where, item in given.items() if item is not None}
    if not told:
        return None
    (where, closure), *others = told.items()
    if others or not callable(closure):
        hint = "set what else it needs on the optimizer or its groups"
        raise ConfigError("takes a closure, and nothing else", "optimizer.step(...)", f"{len(told)} arguments", hint)
    with torch.enable_grad():
        given[where] = _Told(closure())
    return (optimizer, *(given[index] for index in range(len(rest)))), {name: given[name] for name in named}


class _Told:
    """A closure that was called already. Raises ``ConfigError`` when it is called again."""

    def __init__(self, loss: Any) -> None:
        self._loss: Callable[[], Any] | None = lambda: loss

    def __call__(self) -> Any:
        """The loss."""
        tell, self._loss = self._loss, None
        if tell is None:
            what = "the optimizer calls its closure several times, and only the first call's gradients were averaged"
            hint = "use an optimizer that calls it once, as those of torch.optim but for LBFGS do"
            raise ConfigError(what, "optimizer.step(closure)", hint=hint)
        return tell()
