"""Changes to a living model: what a strategy puts into it, and how to remove it.

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
    """A callable on one instance that its copies, by ``copy.deepcopy`` or a pickle, replace with ``instead``.

    A pickle does not name this package, so a model that was saved as a whole loads without it.
    """

    def __init__(self, call: Callable[..., Any], instead: Callable[..., Any]) -> None:
        self.call = call
        self._instead = instead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``call``."""
        return self.call(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[None, Callable[..., Any]]]:
        return cast, (None, self._instead)  # which returns ``instead`` as it is


def living_hook(call: Callable[..., Any]) -> NotCopied:
    """Return a hook for one instance, which does nothing on its copies."""
    return NotCopied(call, nullcontext().__exit__)  # which takes anything, and returns None


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of a method of an object that this does not keep alive.

    It is for callbacks that outlive a model, or that Python's collector cannot see.
    """
    found = WeakMethod(method)

    def call(*arguments: Any) -> Any:
        own = found()
        return None if own is None else own(*arguments)

    return call


def override_forward(module: nn.Module, wrap: Callable[[Forward], Forward]) -> Undo:
    """Make ``wrap(current forward)`` the forward of this one instance.

    Hooks of the module stay outside of it. A copy of the module has the forward that the module had before.
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
