"""Gradients of all trainers' batches, in the way that is faster for the model at hand.

- ``loop``: one trainer after the other, by autograd.
- ``stacked``: ``vmap`` over all trainers, or over some at a time.

Both give the same numbers up to the order of sums. Which one is faster depends on the model's width and on
the number of trainers; with wide layers they are alike.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fleetbench.strategy import AmpConfigs
from fleetbench.workloads.models.registry import Loss
from sim.learning.prepared import Look, never

Tensors = list[torch.Tensor]
_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
TOGETHER_NBYTES = 32 * 2**20
"""Largest memory of trainers that compute at once. On a core with 2 MiB of cache, 8 MiB and all of 256
trainers take more time."""


class Computed(NamedTuple):
    """Results of a step."""

    gradients: Tensors
    """Gradients of each parameter: one per trainer, or their mean, ``(1, ...)``; multiplied by the loss
    scale."""
    losses: torch.Tensor
    """Losses ``(trainers,)``, without the scale."""
    buffers: Tensors
    """Buffers after the step, ``(trainers, ...)``."""


Arguments = tuple[Tensors, Tensors, torch.Tensor, torch.Tensor, torch.Tensor]
Way = Callable[..., Computed]
"""Function of ``Arguments``: parameters ``(members, ...)``, buffers ``(trainers, ...)``, the loss scale,
inputs and labels, each ``(trainers, batch, ...)``."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The computation: a model's loss, by trainer."""

    model: nn.Module
    compare: Loss
    trainers: int
    shares: bool
    """Whether all trainers have the same parameters, so that there is one member; otherwise one per
    trainer."""
    averages: bool
    """Whether only the mean of the trainers' gradients is wanted, for trainers that share parameters."""
    amp: AmpConfigs | None = None
    """Settings of autocast in the forward; none without it."""
    look: Look = never
    """Function called before each trainer of a loop, and before each part of a stack."""

    def forward(self, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], inputs: torch.Tensor) -> tuple[Any, Tensors]:
        """Return one trainer's output of the model, in full precision, and the buffers after the forward."""
        own = [buffer.clone() for buffer in buffers]
        dtype = None if self.amp is None else _HALF[self.amp.dtype]
        with nullcontext() if dtype is None else torch.autocast(inputs.device.type, dtype=dtype, cache_enabled=False):
            output = torch.func.functional_call(self.model, dict(zip(self._names, [*parameters, *own], strict=True)), (inputs,))
        return output if dtype is None or output.dtype != dtype else output.float(), own

    @cached_property
    def _names(self) -> list[str]:
        return [name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())]

    def loop(self, parameters: Tensors, buffers: Tensors, scale: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor) -> Computed:
        """Compute one trainer after the other; see ``Way``."""
        rows = 1 if self.averages else self.trainers
        gradients = [parameter.new_zeros((rows, *parameter.shape[1:])) for parameter in parameters]
        leaves, split = ([value.detach().unbind() for value in values] for values in (parameters, gradients))  # faster than indices
        losses: Tensors = []
        moved: list[Tensors] = []
        for trainer in range(self.trainers):
            own = [of_members[0 if self.shares else trainer].requires_grad_() for of_members in leaves]
            into = [of_trainers[0 if self.averages else trainer] for of_trainers in split]
            self.look()
            output, after = self.forward(own, [buffer[trainer] for buffer in buffers], inputs[trainer])
            loss = self.compare(output, labels[trainer])
            torch._foreach_add_(into, torch.autograd.grad(loss * scale, own))  # torch has no public name for adding lists of tensors
            losses.append(loss.detach())
            moved.append([buffer.detach() for buffer in after])
        if self.averages:
            torch._foreach_div_(gradients, self.trainers)  # as above
        return Computed(gradients, torch.stack(losses), [torch.stack(of_buffer) for of_buffer in zip(*moved, strict=True)])

    def activation_bytes(self, inputs: torch.Tensor, labels: torch.Tensor) -> int:
        """Return the bytes that the forward of one batch keeps for its backward, besides parameters."""
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        own = [*self.model.parameters()]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            _graph = self.compare(self.forward(own, [*self.model.buffers()], inputs)[0], labels)
        return sum(nbytes for place, nbytes in kept.items() if place not in {value.untyped_storage().data_ptr() for value in own})

    def stacked(
        self, parameters: Tensors, buffers: Tensors, scale: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor, *, together: int
    ) -> Computed:
        """Compute ``together`` trainers at once, or all if only the mean is wanted; see ``Way``.

        Raises ``RuntimeError`` for a model that vmap cannot stack.
        """
        found = []
        for begin in range(0, self.trainers, self.trainers if self.averages else together):
            part = slice(begin, begin + (self.trainers if self.averages else together))
            self.look()
            own = parameters if self.shares else [value[part] for value in parameters]
            found.append(self._at_once(own, [value[part] for value in buffers], scale, inputs[part], labels[part]))
        gradients, losses, moved = zip(*found, strict=True)
        return Computed(_joined(gradients), torch.cat(losses), _joined(moved))

    def _at_once(self, parameters: Tensors, buffers: Tensors, scale: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor) -> Computed:
        """Return these trainers' gradients as those of the sum of their losses."""
        num = len(labels)
        joint = self.averages and self.amp is None  # with autocast each trainer's gradient is rounded by itself
        values = [parameter[0] if joint else parameter.expand(num, *parameter.shape[1:]) for parameter in parameters]
        own = [value.detach().requires_grad_() for value in values]

        def of_one(own: Tensors, buffers: Tensors, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
            output, moved = self.forward(own, buffers, inputs)
            return self.compare(output, labels), moved

        losses, moved = torch.vmap(of_one, in_dims=(None if joint else 0, 0, 0, 0))(own, buffers, inputs, labels)
        gradients = torch.autograd.grad(losses.sum() * scale, own)
        if self.averages:
            gradients = tuple((gradient / num).unsqueeze(0) if joint else gradient.mean(0, keepdim=True) for gradient in gradients)
        return Computed(list(gradients), losses.detach(), [buffer.detach() for buffer in moved])


def _joined(parts: Sequence[Tensors]) -> Tensors:
    """Return each tensor of all parts as one."""
    return [torch.cat(of_parts) for of_parts in zip(*parts, strict=True)]


def fastest(problem: Problem, arguments: Arguments, together: int) -> str:
    """Return the way that takes less processor time for these arguments' gradients, or on a GPU less time."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # vmap warns where it goes through all trainers one by one
            stacked_s = _seconds(partial(problem.stacked, together=together), arguments)
    except (RuntimeError, UserWarning):  # vmap has no rule for one of the model's operations, or one that is slower than a loop
        return "loop"
    return "stacked" if stacked_s < _seconds(problem.loop, arguments) else "loop"


def _seconds(way: Way, arguments: Arguments) -> float:
    """Return the seconds of one step, the second: processor time, which other programs affect less.

    On a GPU until its end.
    """
    clock = time.perf_counter if arguments[-1].is_cuda else time.process_time
    for _ in range(2):
        begin = clock()
        way(*arguments)
        if arguments[-1].is_cuda:
            torch.cuda.synchronize(arguments[-1].device)
    return clock() - begin
