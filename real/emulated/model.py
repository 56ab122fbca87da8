"""Emulated compute: a model that sleeps by a layer table, and whose gradients are real; and an update that sleeps.

Forward and backward go through autograd as a real model's do. What is emulated is the time that
they take, and the values: a parameter's gradient is the same in every step (``gradient_value``), so
that averages of gradients can be checked by a closed form.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.layers import Gradient, LayerTable
from fleetbench.profile import table_for
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import LAYERS
from real.emulated.pace import Pace

_PERIOD = 7


def gradient_value(rank: int, position: int) -> float:
    """Every element of the gradient that ``rank`` has for the parameter at ``position`` in order of readiness.

    Small whole numbers, which every type holds exactly, and their sums over a few ranks too.
    """
    return float((rank + 1) * (position % _PERIOD + 1))


def refuse_table(experiment: Experiment, strategy: DistributedStrategy) -> None:
    """Raise ``ConfigError``, before processes are asked, where a profile lacks the strategy's table, or no model can be made of it."""
    if experiment.workload.model == LAYERS or experiment.workload.profile is not None:
        with torch.device("meta"):  # no memory is taken
            EmulatedModel(table_for(experiment.replace(strategy=strategy)))


class EmulatedModel(nn.Module):
    """Modules, parameters and times of a layer table. Takes no input; its output is a scalar to call ``backward`` on.

    Every gradient has a node in autograd's graph, all in one chain, so that a backward reaches them in the
    table's order of readiness, and runs a gradient's hooks before it goes on to the next.

    Deadlines count from the forward's start (``pace.begin``; without that, a forward begins by itself).
    A layer's forward ends at round((1 + X) times the forwards up to it); a gradient is there at round((1 + X)
    times the whole forward and its ``ready``); the backward ends at round((1 + X) times all compute. These are
    the moments of the simulator's trainer, whose compute goes on from the forward's start, whatever travels
    beside it. A backward that begins late, or hooks that take long, therefore lose time only where they
    outlast the compute that hides them.

    Gradients have their real size and type, and are handed over without a copy. No forward may come between
    another one and its backward.
    """

    def __init__(self, table: LayerTable, rank: int = 0, pace: Pace | None = None) -> None:
        """Raises ``ConfigError`` for a table that no model can be."""
        super().__init__()
        gradients = table.by_readiness()
        if not any(gradient.numel for gradient in gradients):
            raise ConfigError("has no gradient, so that there is nothing to train", "workload.layers", hint="give a layer params above 0")
        sparse = next((gradient.name for gradient in gradients if gradient.sparse), None)
        if sparse is not None:
            what = "has sparse gradients, whose rows follow from data that an emulated device does not read"
            raise ConfigError(what, f"parameter {sparse}", hint='set run.device = "cpu", or build the embedding with sparse=False')
        name, count = Counter(gradient.name for gradient in gradients).most_common(1)[0]
        if count > 1:
            raise ConfigError("two gradients have one name", "workload.profile", repr(name), "take the profile again, or mend its file")
        self.pace = pace or Pace()
        self._compute_ns = table.forward_ns + table.backward_ns
        self._forward_ends_ns = tuple(accumulate(layer.forward for layer in table.layers))
        parameters = {gradient.name: _add_parameter(self, gradient) for layer in table.layers for gradient in layer.gradients}
        self._sources = tuple(
            _Source(parameters[gradient.name], gradient_value(rank, position), table.forward_ns + gradient.ready, self.pace)
            for position, gradient in enumerate(gradients)
        )
        if table.buffers_nbytes:
            averaged = table.buffers_nbytes if table.averaged_nbytes is None else table.averaged_nbytes
            halves = max(0, averaged - table.buffers_nbytes) // 2  # of 2 bytes each, which are averaged in 4
            masks = max(0, table.buffers_nbytes - averaged)
            kinds = (
                ("statistics", -(-averaged // 4) - halves, torch.float32),
                ("halves", halves, torch.bfloat16),
                ("masks", masks, torch.uint8),
            )
            for kind, numel, dtype in kinds:
                if numel > 0:
                    self.register_buffer(f"emulated_{kind}", torch.zeros(numel, dtype=dtype))

    def forward(self) -> torch.Tensor:
        """Compute the forward; the graph is built while the first layer's time passes."""
        if not self.pace.begun:
            self.pace.begin()
        passed = torch.zeros(())
        for source in reversed(self._sources):
            passed = _Arrival.apply(passed, source.parameter, source)  # type: ignore[no-untyped-call]  # torch's
        passed.register_hook(lambda _: Variable._execution_engine.queue_callback(lambda: self.pace.finish(self._compute_ns)))  # noqa: SLF001  # as DDP learns of the backward's end
        for end_ns in self._forward_ends_ns:
            self.pace.reach(end_ns)
        return passed


class EmulatedOptimizer(torch.optim.Optimizer):
    """Takes ``update_ns`` for a step over all parameters, and of some their share by elements.

    The first element of every parameter that has a gradient moves by -lr times its gradient's, and the first
    element of each state tensor by the gradient's: so trainers that update alone differ, and what they
    average can be checked by hand. All other elements stay, because trainers may outnumber the cores many times.
    A step without any gradient takes no time.
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
        assert closure is None, "a closure would compute gradients again"
        numel: int = sum(parameter.numel() for group in self.param_groups for parameter in group["params"] if parameter.grad is not None)
        deadline_ns = self._pace.deadline((2 * self._update_ns * numel + self._numel) // (2 * self._numel))
        for group in self.param_groups:
            members = [parameter for parameter in group["params"] if parameter.grad is not None and parameter.numel()]
            gradients = [_first(parameter.grad) for parameter in members]
            if not members:
                continue
            torch._foreach_add_([_first(parameter) for parameter in members], gradients, alpha=-group["lr"])  # no public name for lists
            for slot in self._slots:
                torch._foreach_add_([_first(self._tensor(parameter, slot)) for parameter in members], gradients)  # as above
        if self._update_ns:
            self._pace.busy_until(deadline_ns)

    def _tensor(self, parameter: nn.Parameter, slot: str) -> torch.Tensor:
        state = self.state[parameter]
        if slot not in state:
            state[slot] = torch.zeros_like(parameter)
        found: torch.Tensor = state[slot]
        return found


def _first(tensor: torch.Tensor) -> torch.Tensor:
    """The first element, as a view: the cheapest one, for every step makes one of every parameter."""
    return tensor.narrow(0, 0, 1)


class _Source:
    """Where one gradient comes from: memory of its own, filled once."""

    def __init__(self, parameter: nn.Parameter, number: float, mark_ns: int, pace: Pace) -> None:
        self.parameter = parameter
        self._number = number
        self._mark_ns = mark_ns
        self._pace = pace
        self._memory = torch.full_like(parameter, number, requires_grad=False)
        self._version = self._memory._version  # noqa: SLF001  # torch documents it, and has no other name for it

    def gradient(self) -> torch.Tensor:
        """The gradient, when it is time: a tensor over the source's memory, which autograd takes for ``.grad`` as it is.

        Whoever has written to the last one in place, as DDP does, finds this one as it should be.
        """
        if self._memory._version != self._version:  # noqa: SLF001  # see above; what shares the memory shares the version
            self._memory.fill_(self._number)
            self._version = self._memory._version  # noqa: SLF001  # see above
        self._pace.reach(self._mark_ns, hands_over=True)
        return self._memory.detach()


class _Arrival(torch.autograd.Function):
    """A link of the chain: its backward waits for a gradient and hands it to the parameter."""

    @staticmethod
    def forward(ctx: Any, passed: torch.Tensor, _parameter: nn.Parameter, source: _Source) -> torch.Tensor:
        ctx.source = source
        return passed.clone()

    @staticmethod
    def backward(ctx: Any, *passed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return passed[0], ctx.source.gradient(), None


def _add_parameter(root: nn.Module, gradient: Gradient) -> nn.Parameter:
    """The parameter that a gradient belongs to, zero, in the module that its name says, made where it is not there yet."""
    parameter = nn.Parameter(torch.zeros(gradient.numel, dtype=getattr(torch, gradient.dtype)))
    *parts, own = gradient.name.split(".")
    owner = root
    try:
        for part in parts:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(own, parameter)
    except KeyError as error:
        hint = "give the layer another name, such as block0"
        raise ConfigError(f"cannot be a module's name in torch: {error.args[0]}", "layer", repr(gradient.name), hint) from None
    return parameter
