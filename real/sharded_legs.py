"""Sharded legs: a script's own ``fully_shard`` model under the strategies of a driver, one leg after another.

Units reshard after their forward, or do not; or, for layer times, stay gathered while nothing is exchanged. What training learns is the
same in all of them but the last, whose optimizer steps find no gradients.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from fleetbench.errors import ConfigError
from fleetbench.plan.build import Plan, Setting, build_plan
from fleetbench.plan.operations import Collective, Operation
from fleetbench.strategy import DistributedStrategy
from fleetbench.why.change import DdpChange
from real.communication.clocks import clock_of
from real.communication.communicators import Communicators
from real.engine.stopwatch import Stopwatch
from real.fully_shard import ShardedModel
from real.layer_times import LEAST_STEPS, LayerClock, Measured, memory_bytes, reset_peak
from real.leg import Leg
from real.leg_steps import Beat, Trained
from real.sharding.waits import GROUPS, Exchange, places, replaced


@dataclass(slots=True)
class ShardedEngine:
    """Notes the steps of one leg, which torch executes."""

    living: ShardedModel
    optimizer: torch.optim.Optimizer
    strategy: DistributedStrategy
    stopwatch: Stopwatch
    step: int
    """Of the forward under way, or the last one."""
    plan: Plan
    on_step: Beat = field(default=lambda _: None)
    _has_updated: bool = True
    _buckets: dict[int, int] = field(default_factory=dict)
    """The plan's bucket of each parameter as torch has it, by id."""
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def attach(self) -> None:
        """Hook the optimizer, and what gathers and scatters."""
        hooks: list[RemovableHandle] = [
            self.optimizer.register_step_pre_hook(lambda *_: self.stopwatch.update_begins()),
            self.optimizer.register_step_post_hook(lambda *_: self._updated()),
        ]
        self._undo += [each.remove for each in hooks]
        buckets = {name: bucket.id for bucket in self.plan.buckets for name in bucket.gradients}
        for group in self.living.groups():
            found = [buckets[name] for name, _ in self.living.named(group) if name in buckets]
            self._buckets |= {id(each): found[0] for each in group.fsdp_params if found}
        states, stack = sys.modules[GROUPS.replace("param_group", "state")], ExitStack()
        for place in (*places(self._waiting), (states.FSDPState, "_root_post_backward_final_callback", self._ends)):
            stack.enter_context(replaced(*place))
        self._undo.append(stack.close)

    def close(self) -> None:
        """Take the hooks away."""
        while self._undo:
            self._undo.pop()()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The model's forward runs inside."""
        if self._has_updated:
            self._has_updated = False
            self.step += 1
            self.stopwatch.begin_step(self.step)
            self.on_step(self.step)
        yield
        self.stopwatch.forward_ends()

    def flush(self, *, end: bool) -> None:
        """Nothing is under way between two steps."""

    def recordings(self) -> list[Any]:
        """No decision was recorded: torch has none of the plan's."""
        return []

    def report(self, loss: torch.Tensor | float) -> None:
        """Nothing follows the loss."""

    def _updated(self) -> None:
        self.stopwatch.update_ends()
        self._has_updated = True

    @contextmanager
    def _waiting(self, what: Exchange, parameters: Any) -> Iterator[None]:
        kind: Collective = "reduce_scatter" if what == "gradients" else "all_gather"
        operation = Operation(id=0, kind=kind, group="world", nbytes=0, bucket=self._buckets.get(id(parameters[0])))
        if what == "gradients":
            self.stopwatch.arrives()
        with self.stopwatch.waits(), self.stopwatch.collective(operation, self.step):
            yield

    def _ends(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def ends(state: Any) -> None:
            function(state)
            if state is self.living.module._get_fsdp_state():  # type: ignore[operator]  # noqa: SLF001  # torch has no public name for it
                self.stopwatch.backward_ends()

        return ends


class ShardedSwitch(Trained):
    """A change of strategy between two steps of all ranks; after the last leg the script's own is back.

    A ``ShardedEngine`` has what legs call of an ``Engine``, and a ``ShardedProfileLeg`` what they call of a ``ProfileLeg``.
    """

    def __init__(
        self,
        living: ShardedModel,
        optimizer: torch.optim.Optimizer,
        communicators: Communicators,
        trainers_per_node: int,
    ) -> None:
        super().__init__(communicators, living.own_strategy(), trainers_per_node)
        self.model: nn.Module = living.module
        self.optimizer = optimizer
        self.living = living
        self._evaluated: set[int] = set()
        self.engine = self.open(self.own_strategy, keep_times=False)

    def open(self, strategy: DistributedStrategy, *, first_step: int = 1, keep_times: bool = True) -> ShardedEngine:
        """Change to ``strategy``; the next step is ``first_step``."""
        if hasattr(self, "engine"):
            self.engine.close()
        reshards = reshard_of(strategy, self.own_strategy)
        self.living.change(DdpChange(reshard_after_forward=reshards, threads=strategy.thread_num))
        self.engine = ShardedEngine(
            self.living,
            self.optimizer,
            strategy,
            Stopwatch(self.communicators.rank, keep=keep_times, clock=clock_of(self.device), fetch_every=sys.maxsize),
            first_step - 1,
            plan_of(self.living, strategy, self.communicators.trainers, self.trainers_per_node),
        )
        self.engine.attach()
        return self.engine

    def begin(self, leg: Leg, beat: Beat) -> Any:
        """See ``Trained``."""
        strategy = self.own_strategy if leg.start == "as_is" else leg.strategy
        engine = self.open(strategy, first_step=1 - leg.warmup_steps)
        engine.on_step = beat
        return engine

    def forward(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> AbstractContextManager[None]:
        """The context of a forward; one without gradients follows the step before it, whose end it delays."""
        if not torch.is_grad_enabled():
            self._evaluated.add(self.engine.step)
            return nullcontext()
        if self.batch_size is None:
            leaves = tree_leaves((inputs, named))
            self.batch_size = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0), None)
        return self.engine.forward()

    def results(self, _leg: Leg) -> dict[str, Any]:
        """The steps after which the script has evaluated its model."""
        evaluated, self._evaluated = sorted(self._evaluated), set()
        return {"evaluated": evaluated}

    def measuring(self, _leg: Leg) -> Any:
        """See ``Trained``."""
        return ShardedProfileLeg(self)

    def use(self, engine: Any) -> None:
        """It is the open one."""

    def count_saved(self, saved: Any) -> None:
        """Activations are not counted."""


