"""ScriptSteps: the legs of one rank of a user's script, each begun and ended where ``optimizer.step()`` returns.

``joined`` (``fleet.init`` has found a tuning directory) -> ``measuring`` (the first order has come, at
``fleet.distributed_optimizer``; after the last step of each leg its part is written, and the next order
is waited for) -> ``ending`` (the driver says stop: the script's own strategy is back, and ``LegsDone``
is raised). A script whose data end first leaves an incomplete part at exit.

A leg is a generator. It yields the engine that runs the next step, hears after that step whether the script has come to its end
instead, and returns this rank's part of the results. Legs change after the step, outside of the optimizer's hooks: those may not be
changed while they run.
"""

from __future__ import annotations

import atexit
import functools
import math
import sys
import time
import types
import zlib
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from fleetbench.config import encode
from real.communication.communicators import Communicators
from real.communication.device import backend_of_world
from real.compute.recompute import SavedForBackward
from real.engine.engine import Engine
from real.engine.stopwatch import Stopwatch, encode_steps
from real.job.facts import Facts
from real.job.folder import RankPlace, RankSide
from real.job.strategy_switch import EngineSwitch, keeping_gradients
from real.job.watch import Ending, report_errors
from real.layer_times import ProfileLeg
from real.leg import Leg
from real.memory import peak_bytes, reset_peak
from real.processes.beats import BeatWriter
from real.processes.place import Place

_BARRIERS = 9
Beat = Callable[[int], None]
LegSteps = Generator[Engine, bool | None, dict[str, Any]]
"""A leg under way, see the module."""


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


def begin_leg(leg: Leg, switch: EngineSwitch, beat: Beat) -> LegSteps:
    """What the driver has ordered."""
    return (profiled_leg if leg.profile else timed_leg)(leg, switch, beat)


class ScriptSteps:
    """See the module. ``begin_leg`` stands in for the engine in tests."""

    def __init__(
        self,
        folder: RankSide,
        rank: int,
        *,
        begin_leg: Callable[[Leg, EngineSwitch, Beat], LegSteps] = begin_leg,
        ending: Ending | None = None,
        clocks: HostClocks | None = None,
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._begin_leg = begin_leg
        self._ending = ending or Ending()
        self._clocks = clocks
        self._beats = BeatWriter(folder.beats, rank)
        self._beats.beat(-1, 0)
        self._legs: Generator[Engine, bool | None, None] | None = None
        self._engine: Engine | None = None
        """Of the leg under way."""
        self._num_steps = 0

    @classmethod
    def join(cls, communicators: Communicators, trainers_per_node: int) -> ScriptSteps:
        """Say that this rank is here, and tell the driver of the error that ends it. Every rank calls it.

        Raises ``ConfigError`` where ``FLEETBENCH_TUNING`` names no tuning directory.
        """
        folder = RankSide.of_environment()
        place, rank = Place.here(), communicators.rank
        report_errors(folder, rank)
        steps = cls(folder, rank, clocks=HostClocks(communicators, place.kernel))
        folder.join(RankPlace(rank=rank, trainers=communicators.trainers, trainers_per_node=trainers_per_node, place=place))
        atexit.register(steps.exits)
        return steps

    def begin(self, switch: EngineSwitch) -> None:
        """The script is ready to train: follow the optimizer's steps from now on, and begin the first leg."""
        self._legs = self._follow_orders(switch)
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
            self._engine = self._legs.send(is_over)

    def _follow_orders(self, switch: EngineSwitch) -> Generator[Engine, bool | None, None]:
        """Leg after leg. All ranks begin and end them after the same steps."""
        number = 0

        def beat(_step: int) -> None:  # of the leg, or of a checkpoint that was loaded; an error names the script's own
            self._beats.beat(number, self._num_steps + 1)

        while (leg := self._folder.wait_for(number)) is not None:
            self._beats.beat(number, self._num_steps)
            offsets_ns = [self._compared_clocks()]
            part = yield from self._begin_leg(leg, switch, beat)
            if part["complete"]:  # and all ranks are here: the clocks have drifted since the leg began
                offsets_ns.append(self._compared_clocks())
            self._folder.finish(number, self._rank, part | {"clock_offsets_ns": offsets_ns})
            if not part["complete"]:
                return
            number += 1
        switch.open(switch.own_strategy, keep_times=False)  # what the script does on its way out finds it as ever
        self._ending.end()

    def _compared_clocks(self) -> tuple[int, int]:
        """Now on this rank's clock, and by how much that is ahead of rank 0's."""
        return time.monotonic_ns(), 0 if self._clocks is None else self._clocks.offset_ns()


def follow_steps(optimizer: torch.optim.Optimizer, on_step: Callable[[], None]) -> None:
    """Call ``on_step`` after every ``optimizer.step()``, its hooks included; learning-rate schedules wrap the result as they wrap any."""
    step = optimizer.step

    @functools.wraps(step)
    def followed(_optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        result = step(*arguments, **named)
        on_step()
        return result

    optimizer.step = types.MethodType(followed, optimizer)  # type: ignore[method-assign]  # as torch's own schedules do


def timed_leg(leg: Leg, switch: EngineSwitch, beat: Beat) -> LegSteps:
    """Steps under one strategy, each as the stopwatch saw it; under the script's own, also what the script is.

    A checkpoint that was loaded counts steps from elsewhere: they are counted from the leg's begin here.
    """
    describes = leg.start == "as_is"
    first_step, total = 1 - leg.warmup_steps, leg.warmup_steps + leg.steps
    engine = switch.open(switch.own_strategy if describes else leg.strategy, first_step=first_step, record=leg.record)
    engine.on_step = beat
    engine.stopwatch.fetch_every = total + 1  # no rank waits for the device to hear a loss
    evaluated: set[int] = set()
    batch_size: int | None = None
    num_steps = 0

    def see_forward(model: nn.Module, arguments: tuple[object, ...], named: dict[str, object]) -> None:
        nonlocal batch_size
        if not model.training and num_steps:  # a forward in evaluation mode follows the step before it, whose end it delays
            evaluated.add(engine.step)
        elif model.training and describes and batch_size is None:
            leaves = pytree.tree_leaves((arguments, named))
            batch_size = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0), None)

    reset_peak(switch.device)
    handle = switch.model.register_forward_pre_hook(see_forward, with_kwargs=True)
    while num_steps < total and not (yield engine):
        num_steps += 1
        if num_steps == leg.warmup_steps:
            reset_peak(switch.device)
    handle.remove()
    is_complete = num_steps == total
    if is_complete:
        engine.flush(end=True)
    engine.stopwatch.finish()
    recording = engine.recording()
    found: dict[str, list[Any]] = encode_steps(engine.stopwatch)
    records = [step["record"] for step in found["steps"]]
    shift = records[0]["step"] - first_step if records else 0
    for entry in (*records, *found["spans"]):
        entry["step"] -= shift
    reports_loss = any(record["loss"] is not None for record in records)
    described = {"facts": encode(facts_of(switch, batch_size, reports_loss=reports_loss))} if describes else {}
    return described | {
        "steps": found["steps"],
        "spans": found["spans"],
        "complete": is_complete,
        "num_steps": num_steps,
        "plan": engine.plan.to_dict(),
        "recording": None if recording is None else recording.to_dict(),
        "evaluated": sorted(step - shift for step in evaluated),
        "peak_bytes": peak_bytes(switch.device),
        "not_finite": not_finite(engine.stopwatch, switch.model, num_steps),
    }


