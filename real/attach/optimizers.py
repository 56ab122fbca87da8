"""Optimizers: those that a process has created, and wrappers around their steps.

The wrapper calls a closure before the step, not inside of it as torch does. So a step is only an update, and
forward and backward come before it (Lightning trains inside of closures).
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any
from weakref import ref

Optimizer = Any
"""Stands for the type ``torch.optim.Optimizer``, whose module is not imported yet."""
_MANY_CALLS = "torch.optim.lbfgs"
"""Module whose optimizer calls its closure any number of times."""


class Optimizers:
    """Records every optimizer that calls ``Optimizer.__init__``, in order of creation."""

    def __init__(self) -> None:
        self._made: list[ref[Any]] = []

    @property
    def num_made(self) -> int:
        """Number of optimizers created so far, including deleted ones."""
        return len(self._made)

    def holding(self, model: Any) -> list[Optimizer]:
        """Return the optimizers that hold parameters of a module, without those that share some with a later one."""
        known = {id(parameter) for parameter in model.parameters()}
        found: list[tuple[Optimizer, set[int]]] = []
        for optimizer in (one for own in self._made if (one := own()) is not None):
            held = known & {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if held:
                found = [(one, others) for one, others in found if held.isdisjoint(others)] + [(optimizer, held)]
        return [one for one, _ in found]

    def follow(self, module: ModuleType, follows: Callable[[Optimizer], bool], stepped: Callable[[Optimizer], None]) -> None:
        """Record the optimizers that are created from now on.

        ``module`` is ``torch.optim.optimizer``. ``stepped`` is called at a step's end if the job began to
        follow the optimizer during the step.
        """
        base = module.Optimizer
        make, hook_step = base.__init__, base.profile_hook_step

        @wraps(make)
        def noted(optimizer: Optimizer, *arguments: Any, **named: Any) -> None:
            make(optimizer, *arguments, **named)
            self._made.append(ref(optimizer))

        @wraps(hook_step)
        def hooked(step: Callable[..., Any]) -> Callable[..., Any]:
            return _around(step, hook_step(step), follows, stepped)

        base.__init__, base.profile_hook_step = noted, staticmethod(hooked)


def _around(
    step: Callable[..., Any], hooked: Callable[..., Any], follows: Callable[[Optimizer], bool], stepped: Callable[[Optimizer], None]
) -> Callable[..., Any]:
    """Wrap a step; ``hooked`` is the step with torch's hooks around it."""
    calls_once = step.__module__.startswith("torch.optim.") and step.__module__ != _MANY_CALLS

    @wraps(step)  # as torch does, so that ``__wrapped__`` is the step without hooks
    def around(optimizer: Optimizer, *arguments: Any, **named: Any) -> Any:
        was_followed = follows(optimizer)
        closure = named.get("closure", arguments[0] if arguments else None)
        loss = None
        if calls_once and callable(closure):
            from torch import enable_grad

            with enable_grad():
                loss = closure()
            arguments, named = arguments[1:], {name: value for name, value in named.items() if name != "closure"}
        result = hooked(optimizer, *arguments, **named)
        if not was_followed and follows(optimizer):
            stepped(optimizer)
        return result if loss is None else loss

    return around
