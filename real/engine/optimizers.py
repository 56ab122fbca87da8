"""Control of the user's optimizer: the strategy decides when and how it steps.

The object stays the user's own. Its ``step()`` runs unchanged, runs without gradients (``hide``), runs in as few
kernels as torch offers (``build_strategy.fuse_all_optimizer_ops``), or is replaced by separate updates of each bucket's
parameters. Updates outside of the user's step run on a copy of the optimizer, with its class, hyperparameters and
state, and without hooks.
"""

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fleetbench.errors import ConfigError
from fleetbench.plan.combination import Combination
from real.engine.buckets import Storage, dense_strides
from real.engine.refusals import fields_of

Group = dict[str, Any]
State = dict[str, Any]

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

_KERNELS: dict[str, tuple[type[Optimizer], ...]] = {
    "cpu": (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad),
    "cuda": (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW),
}
"""Optimizers for which torch has a fused kernel (``fused=True``), by type of device."""
_KERNELS_OF_SHARDS = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose fused kernel accepts a DTensor."""


class OptimizerControl:
    """Controls one optimizer under one plan: ``begin`` runs before the user's ``optimizer.step()``, ``end`` after."""

    def __init__(
        self, optimizer: Optimizer, combination: Combination, parameters: Mapping[str, nn.Parameter], known: Callable[[], Collection[int]]
    ) -> None:
        """``known``: returns the ids of all parameters that fleet trains in this process, including other models'."""
        self.optimizer = optimizer
        if not combination.leaves_averages:
            refuse_whole(optimizer, combination)
        self._own = {id(parameter) for parameter in parameters.values()}
        self._known = known
        self._refuse_foreign()
        self._parameters = parameters
        self._restore: Callable[[], None] | None = None
        self.lr_scale = combination.lr_scale
        if self.lr_scale != 1 and any("lr" not in group for group in optimizer.param_groups):
            raise ConfigError("has no learning rate to scale", "optimizer", type(optimizer).__name__, "leave lr_scale at 1")
        self._averages_all = combination.averages_state and not combination.momentum_alone
        is_kept = not (combination.averages_state or combination.resets_state)
        names = () if is_kept else state_slots(optimizer, averages_all=self._averages_all)
        self.slots = combination.slots(names)
        """Names of the optimizer's state tensors that trainers average or reset."""
        if names and not self.slots and not any(kind.__module__.startswith("torch.optim.") for kind in _kinds(optimizer)):
            what = "must be averaged or reset, and this optimizer keeps it under an unknown name"
            hint = 'leave momentum at "local", or average all state: optimizer_state = "average"'
            raise ConfigError(what, "momentum", f"{type(optimizer).__name__} keeps {', '.join(names)}", hint)
        self._fused = FusedOptimizer(optimizer) if combination.fuses_update else None
        self._updates = False

    @property
    def held(self) -> list[nn.Parameter]:
        """All parameters of the optimizer's current groups."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def begin(self, *, updates: bool) -> None:
        """Prepare the user's ``optimizer.step()``; without ``updates``, gradients are hidden, and nothing changes."""
        self._refuse_foreign()
        if self._restore is not None:  # the last step has raised
            self._restore()
        self._updates = updates
        self._restore = scale_rates(self.optimizer, self.lr_scale) if updates else hide(self._parameters.values())
        if updates and self._fused is not None:
            self._fused.begin()

    def end(self) -> None:
        """Undo ``begin``, after the step."""
        if self._restore is not None:
            self._restore()
            self._restore = None
            if self._updates and self._fused is not None:
                self._fused.end()

    def refuse_unaveraged(self) -> None:
        """Raise ``ConfigError`` if all state is to be averaged, but the optimizer has made state that cannot be."""
        for parameter in self._parameters.values() if self._averages_all else ():
            refuse_unaveraged(self.optimizer, parameter, self.optimizer.state.get(parameter, {}), self.slots)

    def _refuse_foreign(self) -> None:
        """Raise ``ConfigError`` if the optimizer holds trained parameters that fleet does not average."""
        held = self.held
        if self._own.issuperset(map(id, held)):
            return
        others = [parameter for parameter in held if id(parameter) not in self._own and parameter.requires_grad]
        known = self._known() if others else ()
        trained = [parameter for parameter in others if id(parameter) not in known]
        if trained:
            what = "holds parameters that are not the distributed model's, or did not require gradients when it was distributed"
            hint = "let all that is trained require gradients, and give its model, or each of them, to fleet.distributed_model before"
            raise ConfigError(what, "the optimizer", f"{len(trained)}, the first of shape {list(trained[0].shape)}", hint)


