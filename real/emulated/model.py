"""Emulated compute: a model that sleeps by a layer table, and whose gradients are real; and an update that sleeps.

Forward and backward go through autograd as a real model's do. What is emulated is the time that
they take, and the values: a parameter's gradient is the same in every step (``gradient_value``), so
that averages of gradients can be checked by a closed form.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
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
from real.engine.gradients import shard_of

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

    Each of ``blocks``, which are to be sharded, is a module with a forward of its own, and what passes between two of them, as they are
    gathered and scattered, holds compute up: all later deadlines move by it.
    """

    def __init__(
        self, table: LayerTable, rank: int = 0, pace: Pace | None = None, blocks: Mapping[str, Collection[str]] = MappingProxyType({})
    ) -> None:
        """``blocks``: names of gradients by the submodule that they are in. Raises ``ConfigError`` for a table that no model can be."""
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
            raise ConfigError("two gradients have one name", "workload.profile", repr(name), "take the profile again, or correct its file")
        self.pace = pace or Pace()
        self._compute_ns = table.forward_ns + table.backward_ns
        parameters = {gradient.name: _add_parameter(self, gradient) for layer in table.layers for gradient in layer.gradients}
        sources = {
            gradient.name: _Source(*parameters[gradient.name], gradient_value(rank, position), table.forward_ns + gradient.ready, self.pace)
            for position, gradient in enumerate(gradients)
        }
        block_of = {name: block for block, names in blocks.items() for name in names}
        ends_ns = tuple(accumulate(layer.forward for layer in table.layers))
        self._parts: list[_Part] = []
        """Runs of layers of one block, in forward order."""
        for block, layers in _runs(table, block_of):
            own = {gradient.name for layer in layers for gradient in table.layers[layer].gradients}
            part: Any = self.get_submodule(block) if block else _Part()
            ready = [source for name, source in sources.items() if name in own]
            part.holds(self.pace, [ends_ns[layer] for layer in layers], ready, hands_over=bool(blocks))
            self._parts.append(part)
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
        """Compute the forward; the graph of a part is built while its first layer's time passes."""
        if not self.pace.begun:
            self.pace.begin()
        passed = torch.zeros(())
        for part in self._parts:
            passed = part(passed)
        passed.register_hook(lambda _: Variable._execution_engine.queue_callback(lambda: self.pace.finish(self._compute_ns)))  # noqa: SLF001  # as DDP learns of the backward's end
        return passed


class EmulatedOptimizer(torch.optim.Optimizer):
    """Takes ``update_ns`` for a step over all parameters, and of some their share by elements.

    The first element of every parameter that has a gradient moves by -lr times its gradient's, and the first
    element of each state tensor by the gradient's: so trainers that update alone differ, and what they
    average can be checked by hand; of a sharded parameter the first of each shard. All other elements stay, because trainers may
    outnumber the cores many times.
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
            members = [parameter for parameter in group["params"] if parameter.grad is not None and shard_of(parameter).numel()]
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
    return shard_of(tensor).narrow(0, 0, 1)


class _Part(nn.Module):
    """A module of an emulated model. One that ``holds`` layers has a forward."""

    def holds(self, pace: Pace, ends_ns: Sequence[int], sources: Sequence["_Source"], *, hands_over: bool) -> None:
        """Give this module its layers.

        ``ends_ns``: when the layers' forwards end, in ns of undisturbed compute since the model's forward began.
        ``sources``: sources of the layers' gradients, in order of readiness. ``hands_over``: whether what happens
        between this module's compute and the next one's holds compute up.
        """
        self._pace, self._ends_ns, self._sources, self._hands_over = pace, ends_ns, sources, hands_over
        for source in sources if hands_over else ():
            source.hands_over = source is sources[-1]

    def forward(self, passed: torch.Tensor) -> torch.Tensor:
        """Compute; the graph is built while the first layer's time passes."""
        for source in reversed(self._sources):
            passed = _Arrival.apply(passed, source.parameter, source)  # type: ignore[no-untyped-call]  # torch's
        for end_ns in self._ends_ns[:-1]:
            self._pace.reach(end_ns)
        self._pace.reach(self._ends_ns[-1], hands_over=self._hands_over)
        return passed


