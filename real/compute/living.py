"""Changes that a strategy makes to a live model, and how they are undone.

Strategies change between legs inside one process, so each change returns an ``Undo`` that restores modules,
hooks, forward methods and flags. Changes are undone in reverse order.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast
from weakref import WeakMethod

from torch import nn

Undo = Callable[[], None]
"""Undoes a change; a second call does nothing."""

Forward = Callable[..., Any]


class NotCopied:
    """A callable on one instance that ``copy.deepcopy`` and pickles replace by ``instead``.

    A pickle does not name this package, so a model that was saved as a whole loads without it.
    """

    def __init__(self, call: Callable[..., Any], instead: Callable[..., Any]) -> None:
        self.call = call
        self._instead = instead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``call``."""
        return self.call(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[None, Callable[..., Any]]]:
        return cast, (None, self._instead)  # cast returns ``instead`` unchanged


def living_hook(call: Callable[..., Any]) -> NotCopied:
    """Return a hook for one instance, which does nothing on its copies."""
    return NotCopied(call, nullcontext().__exit__)  # accepts anything, returns None


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the method without keeping its object alive.

    For callbacks that outlive a model, or that Python's collector does not see.
    """
    found = WeakMethod(method)

    def call(*arguments: Any) -> Any:
        own = found()
        return None if own is None else own(*arguments)

    return call


def override_forward(module: nn.Module, wrap: Callable[[Forward], Forward]) -> Undo:
    """Replace the forward of this one instance by ``wrap(current forward)``; return how to undo it.

    Hooks of the module still run around it. A copy of the module has the previous forward.
    """
    before = module.__dict__.get("forward")
    plain = module.forward
    override = NotCopied(wrap(plain), plain)
    module.__dict__["forward"] = override

    def undo() -> None:
        override.call = plain  # also if the override has been wrapped since
        if module.__dict__.get("forward") is override:
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before

    return undo
