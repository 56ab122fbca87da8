"""Leg steps: how one rank runs a leg, of a user's script or of an experiment's own workload.

A leg is a generator. It yields the engine that runs the next step, hears after that step whether what is trained has come to its end
instead, and returns this rank's part of the results, as plain data. Legs change after the step, outside of the optimizer's hooks: those
may not be changed while they run.
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
"""What executes a leg's strategy: by collectives, with a sharded model or with servers."""
LegSteps = Generator[LegEngine, bool | None, dict[str, Any]]
"""A leg under way, see the module."""


class Trained(ABC):
    """What the legs of a rank train: a user's script (``EngineSwitch``), or an experiment's own workload (``real.training``)."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, communicators: Communicators, own_strategy: DistributedStrategy, trainers_per_node: int) -> None:
        """``own_strategy``: what it asks for by itself."""
        self.communicators, self.own_strategy, self.trainers_per_node = communicators, own_strategy, trainers_per_node
        self.batch_size: int | None = None
        """Of a trainer's step, once a leg has begun, where it is known."""
        self.notes: tuple[str, ...] = ()
        """What a driver is to know of it beside its strategy."""
        self.has_arrived = False
        """The leg under way is over before all of its steps, on every rank after the same one."""

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return self.communicators.device

    @abstractmethod
    def begin(self, leg: Leg, beat: Beat) -> LegEngine:
        """Change to the leg's strategy. The next step is the leg's first; ``beat`` hears of every step as it begins."""

    @abstractmethod
    def results(self, leg: Leg) -> dict[str, Any]:
        """What it adds to the part of a timed leg, which is over."""

    @abstractmethod
    def measuring(self, leg: Leg) -> ProfileLeg:
        """What measures layer times from the next step on."""

    @abstractmethod
    def use(self, engine: Engine) -> None:
        """This engine runs the model from now on."""

    @abstractmethod
    def count_saved(self, saved: SavedForBackward) -> None:
        """Count what the next step's forward saves for its backward."""


def begin_leg(leg: Leg, trained: Trained, beat: Beat) -> LegSteps:
    """What the driver has ordered."""
    return (profiled_leg if leg.profile else timed_leg)(leg, trained, beat)


def timed_leg(leg: Leg, trained: Trained, beat: Beat) -> LegSteps:
    """Steps under one strategy, each as the stopwatch saw it; of a leg that ends early, only how many.

    A checkpoint that was loaded counts steps from elsewhere: they are counted from the leg's begin here.
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
    shift = records[0]["step"] - first_step if records else 0  # none where times are not kept
    part["evaluated"] = [step - shift for step in part["evaluated"] if step in {record["step"] for record in records}]
    for entry in (*records, *part["spans"]):
        entry["step"] -= shift
    return part


def profiled_leg(leg: Leg, trained: Trained, beat: Beat) -> LegSteps:
    """Layer times under one strategy's compute, of which nothing is exchanged; see ``real.layer_times``."""
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
            trained.use(engine)  # which the leg itself closes, before the next change
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
    """What of a leg is NaN or infinite, and in which of its steps, from 1: the first loss, or a parameter at its end."""
    for number, timed in enumerate(stopwatch.steps, start=1):
        loss = timed.record.loss
        if loss is not None and not math.isfinite(loss):
            return {"what": f"the loss was {loss}", "step": number}
    if all(bool(torch.isfinite(shard_of(parameter)).all()) for parameter in model.parameters()):
        return None
    return {"what": "a parameter was NaN or infinite", "step": num_steps}


@contextmanager
def keeping_gradients(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside, ``.grad`` are what they were."""
    held = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient
