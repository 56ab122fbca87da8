"""Control of the user's optimizer: it steps when the strategy says so, and in the way it says.

The object stays the user's own. Its ``step()`` is let through, kept from finding any gradient, or
made in as few kernels as torch has for it (``build_strategy.fuse_all_optimizer_ops``), or replaced by updates
of one bucket's parameters each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from fleetbench.errors import ConfigError
from fleetbench.plan.combination import Combination
from real.engine.storage import Storage
from real.engine.twins import (
    Group,
    PartialOptimizer,
    hide,
    refuse_whole,
    reset_state,
    state_slots,
    state_tensors,
)

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
"""Where torch has one kernel for the whole update (``fused=True``)."""


class OptimizerControl:
    """One optimizer under one plan. ``begin`` and ``end`` stand around the user's ``optimizer.step()``."""

    def __init__(
        self,
        optimizer: Optimizer,
        combination: Combination,
        storage: Storage,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        self.optimizer = optimizer
        refuse_whole(optimizer)
        self._known = {id(parameter) for parameter in parameters.values()}
        self._refuse_foreign()
        self._storage = storage
        self._parameters = parameters
        self._restore: Callable[[], None] | None = None
        self.averages_state = combination.averages_state
        self.slots = state_slots(optimizer) if combination.averages_state or combination.resets_state else ()
        """Names of the state tensors that trainers average or reset."""
        self._fused = FusedOptimizer(optimizer) if combination.fuses_update else None
        self._partial: dict[int, PartialOptimizer] = {}
        if combination.updates_by_bucket:
            self._partial = {bucket: PartialOptimizer(optimizer, members) for bucket, members in storage.parameters.items()}

    @property
    def lr(self) -> float:
        """The learning rate of the first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def begin(self, *, updates: bool) -> None:
        """The user's optimizer is about to step; where it must not, it finds nothing to do."""
        self._refuse_foreign()
        if not updates:
            self._restore = hide(self._parameters.values())
        elif self._fused is not None:
            self._fused.begin()

    def end(self, *, updates: bool) -> None:
        """The user's optimizer has stepped."""
        if self._restore is not None:
            self._restore()
            self._restore = None
        if updates and self._fused is not None:
            self._fused.end()

    def step_between(self) -> None:
        """Update outside the user's ``step()``."""
        if self._fused is not None:
            self._fused.begin()
        PartialOptimizer(self.optimizer, self._parameters.values()).step()
        if self._fused is not None:
            self._fused.end()

    def bucket_step(self, bucket: int) -> Callable[[], None]:
        """What updates one bucket's parameters."""
        return self._partial[bucket].step

    def state(self, bucket: int) -> list[torch.Tensor]:
        """The averaged state of a bucket's parameters, one tensor a slot and parameter."""
        return [tensor for parameter in self._storage.parameters[bucket] for tensor in state_tensors(self.optimizer, parameter, self.slots)]

    @torch.no_grad()
    def pack_state(self, bucket: int, buffer: torch.Tensor) -> None:
        """Gather a bucket's state."""
        torch.cat([tensor.reshape(-1) for tensor in self.state(bucket)], out=buffer)

    @torch.no_grad()
    def unpack_state(self, bucket: int, buffer: torch.Tensor) -> None:
        """Put a bucket's state back."""
        tensors = self.state(bucket)
        for tensor, piece in zip(tensors, torch.split(buffer, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(piece.view(tensor.shape))

    def reset(self) -> None:
        """Clear the state."""
        reset_state(self.optimizer, self.slots)

    def _refuse_foreign(self) -> None:
        """Raise ``ConfigError`` for trained parameters that nobody averages: ranks would drift apart in them."""
        held = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        trained = [parameter for parameter in held if id(parameter) not in self._known and parameter.requires_grad]
        if trained:
            what = "holds parameters that are not the distributed model's, or did not require gradients when it was distributed"
            hint = "put all that is trained into one module, let it require gradients, and give that to fleet.distributed_model"
            raise ConfigError(what, "the optimizer", f"{len(trained)}, the first of shape {list(trained[0].shape)}", hint)


class FusedOptimizer:
    """Lets the user's optimizer update by ``fused=True`` where torch can and else by ``foreach=True``.

    ``begin`` sets that on the optimizer's groups for one step, ``end`` takes it back. A group whose implementation
    the user chose is left alone. Each element's arithmetic is the plain update's but for the rounding of products
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
        """The optimizer is about to step."""
        for group in self._optimizer.param_groups:
            implementation = self._implementation(group)
            if implementation is not None:
                group[implementation] = True
                self._changed.append((group, implementation))

    def end(self) -> None:
        """The optimizer has stepped."""
        groups = [group for group in self._optimizer.param_groups if group.get("fused")]
        moved = [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]
        torch.autograd.graph.increment_version(moved)  # which torch's kernel leaves out: autograd then refuses what it saved before
        for group, implementation in self._changed:
            group[implementation] = None
        self._changed.clear()

    def _implementation(self, group: Group) -> str | None:
        if group.get("foreach") is not None or group.get("fused") is not None:
            return None
        gradients = {parameter: gradient for parameter in group["params"] if (gradient := parameter.grad) is not None}
        if any(gradient.layout != torch.strided for gradient in gradients.values()):
            return None  # the plain update knows rows
        if isinstance(group.get("weight_decay"), torch.Tensor) or not all(map(self._has_kernel, gradients)):
            return "foreach"
        state = self._optimizer.state
        begun = {any(value is not None for value in state.get(parameter, {}).values()) for parameter in gradients}
        if len(begun) > 1:  # the kernel takes state of all its parameters or of none
            return "foreach"
        for parameter in gradients:
            if "step" in state.get(parameter, {}):  # which the kernel counts where the parameter is
                state[parameter]["step"] = state[parameter]["step"].to(parameter.device)
        return "fused"

    def _has_kernel(self, parameter: nn.Parameter) -> bool:
        return parameter.is_floating_point() and type(self._optimizer) in _KERNELS.get(parameter.device.type, ())