def facts_of(switch: EngineSwitch, batch_size: int | None, *, reports_loss: bool) -> Facts:
    """What this rank knows of the script."""
    group = switch.optimizer.param_groups[0]
    first = next(parameter for parameter in switch.model.parameters() if parameter.requires_grad)
    return Facts(
        trainers=switch.communicators.trainers,
        trainers_per_node=switch.trainers_per_node,
        backend=backend_of_world(),  # type: ignore[arg-type]  # Facts checks both
        device=switch.device.type,  # type: ignore[arg-type]
        strategy=switch.own_strategy,
        optimizer=type(switch.optimizer).__name__,
        lr=float(group["lr"]),
        momentum=float(group.get("momentum", 0.0)),
        weight_decay=float(group.get("weight_decay", 0.0)),
        dtype=str(first.dtype).removeprefix("torch."),
        batch_size=batch_size,
        reports_loss=reports_loss,
    )


def profiled_leg(leg: Leg, switch: EngineSwitch, beat: Beat) -> LegSteps:
    """Layer times under one strategy's compute, of which nothing is exchanged; see ``real.layer_times``."""
    switch.leave()
    measuring = ProfileLeg(switch.model, switch.optimizer, switch.communicators)
    steps = measuring.steps(leg, beat)
    measured: dict[str, Any] | None = None
    num_steps = 0
    while True:
        try:
            with keeping_gradients(switch.model):
                saved = next(steps)
        except StopIteration as end:
            measured = asdict(end.value)
            break
        engine = measuring.engine
        if num_steps == 0:
            engine.stopwatch.fetch_every = leg.warmup_steps + leg.steps + 1  # no rank waits for the device to hear a loss
            switch.use(engine)  # which the leg itself closes, before the next change
        if saved is not None:
            _count_saved(switch.model, saved)
        if (yield engine):
            steps.close()
            break
        num_steps += 1
        measuring.update_done()
    engine.stopwatch.finish()
    found = not_finite(engine.stopwatch, switch.model, num_steps)
    return {"complete": measured is not None, "num_steps": num_steps, "layer_times": measured, "not_finite": found}


def _count_saved(model: nn.Module, saved: SavedForBackward) -> None:
    """Count what the next forward in training saves."""
    handles: list[RemovableHandle] = []

    def enter(*_: object) -> None:
        if model.training and torch.is_grad_enabled():
            saved.__enter__()
            handles.append(model.register_forward_hook(leave))

    def leave(*_: object) -> None:
        saved.__exit__(None, None, None)
        while handles:
            handles.pop().remove()

    handles.append(model.register_forward_pre_hook(enter))


@torch.no_grad()
def not_finite(stopwatch: Stopwatch, model: nn.Module, num_steps: int) -> dict[str, Any] | None:
    """What of a leg is NaN or infinite, and in which of its steps, from 1: the first loss, or a parameter at its end."""
    for number, timed in enumerate(stopwatch.steps, start=1):
        loss = timed.record.loss
        if loss is not None and not math.isfinite(loss):
            return {"what": f"the loss was {loss}", "step": number}
    if all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters()):
        return None
    return {"what": "a parameter was NaN or infinite", "step": num_steps}
