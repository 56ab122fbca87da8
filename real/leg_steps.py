"""Leg steps: how one rank runs a leg, of a user's script or of an experiment's own workload.

A leg is a generator. It yields the engine that runs the next step, and resumes after that step, or with true
if the training has ended instead. It returns this rank's part of the results, as plain data. Legs change
after the step, outside of the optimizer's hooks, which may not be changed while they run.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from fleetbench.strategy import DistributedStrategy
from real.communication.communicators import Communicators
from real.compute.recompute import SavedForBackward
from real.engine.engine import Engine
from real.engine.gradients import shard_of
from real.engine.stopwatch import Stopwatch
from real.layer_times import ProfileLeg, peak_bytes, reset_peak
from real.leg import Leg

if TYPE_CHECKING:
    from real.servers.served_training import ServedTraining
    from real.sharding.engine import ShardedEngine

Beat = Callable[[int], None]
LegEngine: TypeAlias = "Engine | ShardedEngine | ServedTraining"
"""Engine of a leg's strategy: with collectives, with a sharded model, or with servers."""
LegSteps = Generator[LegEngine, bool | None, dict[str, Any]]
"""A running leg; see the module."""


class Trained(ABC):
    """The training of a rank's legs: a user's script (``EngineSwitch``), or an experiment's own workload.

    ``real.training`` has the latter.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, communicators: Communicators, own_strategy: DistributedStrategy, trainers_per_node: int) -> None:
        """``own_strategy`` is the strategy that the script or experiment itself asks for."""
        self.communicators, self.own_strategy, self.trainers_per_node = communicators, own_strategy, trainers_per_node
        self.batch_size: int | None = None
        """Number of samples in a trainer's batch; ``None`` if it is not known yet."""
        self.notes: tuple[str, ...] = ()
        """Notes for the driver, in addition to the strategy."""
        self.has_arrived = False
        """Whether the current leg has reached its target and ends early, after the same step on every rank."""

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.communicators.device

    @abstractmethod
    def begin(self, leg: Leg, beat: Beat) -> LegEngine:
        """Change to the leg's strategy; the next step is the leg's first.

        ``beat`` is called at every step's start.
        """

    @abstractmethod
    def results(self, leg: Leg) -> dict[str, Any]:
        """Return additional entries for this rank's part of a timed leg that is over."""

    @abstractmethod
    def measuring(self, leg: Leg) -> ProfileLeg:
        """Return the leg that measures layer times from the next step on."""

    @abstractmethod
    def use(self, engine: Engine) -> None:
        """Let this engine run the model from now on."""

    @abstractmethod
    def count_saved(self, saved: SavedForBackward) -> None:
        """Count the bytes that the next step's forward saves for its backward."""


def begin_leg(leg: Leg, trained: Trained, beat: Beat) -> LegSteps:
    """Return the generator of the leg that the driver has ordered."""
    return (profiled_leg if leg.profile else timed_leg)(leg, trained, beat)


def timed_leg(leg: Leg, trained: Trained, beat: Beat) -> LegSteps:
    """Run steps under one strategy, timed by the stopwatch.

    If the training ends early, the part has no times, plan or results. Steps are counted from the leg's start
    here, because a loaded checkpoint changes their numbers.
    """
    first_step, total = 1 - leg.warmup_steps, leg.warmup_steps + leg.steps
    engine = trained.begin(leg, beat)
    num_steps = 0
    reset_peak(trained.device)
    while num_steps < total and not trained.has_arrived:
        if (yield engine):
            engine.stopwatch.finish()
            return {"complete": False, "num_steps": num_steps, "not_finite": not_finite(engine.stopwatch, trained.model, num_steps)}
        num_steps += 1
        if num_steps == leg.warmup_steps:
            reset_peak(trained.device)
    engine.flush(end=True)
    engine.stopwatch.finish()
    part: dict[str, Any] = {
        "steps": [asdict(step) for step in engine.stopwatch.steps],
        "spans": [asdict(span) for span in engine.stopwatch.spans],
        "complete": True,
        "num_steps": num_steps,
        "plan": engine.plan.to_dict(),
        "recordings": [recording.to_dict() for recording in engine.recordings()],
        "peak_bytes": peak_bytes(trained.device),
        "not_finite": not_finite(engine.stopwatch, trained.model, num_steps),
        "evaluated": [],
        **trained.results(leg),
    }
    records = [step["record"] for step in part["steps"]]
    shift = records[0]["step"] - first_step if records else 0  # no records if times are not kept
    part["evaluated"] = [step - shift for step in part["evaluated"] if step in {record["step"] for record in records}]
    for entry in (*records, *part["spans"]):
        entry["step"] -= shift
    return part


def profiled_leg(leg: Leg, trained: Trained, beat: Beat) -> LegSteps:
    """Measure layer times under one strategy's compute, without exchange; see ``real.layer_times``."""
    measuring = trained.measuring(leg)
    steps = measuring.steps(leg, beat)
    measured: dict[str, Any] | None = None
    num_steps = 0
    while True:
        try:
            with keeping_gradients(trained.model):
                saved = next(steps)
        except StopIteration as end:
            measured = asdict(end.value)
            break
        engine = measuring.engine
        if num_steps == 0:
            trained.use(engine)  # the leg itself closes it, before the next change
        if saved is not None:
            trained.count_saved(saved)
        if (yield engine):
            steps.close()
            break
        num_steps += 1
        measuring.update_done()
    engine.stopwatch.finish()
    found = not_finite(engine.stopwatch, trained.model, num_steps)
    return {"complete": measured is not None, "num_steps": num_steps, "layer_times": measured, "not_finite": found}


@torch.no_grad()
def not_finite(stopwatch: Stopwatch, model: nn.Module, num_steps: int) -> dict[str, Any] | None:
    """Return the first NaN or infinite loss of a leg, or parameter at its end, and its step from 1; else ``None``."""
    for number, timed in enumerate(stopwatch.steps, start=1):
        loss = timed.record.loss
        if loss is not None and not math.isfinite(loss):
            return {"what": f"the loss was {loss}", "step": number}
    if all(bool(torch.isfinite(shard_of(parameter)).all()) for parameter in model.parameters()):
        return None
    return {"what": "a parameter was NaN or infinite", "step": num_steps}


@contextmanager
def keeping_gradients(model: nn.Module) -> Iterator[None]:
    """Restore the ``.grad`` of all parameters at the end of the context."""
    held = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient
