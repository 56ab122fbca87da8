"""RankLegs: the legs of one rank, one after another as the driver orders them, of a user's script or of an experiment's own workload.

``joined`` (the driver knows that this rank is there) -> legs: after the last step of each its part is written, and the next order is
waited for -> the driver says stop. In a script each leg begins and ends where ``optimizer.step()`` returns, and after the last one the
script's own strategy is back, and ``LegsDone`` is raised. A script whose data end first leaves an incomplete part at exit.

How a leg runs is said in ``real.leg_steps``.
"""

from __future__ import annotations

import atexit
import functools
import sys
import time
import types
import zlib
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any, cast

import torch

from fleetbench.config import encode
from real.communication.communicators import Communicators
from real.communication.device import backend_of_world
from real.engine.engine import Engine
from real.job.facts import Facts
from real.job.folder import RankPlace, RankSide
from real.job.strategy_switch import EngineSwitch
from real.job.watch import Ending
from real.leg import Leg
from real.leg_steps import Beat, LegEngine, LegSteps, Trained, begin_leg
from real.processes.beats import BeatWriter
from real.processes.place import Place

_BARRIERS = 9


class HostClocks:
    """By how much another host's monotonic clock is ahead of rank 0's. Every rank makes it, and asks it, at the same place.

    All ranks leave a barrier at about one time, and note it; the median over some barriers is the offset, good to what ranks differ
    by in leaving one. Ranks that share a kernel share its clock, and nothing is measured.
    """

    def __init__(self, communicators: Communicators, kernel: str) -> None:
        """``kernel`` is equal where clocks are shared."""
        self._communicators = communicators
        kernels = self._of_all(zlib.crc32(kernel.encode()))
        self._is_near = kernels[communicators.rank] == kernels[0]
        self._several = len(set(kernels)) > 1

    def offset_ns(self) -> int:
        """What to take from this rank's times to have them on rank 0's clock."""
        found = []
        for _ in range(_BARRIERS if self._several else 0):
            self._communicators.barrier()
            now = self._of_all(time.monotonic_ns())
            found.append(now[self._communicators.rank] - now[0])
        return 0 if self._is_near else round(median(found))

    def _of_all(self, value: int) -> list[int]:
        """Every rank's value, by rank."""
        communicators = self._communicators
        values = torch.zeros(communicators.trainers, dtype=torch.int64, device=communicators.device)
        values[communicators.rank] = value
        if communicators.trainers > 1:
            communicators.require(1)
            communicators.all_reduce(values, "sum")
        return list(map(int, values.tolist()))


