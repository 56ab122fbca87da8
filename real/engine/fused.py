"""One update over flat buffers instead of one a parameter (``build_strategy.fuse_all_optimizer_ops``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from fleetbench.errors import ConfigError
from real.engine.flat import FlatParameters, own_copy, views_of
from real.engine.twins import Group, PartialOptimizer, State, States, group_index, make_twin, refresh_twin, shape_of, step_twin

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
)
"""Optimizers that treat every element alike, so that many parameters may be stepped as one."""

_SCALARS = ("step", "mu_product")
"""State of those optimizers that is one number a parameter; all other state has the parameter's shape."""

_KERNELS: dict[str, tuple[type[Optimizer], ...]] = {
    "cpu": (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad),
    "cuda": (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW),
}
"""Where torch has one kernel for the whole update (``fused=True``): on one CPU thread 2 to 4 times as fast on a flat tensor."""


class Gathered(Protocol):
    """Gradients that lie in one buffer, which is made when it is first asked for."""

    @property
    def buffer(self) -> torch.Tensor:
        """Of the same length and order as the flat parameters."""
        ...


def has_kernel(optimizer: Optimizer, group: Group, like: torch.Tensor) -> bool:
    """Whether torch's one kernel updates tensors like this: the user chose no implementation, and it can do what the group asks."""
    return (
        group.get("foreach") is None
        and group.get("fused") is None
        and not isinstance(group.get("weight_decay"), torch.Tensor)
        and like.is_floating_point()
        and type(optimizer) in _KERNELS.get(like.device.type, ())
    )


class FusedOptimizer:
    """Makes the user's optimizer's update on flat buffers, one run of neighbours of one group at a time.

    ``optimizer.state`` stays the truth: what is in it when a step begins (loaded or stepped before) is
    gathered into flat tensors, of which its entries are views from then on; plain steps in between are
    seen. Replace state through ``load_state_dict`` or write to its tensors in place: a single tensor put
    into it is not seen.
    Parameters that are in none of the buffers are updated where they are, in torch's one kernel
    where it has one. ``release`` gives every parameter state of its own again; the next step would
    gather anew.

    Agreement with the plain update: each element's arithmetic is the same but for the rounding of
    products that torch's fused kernels contract.

    Raises ``ConfigError`` for an optimizer that is not in ``ELEMENTWISE``, or is differentiable.
    """

    def __init__(self, optimizer: Optimizer, flats: Sequence[tuple[FlatParameters, Gathered]]) -> None:
        """``flats``: each with the flat gradients, of the same length and order, whenever a step begins."""
        if type(optimizer) not in ELEMENTWISE:
            names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise ConfigError(
                "cannot be fused over flat parameters",
                "build_strategy.fuse_all_optimizer_ops",
                type(optimizer).__name__,
                f"set it to false, or use one of {names}",
            )
        if any(group["differentiable"] for group in optimizer.param_groups):
            raise ConfigError(
                "cannot be fused where the update is differentiated",
                "build_strategy.fuse_all_optimizer_ops",
                "differentiable = True",
                "set it to false, or build the optimizer without differentiable",
            )
        self._optimizer = optimizer
        self._updates = [_FlatUpdate(optimizer, flat, gradients) for flat, gradients in flats]
        self._members = {parameter for flat, _ in flats for parameter in flat.parameters}
        self._rest = PartialOptimizer(optimizer, ())
        self._shape: Hashable = None

    def step(self) -> None:
        """Update all flats, each with the gradients gathered for it, and those parameters outside any flat that have a ``.grad``."""
        for update in self._updates:
            update.step()
        shape = shape_of(self._optimizer)
        if shape != self._shape:
            rest = set(group_index(self._optimizer)) - self._members
            self._rest = PartialOptimizer(self._optimizer, rest, self._in_one_kernel)
            self._shape = shape
        self._rest.step()

    def _in_one_kernel(self, group: Group, parameters: Sequence[nn.Parameter]) -> Group:
        """Options that let torch's one kernel step parameters where they are.

        On a CPU only: elsewhere torch's plain update takes lists already, and the kernel wants state on the device.
        """
        moving = [(parameter, gradient) for parameter in parameters if (gradient := parameter.grad) is not None]
        plain = all(parameter.device.type == "cpu" and gradient.layout == torch.strided for parameter, gradient in moving)
        if not plain or not all(has_kernel(self._optimizer, group, parameter) for parameter, _ in moving):
            return {}
        state = self._optimizer.state
        begun = {any(value is not None for value in state.get(parameter, {}).values()) for parameter, _ in moving}
        return {"fused": True} if len(begun) == 1 else {}  # the kernel takes state of all its parameters or of none

    def release(self) -> None:
        """Give every parameter's state storage of its own; stepping again gathers it anew."""
        for update in self._updates:
            update.release()