class Controls:
    """Controls of all optimizers of one model under one plan, in the order in which fleet was given the optimizers."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        combination: Combination,
        storage: Storage,
        parameters: Mapping[str, nn.Parameter],
        num_planned: int,
        known: Callable[[], Collection[int]],
    ) -> None:
        """``num_planned``: number of state tensors that the plan exchanges per parameter; missing ones are zeros."""
        self.optimizers = list(optimizers)
        self.each = [OptimizerControl(one, combination, parameters, known) for one in optimizers]
        """The control of each optimizer."""
        self._storage = storage
        self._parameters = parameters
        self._num_planned = num_planned
        self.num_slots = max((len(own.slots) for own in self.each), default=0) if combination.averages_state else 0
        """The largest number of state tensors per parameter that are averaged."""

    @property
    def lr(self) -> float:
        """The learning rate of the first optimizer's first group."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    def place(self, optimizer: Optimizer) -> int:
        """Return the index of this optimizer."""
        return next(number for number, own in enumerate(self.optimizers) if own is optimizer)

    def held(self) -> list[list[nn.Parameter]]:
        """Return, for each optimizer, the model's parameters in its current groups."""
        known = {*map(id, self._parameters.values())}
        return [[parameter for parameter in own.held if id(parameter) in known] for own in self.each]

    def step_between(self) -> None:
        """Update all parameters outside of the user's steps."""
        self.refuse_shared()
        for own in self.each:
            own.begin(updates=True)
            step_some(own.optimizer, self._parameters.values())
            own.end()

    def step_some(self, parameters: Collection[nn.Parameter]) -> None:
        """Update those of the parameters that have a gradient."""
        for own in self.each:
            step_some(own.optimizer, parameters, own.lr_scale)

    def state(self, bucket: int) -> list[torch.Tensor]:
        """Return the averaged state of a bucket's parameters, ``num_planned`` tensors for each."""
        holders = {id(parameter): own for own in self.each for parameter in own.held}
        found = []
        for parameter in self._storage.parameters[bucket]:
            own = holders.get(id(parameter))
            state = [] if own is None else state_tensors(own.optimizer, parameter, own.slots)
            found += [*state, *(torch.zeros_like(parameter) for _ in range(self._num_planned - len(state)))]
        return found

    @torch.no_grad()
    def pack_state(self, bucket: int, buffer: torch.Tensor) -> None:
        """Copy a bucket's averaged state into the flat ``buffer``."""
        torch.cat([tensor.reshape(-1) for tensor in self.state(bucket)], out=buffer)

    @torch.no_grad()
    def unpack_state(self, bucket: int, buffer: torch.Tensor) -> None:
        """Copy the flat ``buffer`` into a bucket's state."""
        tensors = self.state(bucket)
        for tensor, piece in zip(tensors, torch.split(buffer, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(piece.view(tensor.shape))

    def reset(self) -> None:
        """Zero the state that the strategy resets."""
        for own in self.each:
            reset_state(own.optimizer, own.slots)

    def refuse_shared(self) -> None:
        """Raise ``ConfigError`` for a parameter that two optimizers hold."""
        if len(self.each) == 1:
            return
        holders: dict[int, Optimizer] = {}
        for own in self.each:
            for parameter in own.held:
                other = holders.setdefault(id(parameter), own.optimizer)
                if other is not own.optimizer:
                    name = next((name for name, one in self._parameters.items() if one is parameter), "")
                    kinds = f"{type(other).__name__} and {type(own.optimizer).__name__}"
                    hint = "let it be in the groups of one, or give fleet the second again: it takes the first's place"
                    raise ConfigError("is held by two optimizers that fleet was given", f"parameter {name}", kinds, hint)


class FusedOptimizer:
    """Lets the user's optimizer update with ``fused=True`` where torch supports it, and else with ``foreach=True``.

    ``begin`` sets this on the optimizer's groups for one step, and ``end`` restores them. A group whose implementation
    the user chose stays as it is. Each element is computed as in the plain update, except for the rounding of products
    that torch's kernels contract. Raises ``ConfigError`` for an optimizer that is not in ``ELEMENTWISE``, or is
    differentiable.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if type(optimizer) not in ELEMENTWISE:
            names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            what = "cannot be fused over all parameters"
            hint = f"set it to false, or use one of {names}"
            raise ConfigError(what, "build_strategy.fuse_all_optimizer_ops", type(optimizer).__name__, hint)
        if any(group["differentiable"] for group in optimizer.param_groups):
            what = "cannot be fused where the update is differentiated"
            hint = "set it to false, or build the optimizer without differentiable"
            raise ConfigError(what, "build_strategy.fuse_all_optimizer_ops", "differentiable = True", hint)
        self._optimizer = optimizer
        self._changed: list[tuple[Group, str]] = []

    def begin(self) -> None:
        """Choose each group's implementation, before the optimizer steps."""
        for group in self._optimizer.param_groups:
            implementation = self._implementation(group)
            if implementation is not None:
                group[implementation] = True
                self._changed.append((group, implementation))

    def end(self) -> None:
        """Restore the groups, after the optimizer has stepped."""
        groups = [group for group in self._optimizer.param_groups if group.get("fused")]
        moved = [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]
        torch.autograd.graph.increment_version(moved)  # which torch's kernel omits: autograd then refuses tensors saved before
        for group, implementation in self._changed:
            group[implementation] = None
        self._changed.clear()

    def _implementation(self, group: Group) -> str | None:
        if group.get("foreach") is not None or group.get("fused") is not None:
            return None
        gradients = {parameter: gradient for parameter in group["params"] if (gradient := parameter.grad) is not None}
        if any(gradient.layout != torch.strided for gradient in gradients.values()):
            return None  # only the plain update handles rows
        kind = type(self._optimizer)
        have_kernels = all(
            own.is_floating_point()
            and kind in (_KERNELS_OF_SHARDS if hasattr(own, "to_local") else _KERNELS.get(own.device.type, ()))
            and gradient.stride() == dense_strides(own) == own.stride()
            for own, gradient in gradients.items()
        )  # fused kernels go through memory in its order
        if isinstance(group.get("weight_decay"), torch.Tensor) or not have_kernels:
            return "foreach"
        state = self._optimizer.state
        begun = {any(value is not None for value in state.get(parameter, {}).values()) for parameter in gradients}
        if len(begun) > 1:  # the kernel needs state of all its parameters, or of none
            return "foreach"
        for parameter in gradients:
            if "step" in state.get(parameter, {}):  # the kernel needs it on the parameter's device
                state[parameter]["step"] = state[parameter]["step"].to(parameter.device)
        return "fused"


def refuse_whole(optimizer: Optimizer, what: Combination) -> None:
    """Raise ``ConfigError`` for LBFGS, which may call a closure any number of times, if each backward counts."""
    if isinstance(optimizer, torch.optim.LBFGS):
        hint = "use an optimizer that treats parameters one by one, such as SGD or Adam; or leave that out of the strategy"
        why = f"updates all parameters as one, from a closure, and {fields_of(what)} counts backwards"
        raise ConfigError(why, "optimizer", type(optimizer).__name__, hint)


def copy_of(optimizer: Optimizer, groups: list[Group], state: Any) -> Optimizer:
    """Return an optimizer with the same class and attributes, the given groups and state, and no hooks."""
    copied = object.__new__(type(optimizer))
    copied.__dict__ = {name: value for name, value in optimizer.__dict__.items() if not name.endswith("_hooks")} | {
        "param_groups": groups,
        "state": state,
        "_optimizer_step_pre_hooks": OrderedDict(),
        "_optimizer_step_post_hooks": OrderedDict(),
    }
    return copied


def _kinds(optimizer: Optimizer) -> list[type]:
    """Return the optimizer's classes, except the common bases."""
    return [kind for kind in type(optimizer).__mro__ if kind not in (Optimizer, object)]


def _step(copied: Optimizer) -> None:
    """Step without torch's global hooks on all optimizers: they are the user's, for the user's own steps."""
    step: Any = type(copied).step  # of the class, because a scheduler wraps that of the object
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(copied)


def step_some(optimizer: Optimizer, parameters: Collection[nn.Parameter], lr_scale: float = 1.0) -> None:
    """Update those of ``parameters`` that have a gradient, with the state and current groups of the user's optimizer.

    Learning rates are multiplied by ``lr_scale``. Parameters that the optimizer does not hold are skipped.
    """
    wanted = set(parameters)
    held = [(group, [parameter for parameter in group["params"] if parameter in wanted]) for group in optimizer.param_groups]
    groups = [{**group, "params": own} | ({"lr": group["lr"] * lr_scale} if lr_scale != 1 else {}) for group, own in held]
    _step(copy_of(optimizer, [group for group in groups if group["params"]], optimizer.state))


def hide(parameters: Iterable[nn.Parameter]) -> Callable[[], None]:
    """Set the gradients to None until the returned function is called, so that ``optimizer.step()`` changes nothing."""
    hidden = [(parameter, gradient) for parameter in parameters if (gradient := parameter.grad) is not None]
    for parameter, _ in hidden:
        parameter.grad = None

    def restore() -> None:
        for parameter, gradient in hidden:
            parameter.grad = gradient

    return restore


def scale_rates(optimizer: Optimizer, factor: float) -> Callable[[], None]:
    """Multiply the groups' learning rates until the returned function is called."""
    groups = [(group, group["lr"], group["lr"] * factor) for group in optimizer.param_groups] if factor != 1 else []
    for group, _, scaled in groups:
        group["lr"] = scaled  # not in place: a schedule may hold a tensor

    def restore() -> None:
        for group, rate, scaled in groups:
            if group["lr"] is not scaled:
                hint = "call scheduler.step() after optimizer.step(), and not in a hook of it; or leave lr_scale at 1"
                raise ConfigError(
                    "was set within optimizer.step(), where lr_scale has scaled it", "the learning rate", str(group["lr"]), hint
                )
            group["lr"] = rate

    return restore


def refuse_unaveraged(optimizer: Optimizer, like: torch.Tensor, state: State, slots: Collection[str]) -> None:
    """Raise ``ConfigError`` if a parameter's state has more than ``slots`` and single numbers, such as step counts.

    ``like``: the parameter.
    """
    for name, value in state.items():
        for tensor in pytree.tree_leaves(value):
            if not isinstance(tensor, torch.Tensor) or (tensor.numel() == 1 and name not in slots):
                continue
            is_like = tensor.shape == like.shape and tensor.dtype == like.dtype
            if name not in slots or tensor is not value or not is_like:
                what = 'keeps state that cannot be averaged (optimizer_state = "average")'
                own, of = (f"{list(each.shape)} of {each.dtype}" for each in (tensor, like))
                told = f"{name}: {own}, of a parameter of {of}"
                hint = 'set optimizer_state = "local", or use one whose state is like its parameters: AdamW'
                raise ConfigError(what, f"optimizer {type(optimizer).__name__}", told, hint)


def state_slots(optimizer: Optimizer, *, averages_all: bool = False) -> tuple[str, ...]:
    """Return the names of state tensors with the parameter's shape, such as ``exp_avg``, over all groups, sorted.

    Steps a copy of the optimizer on a dummy parameter; the optimizer does not change. Raises ``ConfigError`` for an
    optimizer that has no state by parameter or cannot step the dummy and, with ``averages_all``, for one that also has
    other state.
    """
    slots: set[str] = set()
    for group in [group for group in optimizer.param_groups if group["params"]]:
        like = group["params"][0]
        probe = nn.Parameter(torch.ones((2, 3), dtype=like.dtype, device=like.device))
        probe.grad = torch.ones_like(probe)
        states: defaultdict[nn.Parameter, State] = defaultdict(dict)
        try:
            _step(copy_of(optimizer, [{**group, "params": [probe]}], states))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"cannot be asked for its state: {error}", "optimizer", type(optimizer).__name__, "use an optimizer of torch.optim"
            ) from error
        tensors = {name: value for name, value in states[probe].items() if isinstance(value, torch.Tensor)}
        found = {name for name, value in tensors.items() if value.shape == probe.shape}
        if averages_all:
            refuse_unaveraged(optimizer, probe, states[probe], found)
        slots |= found
    return tuple(sorted(slots))


@torch.no_grad()
def state_tensors(optimizer: Optimizer, parameter: nn.Parameter, slots: Sequence[str]) -> list[torch.Tensor]:
    """Return the parameter's state tensors, one per slot, to be written in place; missing ones are created.

    Missing state starts with the optimizer's initial values (Adam's step of 0, Adagrad's
    ``initial_accumulator_value``). A slot that the optimizer creates only in a step starts at zero: SGD then damps its
    first gradient too, which changes that step if ``dampening`` is not 0. Raises ``ConfigError`` for an optimizer
    without torch's function that makes its initial state, and ``KeyError`` for a parameter that it does not hold.
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
    """Return the initial state that the optimizer makes for a new parameter."""
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
    initialise(copy_of(optimizer, [group], state), group, *lists)
    return {name: value for name, value in state[stand_in].items() if value is not None}


@torch.no_grad()
def reset_state(optimizer: Optimizer, slots: Sequence[str]) -> None:
    """Zero the slots of all parameters in place; missing slots stay missing."""
    tensors = [
        state[slot] for state in optimizer.state.values() for slot in slots if isinstance(state, dict) and state.get(slot) is not None
    ]
    if tensors:
        torch._foreach_zero_(tensors)  # torch has no public name for zeroing a list of tensors at once
