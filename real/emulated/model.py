"""Emulated compute: a model that sleeps by a layer table and has real gradients, and an optimizer that sleeps.

Forward and backward go through autograd as in a real model. Their times are emulated, and so are values: a parameter's
gradient is the same in every step (``gradient_value``), so that averages of gradients can be checked by a closed form.
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
    """Return the value of all elements of a gradient, for the parameter at ``position`` in the order of readiness.

    Values are small whole numbers, so that every type holds them, and their sums over a few ranks, exactly.
    """
    return float((rank + 1) * (position % _PERIOD + 1))


def refuse_table(experiment: Experiment, strategy: DistributedStrategy) -> None:
    """Raise ``ConfigError`` if a profile lacks the strategy's table, or if no model can be made of the table.

    It is called before any process is asked to train.
    """
    if experiment.workload.model == LAYERS or experiment.workload.profile is not None:
        with torch.device("meta"):  # no memory is taken
            EmulatedModel(table_for(experiment.replace(strategy=strategy)))


class EmulatedModel(nn.Module):
    """Modules, parameters and times of a layer table. Takes no input; its output is a scalar to call ``backward`` on.

    Every gradient has a node in autograd's graph, all in one chain, so that a backward reaches them in the table's
    order of readiness, and runs a gradient's hooks before it continues with the next.

    Deadlines count from the forward's start (``pace.begin``; a forward calls it if nobody has). A layer's forward ends
    at round((1 + X) times the forwards up to it); a gradient is ready at round((1 + X) times the whole forward and its
    ``ready``); the backward ends at round((1 + X) times all compute). These are the times of the simulator's trainer,
    whose compute continues from the forward's start, regardless of communication. A late backward, or slow hooks,
    therefore cost time only if they outlast the compute that hides them.

    Gradients have their real size and type, and are handed over without a copy. No forward may come between another one
    and its backward.

    Each of ``blocks``, which are to be sharded, is a module with its own forward. The time for gathers and scatters
    between two blocks delays compute: all later deadlines move by it.
    """

    def __init__(
        self, table: LayerTable, rank: int = 0, pace: Pace | None = None, blocks: Mapping[str, Collection[str]] = MappingProxyType({})
    ) -> None:
        """Build the model; ``blocks``: names of gradients, by the submodule that holds them.

        Raises ``ConfigError`` for a table of which no model can be built.
        """
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
        """Modules that each run consecutive layers of one block, in forward order."""
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
        """Compute the forward; the graph of each part is built during the part's first layer."""
        if not self.pace.begun:
            self.pace.begin()
        passed = torch.zeros(())
        for part in self._parts:
            passed = part(passed)
        passed.register_hook(lambda _: Variable._execution_engine.queue_callback(lambda: self.pace.finish(self._compute_ns)))  # noqa: SLF001  # as DDP learns of the backward's end
        return passed


class EmulatedOptimizer(torch.optim.Optimizer):
    """An optimizer whose step over all parameters takes ``update_ns``, and over some of them their share by elements.

    The first element of every parameter with a gradient moves by -lr times that of its gradient, and the first element
    of each state tensor by that of the gradient. Trainers that update alone therefore differ, and their averages can be
    checked by hand. For a sharded parameter this holds for each shard's first element. All other elements stay, because
    trainers may outnumber the cores many times. A step without any gradient takes no time.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, update_ns: int, pace: Pace, slots: tuple[str, ...] = ()) -> None:
        super().__init__(parameters, {"lr": lr})
        self._update_ns = update_ns
        self._pace = pace
        self._slots = slots
        self._numel: int = sum(parameter.numel() for group in self.param_groups for parameter in group["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are the engine's to refuse
        """Update, and return when the update's time has passed."""
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
    """Return a view of the first element, made as cheaply as possible, because every step makes one per parameter."""
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
        """Compute; the graph is built during the first layer."""
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
    """Whether the time of hooks on the gradient delays later compute."""

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
    """Add a gradient's parameter, set to zero, and missing modules to ``root``; return its module and name there."""
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
