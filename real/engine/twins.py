"""Twins of an optimizer: its class, hyperparameters and state, with parameters and without hooks.

A twin lets an update happen at another time or on other tensors than the user's ``optimizer.step()``
would, while the optimizer stays the user's own object; ``hide`` lets that step pass without effect. A twin
also tells what state an optimizer keeps for a parameter, and makes it before the first step.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fleetbench.errors import ConfigError

Group = dict[str, Any]
State = dict[str, Any]


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
        hint = "use an optimizer that treats parameters one by one, such as SGD or Adam"
        raise ConfigError("updates all parameters as one, from a closure", "optimizer", type(optimizer).__name__, hint)


class PartialOptimizer:
    """Steps some of the parameters of the user's optimizer, in its state and by its groups as they are at each step.

    Parameters that the optimizer does not hold (yet) are passed over. Raises ``ConfigError`` for LBFGS.
    """

    def __init__(self, optimizer: Optimizer, parameters: Collection[nn.Parameter]) -> None:
        refuse_whole(optimizer)
        self._optimizer = optimizer
        self._wanted = set(parameters)
        self._twin = make_twin(optimizer, [], optimizer.state)

    def step(self) -> None:
        """Update the parameters that have a gradient."""
        groups = [
            {**group, "params": [parameter for parameter in group["params"] if parameter in self._wanted]}
            for group in self._optimizer.param_groups
        ]
        refresh_twin(self._twin, self._optimizer, [group for group in groups if group["params"]], self._optimizer.state)
        step_twin(self._twin)


def hide(parameters: Iterable[nn.Parameter]) -> Callable[[], None]:
    """Take the gradients away until the returned function is called: an ``optimizer.step()`` then changes no parameter and no state."""
    hidden = [(parameter, gradient) for parameter in parameters if (gradient := parameter.grad) is not None]
    for parameter, _ in hidden:
        parameter.grad = None

    def restore() -> None:
        for parameter, gradient in hidden:
            parameter.grad = gradient

    return restore


def state_slots(optimizer: Optimizer) -> tuple[str, ...]:
    """Names of the state tensors that have the parameter's shape, such as ``exp_avg``, over all groups, sorted.

    Steps a twin on a parameter made up for this; the optimizer stays as it is. Raises ``ConfigError``
    for an optimizer that has no state by parameter, or that cannot step such a parameter.
    """
    refuse_whole(optimizer)
    slots: set[str] = set()
    for group in optimizer.param_groups:
        like = next((parameter for parameter in group["params"]), None)
        if like is None:
            continue
        probe = nn.Parameter(torch.ones((2, 3), dtype=like.dtype, device=like.device))
        probe.grad = torch.ones_like(probe)
        states: defaultdict[nn.Parameter, State] = defaultdict(dict)
        try:
            step_twin(make_twin(optimizer, [{**group, "params": [probe]}], states))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"cannot be asked for its state: {error}", "optimizer", type(optimizer).__name__, "use an optimizer of torch.optim"
            ) from error
        slots |= {name for name, value in states[probe].items() if isinstance(value, torch.Tensor) and value.shape == probe.shape}
    return tuple(sorted(slots))


@torch.no_grad()
def state_tensors(optimizer: Optimizer, parameter: nn.Parameter, slots: Sequence[str]) -> list[torch.Tensor]:
    """The parameter's state tensors, one a slot, made where they are missing: write to them in place.

        State that does not exist is what the optimizer begins with (Adam's step of 0, Adagrad's
    ``initial_accumulator_value``). A slot that it only makes in a step is zero: SGD then damps its
        first gradient too, which changes that step where ``dampening`` is not 0. Raises ``ConfigError``
        for an optimizer that does not tell what it begins with, and ``KeyError`` for a parameter that it does not hold.
    """
    if not slots:
        return []
    if not optimizer.state.get(parameter):
        optimizer.state[parameter] = _first_state(optimizer, parameter)
    state: State = optimizer.state[parameter]
    for slot in slots:
        if state.get(slot) is None:
            state[slot] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return [state[slot] for slot in slots]


def _first_state(optimizer: Optimizer, parameter: nn.Parameter) -> State:
    """What the optimizer's own initialisation makes of a parameter it meets for the first time."""
    initialise = getattr(type(optimizer), "_init_group", None)  # torch's optimizers share the name, not the signature
    if initialise is None:
        hint = "let every parameter take part in a step first, or use another optimizer of torch.optim"
        raise ConfigError("has no state for a parameter yet, and cannot be asked to make it", "optimizer", type(optimizer).__name__, hint)
    stand_in = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    stand_in.grad = parameter.detach()  # only its layout is looked at
    groups = {member: group for group in optimizer.param_groups for member in group["params"]}
    group = {**groups[parameter], "params": [stand_in]}
    state: defaultdict[nn.Parameter, State] = defaultdict(dict)
    lists = [[] for _ in list(inspect.signature(initialise).parameters)[2:]]  # type: ignore[var-annotated]  # of tensors, of any number
    initialise(make_twin(optimizer, [group], state), group, *lists)
    return {name: value for name, value in state[stand_in].items() if value is not None}


@torch.no_grad()
def reset_state(optimizer: Optimizer, slots: Sequence[str]) -> None:
    """Zero the slots of all parameters, in place; what does not exist stays so."""
    tensors = [
        state[slot] for state in optimizer.state.values() for slot in slots if isinstance(state, dict) and state.get(slot) is not None
    ]
    if tensors:
        torch._foreach_zero_(tensors)  # torch has no public name for zeroing a list of tensors at once
