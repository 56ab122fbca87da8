"""One update of all parameters, in as few kernels as torch has for it (``build_strategy.fuse_all_optimizer_ops``)."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from fleetbench.errors import ConfigError
from real.engine.twins import Group, make_twin, refresh_twin, step_twin

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


class FusedOptimizer:
    """Makes the user's optimizer's update, in its state, with ``fused=True`` where torch can and else with ``foreach=True``.

    A group whose implementation the user chose is stepped by that. Each element's arithmetic is the plain update's
    but for the rounding of products that torch's kernels contract. Raises ``ConfigError`` for an optimizer that is
    not in ``ELEMENTWISE``, or is differentiable.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if type(optimizer) not in ELEMENTWISE:
            names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise ConfigError(
                "cannot be fused over all parameters",
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
        self._twin = make_twin(optimizer, [], optimizer.state)

    def step(self) -> None:
        """Update the parameters that have a gradient."""
        groups = [{**group, **self._options(group)} for group in self._optimizer.param_groups]
        refresh_twin(self._twin, self._optimizer, groups, self._optimizer.state)
        step_twin(self._twin)
        moved = [item for group in groups if group.get("fused") for item in group["params"] if item.grad is not None]
        torch.autograd.graph.increment_version(moved)  # which torch's kernel leaves out: autograd then refuses what it saved before

    def _options(self, group: Group) -> Group:
        if group.get("foreach") is not None or group.get("fused") is not None:
            return {}
        gradients = {parameter: gradient for parameter in group["params"] if (gradient := parameter.grad) is not None}
        if any(gradient.layout != torch.strided for gradient in gradients.values()):
            return {}  # the plain update knows rows
        if isinstance(group.get("weight_decay"), torch.Tensor) or not all(map(self._has_kernel, gradients)):
            return {"foreach": True}
        state = self._optimizer.state
        begun = {any(value is not None for value in state.get(parameter, {}).values()) for parameter in gradients}
        if len(begun) > 1:  # the kernel takes state of all its parameters or of none
            return {"foreach": True}
        for parameter in gradients:
            if "step" in state.get(parameter, {}):  # which the kernel counts where the parameter is
                state[parameter]["step"] = state[parameter]["step"].to(parameter.device)
        return {"fused": True}

    def _has_kernel(self, parameter: nn.Parameter) -> bool:
        return parameter.is_floating_point() and type(self._optimizer) in _KERNELS.get(parameter.device.type, ())