class _FlatUpdate:
    """The update of one flat buffer.

    ``stale`` -> ``arranged`` (cut into runs, with flat state gathered from the user's) -> ``stale``
    again when the optimizer's groups or its state are others.
    """

    def __init__(self, optimizer: Optimizer, flat: FlatParameters, gradients: Gathered) -> None:
        self.runs: list[_Run] = []
        self._optimizer = optimizer
        self._flat = flat
        self._gradients = gradients
        self._states: States = defaultdict(dict)
        self._twin = make_twin(optimizer, [], self._states)
        self._arranged_for: tuple[object, Hashable] | None = None

    def step(self) -> None:
        if not self._is_arranged():
            self._arrange()
        if not self.runs:
            return
        refresh_twin(self._twin, self._optimizer, self._groups(), self._states)
        step_twin(self._twin)
        for run in self.runs:
            torch.autograd.graph.increment_version(run.parameters)  # as the plain update would: autograd then refuses what it saved before
            run.publish(self._optimizer.state, self._states.get(run.flat, {}))

    @torch.no_grad()
    def release(self) -> None:
        self.runs = []
        self._states.clear()
        self._arranged_for = None
        for parameter in self._flat.parameters:
            entry: State = self._optimizer.state.get(parameter, {})
            entry |= {name: own_copy(value) for name, value in entry.items() if isinstance(value, torch.Tensor)}

    def _is_arranged(self) -> bool:
        state = self._optimizer.state
        if self._arranged_for is None or self._arranged_for[0] is not state:
            return False
        if self._arranged_for[1] != shape_of(self._optimizer):
            return False
        return all(run.is_current(state) for run in self.runs)

    @torch.no_grad()
    def _arrange(self) -> None:
        group_of = group_index(self._optimizer)
        state = self._optimizer.state
        self._arranged_for = (state, shape_of(self._optimizer))
        self._states.clear()
        self.runs = []
        gradient = self._gradients.buffer
        assert gradient.shape == self._flat.buffer.shape, "a gradient buffer as long as the flat parameters"

        def likeness(parameter: nn.Parameter) -> Hashable:
            if parameter not in group_of:
                return None
            kept = {name: value for name, value in state.get(parameter, {}).items() if value is not None}
            scalars = tuple((name, float(kept[name])) for name in _SCALARS if name in kept)
            return group_of[parameter], scalars, frozenset(kept)

        end = 0
        for likes, group in groupby(self._flat.parameters, likeness):
            members = tuple(group)
            start, end = end, end + sum(parameter.numel() for parameter in members)
            if likes is not None:
                index = group_of[members[0]]
                in_kernel = self._has_kernel(self._optimizer.param_groups[index])
                run = _Run(index, members, self._flat.buffer[start:end], gradient[start:end], in_kernel=in_kernel)
                self.runs.append(run)
                if gathered := run.gather(state):
                    self._states[run.flat] = gathered

    def _groups(self) -> list[Group]:
        alike: dict[tuple[int, bool], list[nn.Parameter]] = {}
        for run in self.runs:
            has_state = run.published is not None  # torch's kernel for SGD takes momentum of all its parameters or of none
            alike.setdefault((run.group, has_state), []).append(run.flat)
        groups = self._optimizer.param_groups
        return [
            {**groups[index], "params": flats} | ({"fused": True} if self._has_kernel(groups[index]) else {})
            for (index, _), flats in alike.items()
        ]

    def _has_kernel(self, group: Group) -> bool:
        return has_kernel(self._optimizer, group, self._flat.buffer)


class _Run:
    """Neighbours in a flat buffer that share a group and their scalar state: one parameter to the twin."""

    def __init__(
        self, group: int, parameters: tuple[nn.Parameter, ...], buffer: torch.Tensor, gradient: torch.Tensor, *, in_kernel: bool
    ) -> None:
        self.group = group
        self._in_kernel = in_kernel
        self.parameters = parameters
        self.flat = nn.Parameter(buffer)
        self.flat.grad = gradient
        self.published: State | None = None
        """The first parameter's entry in the user's state, once its tensors are ours."""
        self._scalars: dict[str, torch.Tensor] = {}
        """A number for each parameter: one tensor for all would be counted up once a parameter where it is loaded."""
        self._versions: list[int] = []
        """Of the numbers, as we left them."""

    def is_current(self, states: States) -> bool:
        """Whether nobody replaced the state or stepped the parameters in another way."""
        entry = states.get(self.parameters[0]) or None
        return entry is self.published and self._versions == self._versions_now()

    def _versions_now(self) -> list[int]:
        return [numbers._version for numbers in self._scalars.values()]  # noqa: SLF001  # torch documents it, and has no other name for it

    def gather(self, states: States) -> State:
        """The flat state of what the parameters' entries hold, which become views of it; empty where there is none."""
        entries = [{name: value for name, value in states.get(parameter, {}).items() if value is not None} for parameter in self.parameters]
        flat: State = {}
        for name, first in entries[0].items():
            values = [entry[name] for entry in entries]
            if name in _SCALARS:
                self._scalars[name] = torch.stack([torch.as_tensor(value) for value in values])
                number = torch.as_tensor(first).detach().clone()
                flat[name] = number.to(self.flat.device, torch.float32) if self._in_kernel else number
            else:
                flat[name] = torch.empty_like(self.flat, dtype=first.dtype)
                for view, value in zip(views_of(flat[name], self.parameters), values, strict=True):
                    view.copy_(value)
        if flat:
            self._expose(states, flat)
        return flat

    @torch.no_grad()
    def publish(self, states: States, flat: State) -> None:
        """Let the user's state follow a step."""
        if self.published is not None:
            for name, numbers in self._scalars.items():
                if numbers.device == flat[name].device:
                    numbers.copy_(flat[name])
                else:
                    numbers.add_(1)  # a kernel counts on its device, the user's optimizer on the host: no synchronisation
            self._versions = self._versions_now()
        elif flat:
            count = len(self.parameters)
            if self._in_kernel:
                self._scalars = {"step": torch.ones(count)} if "step" in flat else {}
            else:
                self._scalars = {name: value.repeat(count) for name, value in flat.items() if name in _SCALARS}
            self._expose(states, flat)

    def _expose(self, states: States, flat: State) -> None:
        pieces = {
            name: self._scalars[name].unbind() if name in _SCALARS else views_of(value, self.parameters) for name, value in flat.items()
        }
        for position, parameter in enumerate(self.parameters):
            states[parameter] = {name: piece[position] for name, piece in pieces.items()}
        self.published = states[self.parameters[0]]
        self._versions = self._versions_now()