def _runs(table: LayerTable, block_of: Mapping[str, str]) -> list[tuple[str, list[int]]]:
    """Return runs of consecutive layers of one block: the block's name (empty outside blocks) and the layers' indices.

    A layer without gradients belongs to the run before it. Raises ``ConfigError`` for a block whose layers do not
    follow one another.
    """
    found: list[tuple[str, list[int]]] = []
    for number, layer in enumerate(table.layers):
        own = next((block_of.get(gradient.name, "") for gradient in layer.gradients), found[-1][0] if found else "")
        if not found or found[-1][0] != own:
            found.append((own, []))
        found[-1][1].append(number)
    name, count = Counter(name for name, _ in found if name).most_common(1)[0] if block_of else ("", 1)
    if count > 1:
        hint = "name blocks whose layers follow one another in strategy.sharding_configs.blocks"
        raise ConfigError(f"has layers in {count} places of the model, and a forward for each", f"block {name}", hint=hint)
    return found


class _Source:
    """Source of one parameter's gradient: a tensor that is allocated and filled once, and reused in every step."""

    hands_over = True
    """Whether hooks on the gradient hold compute up."""

    def __init__(self, owner: nn.Module, name: str, number: float, mark_ns: int, pace: Pace) -> None:
        self._owner, self._name = owner, name
        self._number = number
        self._mark_ns = mark_ns
        self._pace = pace
        self._memory = torch.full_like(self.parameter, number, requires_grad=False)
        self._version = self._memory._version  # noqa: SLF001  # torch documents it, and has no other name for it

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that the module holds now; in a sharded block, the gathered one."""
        found: nn.Parameter = getattr(self._owner, self._name)
        return found

    def gradient(self) -> torch.Tensor:
        """Sleep until the gradient is due, and return it; autograd uses the tensor as ``.grad`` without a copy.

        If the last one was written to in place, as by DDP, its values are restored first.
        """
        if self._memory._version != self._version:  # noqa: SLF001  # see above; what shares the memory shares the version
            self._memory.fill_(self._number)
            self._version = self._memory._version  # noqa: SLF001  # see above
        self._pace.reach(self._mark_ns, hands_over=self.hands_over)
        return self._memory.detach()


class _Arrival(torch.autograd.Function):
    """Autograd function of one gradient: its backward sleeps until the gradient is due, then gives it to the parameter.

    A forward chains these functions, so that a backward runs them in the table's order of readiness.
    """

    @staticmethod
    def forward(ctx: Any, passed: torch.Tensor, _parameter: nn.Parameter, source: _Source) -> torch.Tensor:
        ctx.source = source
        return passed.clone()

    @staticmethod
    def backward(ctx: Any, *passed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return passed[0], ctx.source.gradient(), None


def _add_parameter(root: nn.Module, gradient: Gradient) -> tuple[nn.Module, str]:
    """Make the parameter that a gradient belongs to, zero: in which module, made where it is not there yet, and its name there."""
    parameter = nn.Parameter(torch.zeros(gradient.numel, dtype=getattr(torch, gradient.dtype)))
    *parts, own = gradient.name.split(".")
    owner = root
    try:
        for part in parts:
            if part not in dict(owner.named_children()):
                owner.add_module(part, _Part())
            owner = owner.get_submodule(part)
        owner.register_parameter(own, parameter)
    except KeyError as error:
        hint = "give the layer another name, such as block0"
        raise ConfigError(f"cannot be a module's name in torch: {error.args[0]}", "layer", repr(gradient.name), hint) from None
    return owner, own
