"""Sharded legs: a script's own ``fully_shard`` model under the strategies of a driver, one leg after another.

Legs differ in whether units reshard after their forward. In a leg for layer times, units stay gathered and
nothing is exchanged, so its optimizer steps find no gradients. All other legs give the same training result.
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
    """Records the steps of one leg; torch executes them."""

    living: ShardedModel
    optimizer: torch.optim.Optimizer
    strategy: DistributedStrategy
    stopwatch: Stopwatch
    step: int
    """Number of the step whose forward has begun last."""
    plan: Plan
    on_step: Beat = field(default=lambda _: None)
    _has_updated: bool = True
    _buckets: dict[int, int] = field(default_factory=dict)
    """Index of the plan's bucket for each of torch's parameters (``FSDPParam``), by its ``id()``."""
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def attach(self) -> None:
        """Hook the optimizer, and torch's gathers and scatters."""
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
        """Remove the hooks."""
        while self._undo:
            self._undo.pop()()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Time the model's forward, which runs inside the context."""
        if self._has_updated:
            self._has_updated = False
            self.step += 1
            self.stopwatch.begin_step(self.step)
            self.on_step(self.step)
        yield
        self.stopwatch.forward_ends()

    def flush(self, *, end: bool) -> None:
        """Do nothing, because nothing is in flight between two steps."""

    def recordings(self) -> list[Any]:
        """Return an empty list: torch makes none of the plan's decisions, so none is recorded."""
        return []

    def report(self, loss: torch.Tensor | float) -> None:
        """Do nothing, because nothing depends on the loss."""

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
    """Changes the strategy between two steps of all ranks; after the last leg it restores the script's own.

    ``ShardedEngine`` and ``ShardedProfileLeg`` have the methods of ``Engine`` and ``ProfileLeg`` that legs
    call.
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
        """Return the context of a forward.

        A forward without gradients is an evaluation after the step before it, whose end it delays.
        """
        if not torch.is_grad_enabled():
            self._evaluated.add(self.engine.step)
            return nullcontext()
        if self.batch_size is None:
            leaves = tree_leaves((inputs, named))
            self.batch_size = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0), None)
        return self.engine.forward()

    def results(self, _leg: Leg) -> dict[str, Any]:
        """Return the steps after which the script has evaluated its model."""
        evaluated, self._evaluated = sorted(self._evaluated), set()
        return {"evaluated": evaluated}

    def measuring(self, _leg: Leg) -> Any:
        """See ``Trained``."""
        return ShardedProfileLeg(self)

    def use(self, engine: Any) -> None:
        """Do nothing: ``open`` has put the engine into use."""

    def count_saved(self, saved: Any) -> None:
        """Do nothing, because activations are not counted."""


class ShardedProfileLeg:
    """Measures layer times while all parameters stay gathered and no gradient leaves the rank; see ``ProfileLeg``."""

    def __init__(self, switch: ShardedSwitch) -> None:
        self._switch = switch
        self.engine = switch.engine

    def steps(self, leg: Leg, on_step: Beat) -> Generator[None, None, Measured]:
        """Yield before each step that the caller trains."""
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
                dtypes = {each.name: each.dtype for each in living.gradients()}  # gathered parameters may have a narrower type
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
        """Do nothing, because gradients are not counted."""


def _unless_scaling(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a scaler's ``step`` that raises ``ConfigError`` if the scaler is enabled: it would find no gradients."""

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
    """Return whether innermost units reshard after their forward; ``None`` if ``strategy`` and ``own`` agree."""
    wanted, known = (one.sharding_configs.stage == 3 and one.sharding_configs.reshard_after_forward for one in (strategy, own))
    return None if wanted == known else bool(wanted)


def plan_of(living: ShardedModel, strategy: DistributedStrategy, trainers: int, trainers_per_node: int) -> Plan:
    """Return the plan of the model, with one bucket per unit."""
    gradients = living.gradients()
    setting = Setting(
        trainers=trainers,
        trainers_per_node=trainers_per_node,
        order=tuple(gradient.name for gradient in gradients),
    )
    return build_plan(strategy, gradients[::-1], setting)
