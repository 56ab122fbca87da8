"""EmulatedOptimizer: an update that takes the time of a layer table, and next to none of the processor's.

Trainers whose compute is emulated may outnumber the cores many times; real updates of all their
parameters would be the compute that the machine has not got.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from real.emulated.pace import Pace

SLOTS = {"sgd": (), "momentum": ("momentum_buffer",), "adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq")}
"""The tensors that an optimizer keeps for each parameter, by the workload's name of it."""


class EmulatedOptimizer(torch.optim.Optimizer):
    """Takes ``update_ns`` for a step over all parameters, and of some their share by elements.

    The first element of every parameter that has a gradient moves by -lr times its gradient's, and the first
    element of each state tensor by the gradient's: so trainers that update alone differ, and what they
    average can be checked by hand. All other elements stay. A step without any gradient takes no time.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, update_ns: int, pace: Pace, slots: tuple[str, ...] = ()) -> None:
        super().__init__(parameters, {"lr": lr})
        self._update_ns = update_ns
        self._pace = pace
        self._slots = slots
        self._numel: int = sum(parameter.numel() for group in self.param_groups for parameter in group["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are the engine's to refuse
        """Update, and return when the time of it has passed."""
        assert closure is None, "a closure would compute gradients anew"
        deadline_ns = self._pace.deadline(self._took_ns())
        for group in self.param_groups:
            members = [parameter for parameter in group["params"] if parameter.grad is not None and parameter.numel()]
            gradients = [_first(parameter.grad) for parameter in members]
            if not members:
                continue
            torch._foreach_add_([_first(parameter) for parameter in members], gradients, alpha=-group["lr"])  # no public name for lists
            for slot in self._slots:
                torch._foreach_add_([_first(self._tensor(parameter, slot)) for parameter in members], gradients)  # as above
        self._pace.sleep_until(deadline_ns)

    def _took_ns(self) -> int:
        """The share of the parameters that have a gradient."""
        numel: int = sum(parameter.numel() for group in self.param_groups for parameter in group["params"] if parameter.grad is not None)
        return (2 * self._update_ns * numel + self._numel) // (2 * self._numel)

    def _tensor(self, parameter: nn.Parameter, slot: str) -> torch.Tensor:
        state = self.state[parameter]
        if slot not in state:
            state[slot] = torch.zeros_like(parameter)
        found: torch.Tensor = state[slot]
        return found


def _first(tensor: torch.Tensor) -> torch.Tensor:
    """The first element, as a view: the cheapest one, for every step makes one of every parameter."""
    return tensor.narrow(0, 0, 1)
