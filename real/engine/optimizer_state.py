"""An optimizer's state by parameter: which tensors there are, made before the first step, zeroed."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from fleetbench.errors import ConfigError
from real.engine.twins import Group, State, group_index, make_twin, refuse_whole, step_twin


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
        try:
            state = _states_after(optimizer, group, probe)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"cannot be asked for its state: {error}", "optimizer", type(optimizer).__name__, "use an optimizer of torch.optim"
            ) from error
        slots |= {name for name, value in state.items() if isinstance(value, torch.Tensor) and value.shape == probe.shape}
    return tuple(sorted(slots))


def _states_after(optimizer: Optimizer, group: Group, probe: nn.Parameter) -> State:
    state: defaultdict[nn.Parameter, State] = defaultdict(dict)
    step_twin(make_twin(optimizer, [{**group, "params": [probe]}], state))
    return state[probe]


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
        raise ConfigError(
            "has no state for a parameter yet, and cannot be asked to make it",
            "optimizer",
            type(optimizer).__name__,
            "let every parameter take part in a step first, or use another optimizer of torch.optim",
        )
    stand_in = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    stand_in.grad = parameter.detach()  # only its layout is looked at
    group = {**optimizer.param_groups[group_index(optimizer)[parameter]], "params": [stand_in]}
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
