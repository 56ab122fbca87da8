"""RankLegs: the legs of one rank, in the driver's order, of a script or of an experiment's own workload.

Life cycle: ``joined`` (the driver knows this rank) -> legs: after the last step of each, the rank writes its
part and waits for the next order -> the driver says stop. In a script each leg begins and ends where
``optimizer.step()`` returns. After the last one, the script's own strategy is restored and ``SystemExit`` is
raised. If a script's data end first, it leaves an incomplete part at exit.

``real.leg_steps`` defines how a leg runs.
"""

from __future__ import annotations

import functools
import sys
import time
import types
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from fleetbench.config import encode
from fleetbench.strategy import DistributedStrategy
from real.checkpoints.meeting import Meeting
from real.communication.communicators import Communicators, agree_on, backend_of_world
from real.compute.recompute import SavedForBackward
from real.engine.engine import Engine
from real.job.driver_watch import end_script
from real.job.facts import facts_of
from real.job.folder import BeatWriter, RankSide
from real.layer_times import ProfileLeg
from real.leg import Leg
from real.leg_steps import Beat, LegEngine, Trained, begin_leg, keeping_gradients
from real.processes.exits import at_exit
from real.processes.place import Place

if TYPE_CHECKING:
    from real.sharded_legs import ShardedSwitch


class EngineSwitch(Trained):
    """Changes the strategy in the running process of a user's script, at the same step on every rank.

    The old engine removes its hooks and buffers. The optimizer's state becomes rank 0's, because Local SGD and layer
    profiles leave a different one on every rank. A new engine starts all ranks from rank 0's parameters and buffers.
    The user's ``.grad`` stay unchanged, for code that reads them after ``optimizer.step()``. ``on_engine`` is called
    with every new engine.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        on_engine: Callable[[Engine], None],
        trainers_per_node: int,
        notes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(engine.communicators, engine.strategy, trainers_per_node)
        self.notes = notes
        self._engine: Engine | None = engine
        self.model, self.optimizer = engine.model, optimizer
        self._on_engine = on_engine
        self._evaluated: set[int] = set()
        self._watching: RemovableHandle  # during a leg

    def open(self, strategy: DistributedStrategy, *, first_step: int = 1, record: bool = False, keep_times: bool = True) -> Engine:
        """Change to ``strategy``; the next step is ``first_step``."""
        self.leave()
        engine = Engine(
            self.model,
            strategy,
            self.communicators,
            first_step=first_step,
            record=record,
            keep_times=keep_times,
            trainers_per_node=self.trainers_per_node,
        )
        engine.attach_optimizer(self.optimizer)
        self._engine = engine
        self.use(engine)
        return engine

    def use(self, engine: Engine) -> None:
        """Use this engine; see ``Trained``."""
        engine.stopwatch.fetch_every = sys.maxsize  # no rank waits for its device to read a loss
        self._on_engine(engine)

    def begin(self, leg: Leg, beat: Beat) -> Engine:
        """Change to the leg's strategy, or the script's own, and observe the model's forwards from now on."""
        strategy = self.own_strategy if leg.start == "as_is" else leg.strategy
        engine = self.open(strategy, first_step=1 - leg.warmup_steps, record=leg.record)
        engine.on_step = beat

        def see_forward(model: nn.Module, arguments: tuple[object, ...], named: dict[str, object]) -> None:
            if not (model.training and torch.is_grad_enabled()):  # an evaluation, which delays the end of the previous step
                self._evaluated.add(engine.step)
            elif self.batch_size is None:
                leaves = pytree.tree_leaves((arguments, named))
                self.batch_size = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0), None)

        self._watching = self.model.register_forward_pre_hook(see_forward, with_kwargs=True)
        return engine

    def results(self, _leg: Leg) -> dict[str, Any]:
        """Return the steps after which the script has evaluated its model."""
        self._watching.remove()
        evaluated, self._evaluated = sorted(self._evaluated), set()
        return {"evaluated": evaluated}

    def measuring(self, _leg: Leg) -> ProfileLeg:
        """Return the measuring leg; see ``Trained``."""
        self.leave()
        return ProfileLeg(self.model, self.optimizer, self.communicators)

    def count_saved(self, saved: SavedForBackward) -> None:
        """Count bytes saved for the backward; see ``Trained``. The loss is the script's."""
        handles: list[RemovableHandle] = []

        def enter(*_: object) -> None:
            if self.model.training and torch.is_grad_enabled():
                saved.__enter__()
                handles.append(self.model.register_forward_hook(leave))

        def leave(*_: object) -> None:
            saved.__exit__(None, None, None)
            while handles:
                handles.pop().remove()

        handles.append(self.model.register_forward_pre_hook(enter))

    def leave(self) -> None:
        """Close the current engine, and give all ranks the same optimizer state."""
        if self._engine is not None:
            with keeping_gradients(self.model):
                self._engine.close()
            self._engine = None
        share_state(self.optimizer, self.communicators)