class ShardedProfileLeg:
    """Steps of compute alone: all parameters stay gathered, and no gradient leaves the rank. See ``ProfileLeg``."""

    def __init__(self, switch: ShardedSwitch) -> None:
        self._switch = switch
        self.engine = switch.engine

    def steps(self, leg: Leg, on_step: Beat) -> Generator[None, None, Measured]:
        """Yield before each step, which the caller trains."""
        switch, living = self._switch, self._switch.living
        self.engine = engine = switch.open(leg.strategy, first_step=1 - leg.warmup_steps)
        engine.on_step = on_step
        with living.gathered() as clear, replaced(torch.amp.GradScaler, "step", _unless_scaling):
            clock = LayerClock(living.module, clock_of(switch.device))
            clock.attach()
            try:
                for _ in range(max(1, leg.warmup_steps)):
                    begin = time.monotonic()
                    yield
                    clear()
                took = torch.tensor([time.monotonic() - begin], dtype=torch.float64, device=switch.device)
                switch.communicators.require(1)
                switch.communicators.all_reduce(took, "max")
                reset_peak(switch.device)
                first = engine.step + 1
                for _ in range(max(LEAST_STEPS, min(leg.steps, int(leg.max_s / float(took[0]))))):
                    yield
                    clock.keep()
                    clear()
                engine.stopwatch.finish()
                dtypes = {each.name: each.dtype for each in living.gradients()}  # what is gathered may be narrower
                times = clock.times()
                times.gradients = [(name, numel, dtypes[name]) for name, numel, _ in times.gradients]
                records = [timed.record for timed in engine.stopwatch.steps if timed.record.step >= first]
                return Measured(
                    layers=times,
                    backward=[record.backward_ns for record in records],
                    update=[record.update_ns for record in records],
                    read=[0 for _ in records],
                    memory=memory_bytes(living.module, switch.optimizer, 0),
                )
            finally:
                clock.detach()

    def update_done(self) -> None:
        """Nothing is counted of gradients."""


def _unless_scaling(step: Callable[..., Any]) -> Callable[..., Any]:
    """A scaler's step, which finds no gradients here."""

    def refused(scaler: torch.amp.GradScaler, *arguments: Any, **named: Any) -> Any:
        if scaler.is_enabled():
            hint = "train in bfloat16, which needs no scaler, or compare launches with different arguments of fully_shard"
            raise ConfigError(
                "unscales gradients, and there are none while the layers of a sharded model are timed",
                "GradScaler",
                hint=hint,
            )
        return step(scaler, *arguments, **named)

    return refused


def reshard_of(strategy: DistributedStrategy, own: DistributedStrategy) -> bool | None:
    """What a strategy changes of the innermost units' resharding; none: they do as the script, or its calls, say."""
    wanted, known = (one.sharding_configs.stage == 3 and one.sharding_configs.reshard_after_forward for one in (strategy, own))
    return None if wanted == known else bool(wanted)


def plan_of(living: ShardedModel, strategy: DistributedStrategy, trainers: int, trainers_per_node: int) -> Plan:
    """The plan of the model's units: one bucket each."""
    gradients = living.gradients()
    setting = Setting(
        trainers=trainers,
        trainers_per_node=trainers_per_node,
        order=tuple(gradient.name for gradient in gradients),
    )
    return build_plan(strategy, gradients[::-1], setting)
