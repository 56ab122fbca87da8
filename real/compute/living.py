"""Changes to a living model: what a strategy puts into it, and the way back.

Strategies change between legs inside one process, so each change hands back an ``Undo`` that
leaves modules, hooks, forward methods and flags as they were. Changes are undone in reverse order.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast
from weakref import WeakMethod

from torch import nn

Undo = Callable[[], None]
"""Takes a change back; a second call does nothing."""

Forward = Callable[..., Any]


class NotCopied:
    """What is put on one instance and does not follow it into its copies, by ``copy.deepcopy`` or a pickle: those have ``instead``.

    A pickle names nothing of this package, so that a model that was saved whole loads without it.
    """

    def __init__(self, call: Callable[..., Any], instead: Callable[..., Any]) -> None:
        self.call = call
        self._instead = instead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What ``call`` does."""
        return self.call(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[None, Callable[..., Any]]]:
        return cast, (None, self._instead)  # which returns ``instead`` as it is


def living_hook(call: Callable[..., Any]) -> NotCopied:
    """A hook on one instance, which does nothing on its copies."""
    return NotCopied(call, nullcontext().__exit__)  # which takes anything, and returns None


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a method of an object that this does not keep alive: for what outlives a model, or hides from Python's collector."""
    found = WeakMethod(method)

    def call(*arguments: Any) -> Any:
        own = found()
        return None if own is None else own(*arguments)

    return call


def override_forward(module: nn.Module, wrap: Callable[[Forward], Forward]) -> Undo:
    """Let ``wrap(forward so far)`` be the forward of this one instance.

    Hooks of the module stay outside of it. A copy of the module has the forward that the module had before.
    """
    before = module.__dict__.get("forward")
    plain = module.forward
    override = NotCopied(wrap(plain), plain)
    module.__dict__["forward"] = override

    def undo() -> None:
        override.call = plain  # also where the override was wrapped since
        if module.__dict__.get("forward") is override:
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before

    return undo
