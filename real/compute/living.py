"""Changes to a living model: what a strategy puts into it, and the way back.

Strategies change between legs inside one process, so each change hands back an ``Undo`` that
leaves modules, hooks, forward methods and flags as they were. Changes are undone in reverse order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Undo = Callable[[], None]
"""Takes a change back; a second call does nothing."""

Forward = Callable[..., Any]


def nothing_to_undo() -> None:
    """Undo a change that changed nothing."""


def override_forward(module: nn.Module, wrap: Callable[[Forward], Forward]) -> Undo:
    """Let ``wrap(forward so far)`` be the forward of this one instance.

    Hooks of the module stay outside of it. A copy of the module, by ``copy.deepcopy`` or a pickle,
    has the forward that the module had before.
    """
    before = module.__dict__.get("forward")
    plain = module.forward
    override = _Override(plain, wrap(plain))
    module.__dict__["forward"] = override

    def undo() -> None:
        override.run = plain  # also where somebody has wrapped the override since
        if module.__dict__.get("forward") is override:
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before

    return undo


class LivingHook:
    """A hook on one instance that does not follow the instance into its copies."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        """As torch calls it."""
        return self._call(*args)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _nothing


def _nothing(*_: Any) -> None:
    """What a copied hook does."""


class _Override:
    """An instance's forward that does not follow the instance into its copies."""

    def __init__(self, plain: Forward, run: Forward) -> None:
        self.plain = plain
        self.run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[Forward], Forward], tuple[Forward]]:
        return _itself, (self.plain,)


def _itself(forward: Forward) -> Forward:
    return forward
