"""Twins of an optimizer: its class, hyperparameters and state, with parameters and without hooks.

A twin lets an update happen at another time or on other tensors than the user's ``optimizer.step()``
would, while the optimizer stays the user's own object; ``hide`` lets that step pass without effect.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fleetbench.errors import ConfigError

Group = dict[str, Any]
State = dict[str, Any]


def group_index(optimizer: Optimizer) -> dict[nn.Parameter, int]:
    """The position of each parameter's group in ``optimizer.param_groups``."""
    return {parameter: index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]}


def shape_of(optimizer: Optimizer) -> Hashable:
    """Changes when parameters join the optimizer's groups."""
    return tuple((id(group["params"]), len(group["params"])) for group in optimizer.param_groups)


def make_twin(optimizer: Optimizer, groups: list[Group], state: Any) -> Optimizer:
    """An optimizer of the same class and attributes, with groups and state of its own and without hooks."""
    twin = object.__new__(type(optimizer))
    refresh_twin(twin, optimizer, groups, state)
    return twin


def refresh_twin(twin: Optimizer, optimizer: Optimizer, groups: list[Group], state: Any) -> None:
    """Follow the user's optimizer: schedulers and scalers set attributes on it, loading a state replaces its state."""
    twin.__dict__ = {name: value for name, value in optimizer.__dict__.items() if not name.endswith("_hooks")} | {
        "param_groups": groups,
        "state": state,
        "_optimizer_step_pre_hooks": OrderedDict(),
        "_optimizer_step_post_hooks": OrderedDict(),
    }


def step_twin(twin: Optimizer) -> None:
    """Step the twin without the hooks that torch keeps for all optimizers of the process: they are the user's, for the user's step."""
    step: Any = type(twin).step  # the class's: a scheduler wraps the one that the user's object shows
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(twin)


def refuse_whole(optimizer: Optimizer) -> None:
    """Raise ``ConfigError`` for an optimizer whose update of one parameter depends on the others."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "updates all parameters as one, from a closure",
            "optimizer",
            type(optimizer).__name__,
            "use an optimizer that treats parameters one by one, such as SGD or Adam",
        )


class PartialOptimizer:
    """Steps some of the parameters of the user's optimizer, in its state and by its groups as they are at each step.

    Parameters that the optimizer does not hold (yet) are passed over. Raises ``ConfigError`` for LBFGS.
    """

    def __init__(self, optimizer: Optimizer, parameters: Collection[nn.Parameter]) -> None:
        refuse_whole(optimizer)
        self._optimizer = optimizer
        self._wanted = set(parameters)
        self._shape: Hashable = None
        self._own: list[list[nn.Parameter]] = []
        self._twin = make_twin(optimizer, [], optimizer.state)

    def step(self) -> None:
        """Update the parameters that have a gradient."""
        groups = self._optimizer.param_groups
        shape = shape_of(self._optimizer)
        if shape != self._shape:
            self._own = [[parameter for parameter in group["params"] if parameter in self._wanted] for group in groups]
            self._shape = shape
        own = [{**group, "params": parameters} for group, parameters in zip(groups, self._own, strict=True) if parameters]
        if own:
            refresh_twin(self._twin, self._optimizer, own, self._optimizer.state)
            step_twin(self._twin)


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