class RankLegs:
    """See the module. ``begin_leg`` stands in for the engine in tests."""

    def __init__(
        self,
        folder: RankSide,
        rank: int,
        *,
        begin_leg: Callable[[Leg, Any, Beat], LegSteps] = begin_leg,
        ending: Ending | None = None,
        clocks: HostClocks | None = None,
    ) -> None:
        self.folder = folder
        self._rank = rank
        self._begin_leg = begin_leg
        self._ending = ending or Ending()
        self._clocks = clocks
        self._beats = BeatWriter(folder.beats, rank)
        self._legs: Generator[LegEngine, bool | None, None] | None = None
        self._engine: Engine | None = None
        """Of the leg of a script that is under way."""
        self._num_steps = 0
        """Of a script's process."""

    @classmethod
    def join(cls, communicators: Communicators, trainers_per_node: int) -> RankLegs:
        """Say that this rank is here. Every rank calls it.

        Raises ``ConfigError`` where ``FLEETBENCH_TUNING`` names no tuning directory.
        """
        folder = RankSide.of_environment()
        place, rank = Place.here(), communicators.rank
        steps = cls(folder, rank, clocks=HostClocks(communicators, place.kernel))
        folder.join(RankPlace(rank=rank, trainers=communicators.trainers, trainers_per_node=trainers_per_node, place=place))
        atexit.register(steps.exits)
        return steps

    def begin(self, switch: EngineSwitch) -> None:
        """The script is ready to train: follow the optimizer's steps from now on, and begin the first leg."""
        self._legs = self._of_script(switch)
        follow_steps(switch.optimizer, self.step_done)
        self._advance(None)

    def report(self, loss: torch.Tensor | float) -> bool:
        """The script tells a loss; whether a leg heard it."""
        if self._engine is None:
            return False
        self._engine.report(loss)
        self._engine.stopwatch.loss(loss)
        return True

    def step_done(self) -> None:
        """An ``optimizer.step()`` of the script is over. Raises ``LegsDone`` after the last leg."""
        if self._ending.begun:
            self._ending.end()
        self._num_steps += 1
        self._advance(False)

    def exits(self) -> None:
        """The process ends: what an unfinished leg has seen is kept, unless an error ended it."""
        if self._engine is not None and not hasattr(sys, "last_value"):
            self._advance(True)

    def _advance(self, is_over: bool | None) -> None:
        assert self._legs is not None
        self._engine = None
        with suppress(StopIteration):
            self._engine = cast("Engine", self._legs.send(is_over))  # a script has no other

    def _of_script(self, switch: EngineSwitch) -> Generator[LegEngine, bool | None, None]:
        """Beats count the process's steps, whatever a leg, or a checkpoint that was loaded, calls them: errors name the script's own."""
        is_stopped = yield from self.orders(switch, lambda number, _step: self._beats.beat(number, self._num_steps + 1))
        if is_stopped:
            switch.open(switch.own_strategy, keep_times=False)  # what the script does on its way out finds it as ever
            self._ending.end()

    def orders(self, trained: Trained, beat: Callable[[int, int], None] | None = None) -> Generator[LegEngine, bool | None, bool]:
        """Leg after leg, step by step, until the driver says stop: True, or a script ends. All ranks change legs after the same steps.

        ``beat`` hears of a leg's number and a step that begins.
        """
        number = 0
        beat = beat or self._beats.beat
        while (leg := self.folder.wait_for(number)) is not None:
            self._beats.beat(number, self._num_steps or -leg.warmup_steps)
            offsets_ns = [self._compared_clocks()]
            part = yield from self._begin_leg(leg, trained, partial(beat, number))
            if leg.start == "as_is":
                part["facts"] = encode(facts_of(trained, reports_loss=any(step["record"]["loss"] is not None for step in part["steps"])))
            if part["complete"]:  # and all ranks are here: the clocks have drifted since the leg began
                offsets_ns.append(self._compared_clocks())
            self.folder.finish(number, self._rank, part | {"clock_offsets_ns": offsets_ns})
            if not part["complete"]:
                return False
            number += 1
        return True

    def _compared_clocks(self) -> tuple[int, int]:
        """Now on this rank's clock, and by how much that is ahead of rank 0's."""
        return time.monotonic_ns(), 0 if self._clocks is None else self._clocks.offset_ns()


def facts_of(trained: Trained, *, reports_loss: bool) -> Facts:
    """What this rank knows of the script."""
    group = trained.optimizer.param_groups[0]
    first = next(parameter for parameter in trained.model.parameters() if parameter.requires_grad)
    return Facts(
        trainers=trained.communicators.trainers,
        trainers_per_node=trained.trainers_per_node,
        backend=backend_of_world(),  # type: ignore[arg-type]  # Facts checks both
        device=trained.device.type,  # type: ignore[arg-type]
        strategy=trained.own_strategy,
        optimizer=type(trained.optimizer).__name__,
        lr=float(group["lr"]),
        momentum=float(group.get("momentum", 0.0)),
        weight_decay=float(group.get("weight_decay", 0.0)),
        dtype=str(first.dtype).removeprefix("torch."),
        batch_size=trained.batch_size,
        reports_loss=reports_loss,
    )


def follow_steps(optimizer: torch.optim.Optimizer, on_step: Callable[[], None]) -> None:
    """Call ``on_step`` after every ``optimizer.step()``, its hooks included; learning-rate schedules wrap the result as they wrap any."""
    step = optimizer.step

    @functools.wraps(step)
    def followed(_optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        result = step(*arguments, **named)
        on_step()
        return result

    optimizer.step = types.MethodType(followed, optimizer)  # type: ignore[method-assign]  # as torch's own schedules do
