"""ScriptLegs: the legs of one rank of a user's script, each begun and ended where ``optimizer.step()`` returns.

``joined`` (``fleet.init`` has found a tuning directory) -> ``measuring`` (the first order has come, at
``fleet.distributed_optimizer``; after the last step of each leg its part is written, and the next order
is waited for) -> ``ending`` (the driver says stop: the script's own strategy is back, and ``LegsDone``
is raised). A script whose data end first leaves an incomplete part at exit.

Legs change after the step, outside of the optimizer's hooks: those may not be changed while they run.
"""

from __future__ import annotations

import atexit
import functools
import sys
import time
import types
import zlib
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from real.communication.communicators import Communicators
from real.engine.engine import Engine
from real.job.folder import RankPlace, RankSide
from real.job.script_leg import Beat, EngineSwitch, RunningLeg, leg_of
from real.job.watch import Ending, report_errors
from real.leg import Leg
from real.processes.beats import BeatWriter
from real.processes.place import Place

_BARRIERS = 9
StartLeg = Callable[[Leg, EngineSwitch, Beat], RunningLeg]


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


class ScriptLegs:
    """See the module. ``start`` begins one leg; it stands in for the engine in tests."""

    def __init__(
        self,
        folder: RankSide,
        rank: int,
        trainers_per_node: int = 1,
        *,
        start: StartLeg = leg_of,
        ending: Ending | None = None,
        clocks: HostClocks | None = None,
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._trainers_per_node = trainers_per_node
        self._start = start
        self._ending = ending or Ending()
        self._clocks = clocks
        self._beats = BeatWriter(folder.beats, rank)
        self._switch: EngineSwitch | None = None
        self._leg: RunningLeg | None = None
        self._number = 0
        self._num_steps = 0
        self._offsets_ns: list[tuple[int, int]] = []
        """When this rank's clock was compared with rank 0's, on this clock, and by how much it was ahead."""

    @classmethod
    def join(cls, communicators: Communicators, trainers_per_node: int) -> ScriptLegs:
        """Say that this rank is here, and tell the driver of the error that ends it. Every rank calls it.

        Raises ``ConfigError`` where ``FLEETBENCH_TUNING`` names no tuning directory.
        """
        folder = RankSide.of_environment()
        place, rank = Place.here(), communicators.rank
        report_errors(folder, rank)
        clocks = HostClocks(communicators, place.kernel)
        legs = cls(folder, rank, trainers_per_node, clocks=clocks)
        legs._beats.beat(-1, 0)
        folder.join(RankPlace(rank=rank, trainers=communicators.trainers, trainers_per_node=trainers_per_node, place=place))
        atexit.register(legs.exits)
        return legs

    def begin(self, engine: Engine, optimizer: torch.optim.Optimizer, use: Callable[[Engine], None]) -> None:
        """The script is ready to train: begin the first leg. ``use`` hears of every engine that takes over."""
        self.attach(EngineSwitch(engine, optimizer, use, self._trainers_per_node))

    def attach(self, switch: EngineSwitch) -> None:
        """Follow the optimizer's steps from now on, and begin the first leg."""
        self._switch = switch
        follow_steps(switch.optimizer, self.step_done)
        self._next()

    def report(self, loss: torch.Tensor | float) -> bool:
        """The script tells a loss; whether a leg heard it."""
        if self._leg is None:
            return False
        self._leg.report(loss)
        return True

    def step_done(self) -> None:
        """An ``optimizer.step()`` of the script is over. Raises ``LegsDone`` after the last leg."""
        if self._ending.begun:
            self._ending.end()
        self._num_steps += 1
        if self._leg is not None and self._leg.step_done():
            leg, self._leg = self._leg, None
            self._finish(leg, complete=True)
            self._number += 1
            self._next()

    def exits(self) -> None:
        """The process ends: what an unfinished leg has seen is kept, unless an error ended it."""
        if self._leg is not None and not hasattr(sys, "last_value"):
            leg, self._leg = self._leg, None
            self._finish(leg, complete=False)

    def _next(self) -> None:
        assert self._switch is not None
        leg = self._folder.wait_for(self._number)
        if leg is None:
            self._switch.open(self._switch.own_strategy, keep_times=False)  # what the script does on its way out finds it as ever
            self._ending.end()
        number = self._number

        def beat(_step: int) -> None:  # of the leg, or of a checkpoint that was loaded; an error names the script's own
            self._beats.beat(number, self._num_steps + 1)

        self._beats.beat(number, self._num_steps)
        self._offsets_ns.clear()
        self._compare_clocks()
        self._leg = self._start(leg, self._switch, beat)

    def _finish(self, leg: RunningLeg, *, complete: bool) -> None:
        part: dict[str, Any] = leg.part(complete=complete)
        if complete:  # and all ranks are here: the clocks have drifted since the leg began
            self._compare_clocks()
        self._folder.finish(self._number, self._rank, part | {"clock_offsets_ns": self._offsets_ns})

    def _compare_clocks(self) -> None:
        self._offsets_ns.append((time.monotonic_ns(), 0 if self._clocks is None else self._clocks.offset_ns()))


def follow_steps(optimizer: torch.optim.Optimizer, on_step: Callable[[], None]) -> None:
    """Call ``on_step`` after every ``optimizer.step()``, its hooks included; learning-rate schedules wrap the result as they wrap any."""
    step = optimizer.step

    @functools.wraps(step)
    def followed(_optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        result = step(*arguments, **named)
        on_step()
        return result

    optimizer.step = types.MethodType(followed, optimizer)  # type: ignore[method-assign]  # as torch's own schedules do
