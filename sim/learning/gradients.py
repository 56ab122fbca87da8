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
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy, log_softmax, nll_loss

from fleetbench.strategy import AmpConfigs
from fleetbench.workloads.models.registry import Loss
from sim.learning.prepared import Look, never

Tensors = list[torch.Tensor]
_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
WORTH_TRACING_S, TRACING_S = 3.0, 0.1
"""Seconds that it takes to import the tracer, and to trace per parameter."""
CACHE_NBYTES = 8 * 2**20
"""Largest memory in bytes of trainers that compute together: the fastest of 0.5, 2, 8 and 24 MiB on a core
with 2 MiB of cache."""
_METHODS = frozenset({"view", "transpose", "t", "expand", "unsqueeze", "bmm", "mm", "add", "mul", "div", "sum", "mean", "relu"})
"""Operations that a graph calls as tensor methods, which take half the time of ``torch.ops``."""
FEW_CLASSES = 32
"""Largest number of classes for which log-softmax is slow over rows, and runs over columns."""


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
    """Function called before each trainer of a loop, and before each part of a graph."""

    def forward(self, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], inputs: torch.Tensor) -> tuple[Any, Tensors]:
        """Run the forward of one trainer. Return the output in full precision, and the buffers after it."""
        own = [buffer.clone() for buffer in buffers]
        dtype = None if self.amp is None else _HALF[self.amp.dtype]
        try:
            self._hold([*parameters, *own])
            with nullcontext() if dtype is None else torch.autocast(inputs.device.type, dtype=dtype, cache_enabled=False):
                output = self.model(inputs)
        finally:
            self._hold(self._tensors)
        return output if dtype is None or output.dtype != dtype else output.float(), own

    @cached_property
    def _tensors(self) -> Tensors:
        """The model's own parameters and buffers."""
        return [*self.model.parameters(), *self.model.buffers()]

    @cached_property
    def _places(self) -> list[list[tuple[dict[str, Any], str]]]:
        """For each of ``_tensors``, the dictionaries and names under which modules hold it; several for a tied one."""
        found: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for module in self.model.modules():
            for held in (module._parameters, module._buffers):  # noqa: SLF001  # functional_call searches each time: half of a small step
                for name, tensor in held.items():
                    found.setdefault(id(tensor), []).append((held, name))
        return [found[id(tensor)] for tensor in self._tensors]

    def _hold(self, tensors: Tensors) -> None:
        """Put ``tensors`` in the place of ``_tensors``, so that the model computes with them."""
        for places, tensor in zip(self._places, tensors, strict=True):
            for held, name in places:
                held[name] = tensor

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

    def graph(self, *arguments: Any, together: int = 0) -> Way:
        """Return the traced ``Way`` over stacked tensors, for all trainers or ``together`` at a time.

        Raises ``RuntimeError``, or a warning of torch as an error, for a model that vmap cannot stack.
        """
        if self.averages or not 0 < together < self.trainers:
            return self._traced(arguments)
        of_part = replace(self, trainers=together)._traced(self._part(arguments, slice(together)))  # noqa: SLF001  # its own class
        stacks = [value.new_empty((self.trainers, *value.shape[1:])) for value in arguments[0]]  # allocating takes half of a step

        def run(*given: Any) -> Computed:
            losses, moved = given[0][0].new_empty(self.trainers), [torch.empty_like(buffer) for buffer in given[1]]
            for begin in range(0, self.trainers, together):
                part = slice(min(begin, self.trainers - together), begin + together)  # the last part may overlap the previous one
                self.look()
                found = of_part(*self._part(given, part))
                for whole, own in zip((*stacks, losses, *moved), (*found.gradients, found.losses, *found.buffers), strict=True):
                    whole[part] = own
            return Computed(stacks, losses, moved)

        return run

    def _part(self, arguments: Arguments, part: slice) -> Arguments:
        """Return the arguments of the trainers in ``part``."""
        parameters, buffers, scale, inputs, labels = arguments
        own = parameters if self.shares else [value[part] for value in parameters]
        return own, [value[part] for value in buffers], scale, inputs[part], labels[part]

    def _traced(self, arguments: Arguments) -> Way:
        from torch.fx.experimental.proxy_tensor import make_fx  # seconds of imports, which short trainings need not pay for

        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # vmap warns if it computes trainers one by one
            traced = _tidied(make_fx(partial(self._at_once))(*arguments))  # the tracer would count a bound method's ``self``
        traced.graph.set_codegen(torch.fx.graph.CodeGen())  # takes and returns flat lists of tensors
        traced.recompile()

        @torch.no_grad()
        def run(parameters: Tensors, buffers: Tensors, *others: torch.Tensor) -> Computed:
            found, num = traced(*parameters, *buffers, *others), len(parameters)
            return Computed(found[:num], found[num], found[num + 1 :])

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
            return self._losses(outputs, labels), moved

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

    def _losses(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the losses of all trainers, ``(trainers,)``.

        Cross-entropy avoids vmap, which makes twenty operations of it, and short rows, which are slow.
        """
        if self.compare is not cross_entropy:
            found: torch.Tensor = torch.vmap(self.compare)(outputs, labels)
            return found
        outputs, labels = outputs.flatten(0, 1), labels.flatten(0, 1)
        likelihoods = log_softmax(outputs, 1) if outputs.shape[1] > FEW_CLASSES else log_softmax(outputs.T.contiguous(), 0).T
        return nll_loss(likelihoods, labels, reduction="none").view(self.trainers, -1).mean(1)


class Chosen(NamedTuple):
    """A ``Way``, its name, and the seconds that a step takes."""

    way: Way
    name: str
    step_s: float


def fastest(problem: Problem, arguments: Arguments, steps: int, together: int, *, may_stack: bool) -> Chosen:
    """Return the faster ``Way`` for these arguments, by processor time or, on a GPU, by elapsed time.

    ``may_stack``: whether memory suffices for ``together`` trainers at a time. A graph is not considered if
    tracing could not pay off even if all trainers were as fast as one.
    """
    loop_s = _seconds(problem.loop, arguments)
    if not may_stack or loop_s * steps * (1 - 1 / problem.trainers) < WORTH_TRACING_S + TRACING_S * len(arguments[0]):
        return Chosen(problem.loop, "loop", loop_s)
    try:
        graph = problem.graph(*arguments, together=together)
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


def _tidied(traced: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return the graph without redundant operations, which take half of a small model's step.

    A graph that changes tensors in place is unchanged, because equal operations may have different results
    there.
    """
    aten, graph = torch.ops.aten, traced.graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if any(_may_change(node.target) for node in calls):
        return traced
    reshapes = (aten.expand.default, aten.view.default, aten._unsafe_view.default)  # noqa: SLF001  # its only name
    before: dict[tuple[Any, str, str], torch.fx.Node] = {}
    for node in calls:
        key = (node.target, str(node.args), str(node.kwargs))
        first = node.args[0] if node.args and isinstance(node.args[0], torch.fx.Node) else None
        keeps_shape = first is not None and getattr(node.meta.get("val"), "shape", None) == getattr(first.meta.get("val"), "shape", ())
        is_idle = (node.target in reshapes and keeps_shape) or (node.target is aten.mul.Scalar and node.args[1] == 1)
        same = first if is_idle else before.setdefault(key, node)
        if same is not None and same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    turned = [node for node in graph.nodes if node.target is aten.transpose.int and node.args[1:] == (1, 2)]
    for node in turned:
        product: Any = node.args[0]
        if product.target is aten.bmm.default and product.args[0] in turned and len(product.users) == 1:  # of a layer's weights
            with graph.inserting_before(node):
                other = graph.call_function(aten.transpose.int, (product.args[1], 1, 2))
                node.replace_all_uses_with(graph.call_function(aten.bmm.default, (other, product.args[0].args[0])))
    graph.eliminate_dead_code()
    for node in graph.nodes:
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        if name in _METHODS and not node.kwargs:
            node.op, node.target = "call_method", name
    return traced


def _may_change(operator: Any) -> bool:
    """Whether an operation may write to its arguments, or give different results for equal ones.

    Batch norm does not declare its writes; random numbers differ.
    """
    schema = getattr(operator, "_schema", None)
    return schema is not None and (schema.is_mutable or "batch_norm" in schema.name or torch.Tag.nondeterministic_seeded in operator.tags)