@torch.no_grad()
def share_state(optimizer: torch.optim.Optimizer, communicators: Communicators) -> None:
    """Copy rank 0's optimizer state to every rank, tensor by tensor, in place.

    Plain numbers, such as step counts, are equal on all ranks anyway. Raises ``ConfigError`` if a rank holds
    other state than rank 0.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [sorted(optimizer.state.get(parameter, {}).items()) for parameter in parameters]  # in one order on all ranks
    found = [(f"{number}.{name}", value) for number, state in enumerate(states) for name, value in state if isinstance(value, torch.Tensor)]
    agree_on([f"{where} {list(tensor.shape)} {tensor.dtype}" for where, tensor in found], "the optimizer's state", communicators)
    for _, tensor in found:
        if tensor.device.type == communicators.device.type:
            communicators.broadcast(tensor)


_MEETINGS = 9


def clock_ahead_ns(meeting: Meeting) -> int:
    """Return by how many ns this host's monotonic clock is ahead of rank 0's; every rank calls it at the same place.

    All ranks leave a meeting at about the same time, and record it. The offset is the median over several meetings.
    Ranks on rank 0's kernel share its clock: their offset is 0.
    """
    kernels = meeting.texts(Place.here().kernel)
    left = [meeting.gather([time.monotonic_ns()]) for _ in range(1 + _MEETINGS if len(set(kernels)) > 1 else 0)]
    found = [now[meeting.rank][0] - now[0][0] for now in left[1:]]  # the first meeting only shows when ranks arrived
    return 0 if kernels[meeting.rank] == kernels[0] else round(median(found))


class RankLegs:
    """The legs of one rank; see the module."""

    def __init__(self, folder: RankSide, rank: int, meeting: Meeting | None = None) -> None:
        self.folder = folder
        self._rank = rank
        self._meeting = meeting
        self._beats = BeatWriter(folder.beats, rank)
        self._legs: Generator[LegEngine, bool | None, None]  # of a script, once it is ready to train
        self._engine: Engine | None = None
        """Engine of a script's current leg."""
        self._num_steps = 0
        """Number of steps so far of a script's process."""
        self._evaluates, self._metrics = False, dict[str, list[tuple[int, torch.Tensor | float]]]()
        """Whether the current leg evaluates; metrics that the script has reported in it, by name: (step, value)."""

    @classmethod
    def join(cls, meeting: Meeting) -> RankLegs:
        """Announce that this rank is here; every rank calls it.

        Raises ``ConfigError`` if ``FLEETBENCH_TUNING`` names no folder of a job.
        """
        folder = RankSide.of_environment()
        steps = cls(folder, meeting.rank, meeting)
        folder.join(meeting.rank, meeting.trainers, Place.here().host)
        at_exit(steps.exits)
        return steps

    def begin(self, switch: EngineSwitch | ShardedSwitch) -> None:
        """Begin the first leg and follow the optimizer's steps; called when the script is ready to train."""
        self._legs = self._of_script(switch)
        follow_steps(switch.optimizer, self.step_done)
        self._advance(None)

    def report(self, loss: torch.Tensor | float, metrics: Mapping[str, torch.Tensor | float] | None = None) -> bool:
        """Take a loss and metrics from the script; return whether a leg used them."""
        if self._engine is None:
            return False
        for name, value in (metrics or {}).items() if self._evaluates else ():
            kept = value.detach().clone() if isinstance(value, torch.Tensor) else value  # read when the leg is over
            self._metrics.setdefault(name, []).append((self._num_steps, kept))
        self._engine.report(loss)
        self._engine.stopwatch.loss(loss)
        return True

    def step_done(self) -> None:
        """Handle the end of the script's ``optimizer.step()``. Raises ``SystemExit`` after the last leg."""
        self._num_steps += 1
        self._advance(False)

    def exits(self) -> None:
        """Keep the results of an unfinished leg when the process exits, unless by an error."""
        if self._engine is not None and not hasattr(sys, "last_value"):
            self._advance(True)

    def _advance(self, is_over: bool | None) -> None:
        self._engine = None
        with suppress(StopIteration):
            self._engine = cast("Engine", self._legs.send(is_over))  # a script has no other

    def _of_script(self, switch: EngineSwitch | ShardedSwitch) -> Generator[LegEngine, bool | None, None]:
        """Follow the driver's orders in a script. Beats count the steps of its process, as errors do."""
        is_stopped = yield from self.orders(switch, lambda number, _step: self._beats.beat(number, self._num_steps + 1))
        if is_stopped:
            switch.open(switch.own_strategy, keep_times=False)  # for what the script still does before it exits
            end_script()

    def orders(self, trained: Trained, beat: Callable[[int, int], None] | None = None) -> Generator[LegEngine, bool | None, bool]:
        """Run leg after leg, step by step, until the driver says stop (returns True) or the script ends.

        All ranks change legs after the same steps. ``beat`` gets a leg's number and each step that begins.
        """
        number = 0
        beat = beat or self._beats.beat
        while (leg := self.folder.wait_for(number, Leg)) is not None:
            self._beats.beat(number, self._num_steps or -leg.warmup_steps)
            offsets_ns = [self._compared_clocks()]
            first, self._evaluates, self._metrics = 1 - leg.warmup_steps - self._num_steps, leg.evaluate, {}
            part = yield from begin_leg(leg, trained, partial(beat, number))
            if not part["complete"]:
                self.folder.finish(number, self._rank, part)
                return False
            if leg.start == "as_is":
                facts = facts_of(
                    trained.model,
                    trained.optimizer,
                    trainers=trained.communicators.trainers,
                    trainers_per_node=trained.trainers_per_node,
                    backend=backend_of_world(),
                    device=trained.device.type,
                    strategy=trained.own_strategy,
                    batch_size=trained.batch_size,
                    notes=trained.notes,
                    reports_loss=any(step["record"]["loss"] is not None for step in part["steps"]),
                )
                part["facts"] = encode(facts)
            if self._metrics:
                part["metrics"] = {name: [[first + at, float(value)] for at, value in told] for name, told in self._metrics.items()}
            offsets_ns.append(self._compared_clocks())  # all ranks are here, and the clocks have drifted since the leg began
            self.folder.finish(number, self._rank, part | {"clock_offsets_ns": offsets_ns})
            number += 1
        return True

    def _compared_clocks(self) -> tuple[int, int]:
        """Return the time on this rank's clock, and by how much the clock is ahead of rank 0's, both in ns."""
        return time.monotonic_ns(), 0 if self._meeting is None else clock_ahead_ns(self._meeting)


def follow_steps(optimizer: torch.optim.Optimizer, on_step: Callable[[], None]) -> None:
    """Call ``on_step`` after every ``optimizer.step()``, its hooks included.

    Learning-rate schedules can wrap the new ``step`` as they wrap any.
    """
    step = optimizer.step

    @functools.wraps(step)
    def followed(_optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        result = step(*arguments, **named)
        on_step()
        return result

    optimizer.step = types.MethodType(followed, optimizer)  # type: ignore[method-assign]  # as torch's own schedules do
