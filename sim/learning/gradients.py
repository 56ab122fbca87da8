"""Gradients of all trainers' batches, computed by the method that is faster for a model.

- ``loop``: one trainer after the other, by autograd.
- ``graph``: ``vmap`` over all trainers, traced once into a graph of plain operations over stacked tensors,
  gradients included.

Both give the same numbers up to the order of sums. Which one is faster depends on the model's width and on
the number of trainers; with wide layers they are equally fast. Tracing takes seconds, so short training runs
use the loop.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from fleetbench.strategy import AmpConfigs
from fleetbench.workloads.models.registry import Loss
from sim.learning.prepared import Look, never

Tensors = list[torch.Tensor]
_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
WORTH_TRACING_S, TRACING_S = 3.0, 0.1
"""Seconds that it takes to import the tracer, and to trace per parameter."""


class Computed(NamedTuple):
    """Gradients, losses and buffers of one step."""

    gradients: Tensors
    """Gradient of each parameter: one per trainer, ``(trainers, ...)``, or their mean, ``(1, ...)``;
    multiplied by the loss scale."""
    losses: torch.Tensor
    """Losses ``(trainers,)``, without the loss scale."""
    buffers: Tensors
    """Buffers after the step, ``(trainers, ...)``."""


Arguments = tuple[Tensors, Tensors, torch.Tensor, torch.Tensor, torch.Tensor]
Way = Callable[..., Computed]
"""Function that computes a step from ``Arguments``: parameters ``(members, ...)``, buffers ``(trainers,
...)``, the loss scale, inputs and labels, each ``(trainers, batch, ...)``."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Computation of a step: the loss of a model for each trainer's batch, and its gradients."""

    model: nn.Module
    compare: Loss
    trainers: int
    shares: bool
    """Whether all trainers share one copy of the parameters, the only member; otherwise each trainer is a member."""
    averages: bool
    """Whether only the mean of the trainers' gradients is needed, for trainers that share parameters."""
    amp: AmpConfigs | None = None
    """Settings of autocast in the forward; ``None`` without autocast."""
    look: Look = never
    """Function called before each trainer of a loop."""

    def forward(self, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], inputs: torch.Tensor) -> tuple[Any, Tensors]:
        """Run the forward of one trainer. Return the output in full precision, and the buffers after it."""
        own = [buffer.clone() for buffer in buffers]
        dtype = None if self.amp is None else _HALF[self.amp.dtype]
        held = dict(zip(self._names, [*parameters, *own], strict=True))
        with nullcontext() if dtype is None else torch.autocast(inputs.device.type, dtype=dtype, cache_enabled=False):
            output = torch.func.functional_call(self.model, held, (inputs,))
        return output if dtype is None or output.dtype != dtype else output.float(), own

    @cached_property
    def _names(self) -> list[str]:
        """Names of the model's parameters and buffers."""
        return [name for named in (self.model.named_parameters(), self.model.named_buffers()) for name, _ in named]

    def loop(self, parameters: Tensors, buffers: Tensors, scale: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor) -> Computed:
        """Compute one trainer after the other; see ``Way``."""
        rows = 1 if self.averages else self.trainers
        gradients = [parameter.new_zeros((rows, *parameter.shape[1:])) for parameter in parameters]
        leaves, split = ([value.detach().unbind() for value in values] for values in (parameters, gradients))  # faster than indexing
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
        """Return the bytes that the forward of one batch keeps for its backward, in addition to parameters."""
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        own = [*self.model.parameters()]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            _graph = self.compare(self.forward(own, [*self.model.buffers()], inputs)[0], labels)
        return sum(nbytes for place, nbytes in kept.items() if place not in {value.untyped_storage().data_ptr() for value in own})

    def graph(self, *arguments: Any) -> Way:
        """Return the traced ``Way`` over stacked tensors, for all trainers at once.

        Raises ``RuntimeError``, or a warning of torch as an error, for a model that vmap cannot stack.
        """
        from torch.fx.experimental.proxy_tensor import make_fx  # seconds of imports, which short trainings need not pay for

        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # vmap warns if it computes trainers one by one
            traced = make_fx(partial(self._at_once))(*arguments)  # the tracer would count a bound method's ``self``

        @torch.no_grad()
        def run(*given: Any) -> Computed:
            return Computed(*traced(*given))

        return run

    def _at_once(
        self, parameters: Tensors, buffers: Tensors, scale: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor
    ) -> tuple[Tensors, torch.Tensor, Tensors]:
        """Return all trainers' gradients, losses and buffers. The gradients are those of the sum of losses.

        With autocast, each trainer's gradient is computed separately.
        """
        joint = self.averages and self.amp is None
        own = [parameter[0] if joint else parameter.expand(self.trainers, *parameter.shape[1:]) for parameter in parameters]

        def of_all(own: Tensors) -> tuple[torch.Tensor, Tensors]:
            outputs, moved = torch.vmap(self.forward, in_dims=(None if joint else 0, 0, 0))(own, buffers, inputs)
            return torch.vmap(self.compare)(outputs, labels), moved

        def of_one(
            own: Tensors, buffers: Tensors, inputs: torch.Tensor, labels: torch.Tensor
        ) -> tuple[torch.Tensor, tuple[torch.Tensor, Tensors]]:
            output, moved = self.forward(own, buffers, inputs)
            loss = self.compare(output, labels)
            return loss * scale, (loss, moved)

        if self.amp is None:
            losses, pull_back, moved = torch.func.vjp(of_all, own, has_aux=True)
            (gradients,) = pull_back(scale.expand(self.trainers))
        else:
            gradients, (_, (losses, moved)) = torch.vmap(torch.func.grad_and_value(of_one, has_aux=True))(own, buffers, inputs, labels)
        if self.averages:
            gradients = [(gradient / self.trainers if joint else gradient.mean(0)).unsqueeze(0) for gradient in gradients]
        return list(gradients), losses, moved


class Chosen(NamedTuple):
    """A ``Way``, its name, and the seconds that a step takes."""

    way: Way
    name: str
    step_s: float


def fastest(problem: Problem, arguments: Arguments, steps: int, *, may_stack: bool) -> Chosen:
    """Return the faster ``Way`` for these arguments, by processor time or, on a GPU, by elapsed time.

    ``may_stack``: whether memory suffices for all trainers at once. A graph is not considered if
    tracing could not pay off even if all trainers were as fast as one.
    """
    loop_s = _seconds(problem.loop, arguments)
    if not may_stack or loop_s * steps * (1 - 1 / problem.trainers) < WORTH_TRACING_S + TRACING_S * len(arguments[0]):
        return Chosen(problem.loop, "loop", loop_s)
    try:
        graph = problem.graph(*arguments)
        stacked = Chosen(graph, "graph", _seconds(graph, arguments))
    except (RuntimeError, UserWarning):  # vmap has no rule for one of the model's operations, or one that is slower than a loop
        return Chosen(problem.loop, "loop", loop_s)
    return min(Chosen(problem.loop, "loop", loop_s), stacked, key=attrgetter("step_s"))


def _seconds(way: Way, arguments: Arguments) -> float:
    """Return the seconds of one step, after a warm-up step.

    It is processor time, which other programs affect less, or on a GPU elapsed time until the step's end.
    """
    clock = time.perf_counter if arguments[-1].is_cuda else time.process_time
    for _ in range(2):
        begin = clock()
        way(*arguments)
        if arguments[-1].is_cuda:
            torch.cuda.synchronize(arguments[-1].device)
    return clock() - begin
