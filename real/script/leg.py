"""A leg inside a script: what is measured between two changes of strategy, while the user's own loop runs the steps.

Told of the end of every optimizer step, a leg says when it is done, and then gives its part of the
results. A script that ends in the middle of a leg leaves an incomplete part.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fleetbench.config import encode
from fleetbench.strategy import DistributedStrategy
from real.communication.device import backend_of_world
from real.compute.recompute import SavedForBackward
from real.engine.engine import Engine
from real.engine.stopwatch import Stopwatch, encode_steps
from real.job.folder import Order
from real.leg import Leg
from real.memory import peak_bytes, reset_peak
from real.profile_leg import ProfileLeg
from real.script.facts import BatchSize, facts_of
from real.script.site import Site, keeping_gradients

Beat = Callable[[int], None]


class RunningLeg(ABC):
    """A leg under way, on ``engine``. All ranks call ``step_done`` after the same step and get the same answer."""

    engine: Engine

    def __init__(self, site: Site, leg: Leg) -> None:
        self._site = site
        self._leg = leg
        self._num_steps = 0

    @abstractmethod
    def step_done(self) -> bool:
        """A step is over; whether it was the last."""

    @abstractmethod
    def part(self, *, complete: bool) -> dict[str, Any]:
        """This rank's results as plain data; with ``complete``, all ranks ask for them together."""

    def report(self, loss: torch.Tensor | float) -> None:
        """The script tells the step's loss."""
        self.engine.report(loss)
        self.engine.stopwatch.loss(loss)

    def _run_on(self, engine: Engine) -> None:
        self.engine = engine
        engine.stopwatch.fetch_every = self._leg.warmup_steps + self._leg.steps + 1  # no rank waits for the device to hear a loss


class TimedLeg(RunningLeg):
    """Steps under one strategy, each as the stopwatch saw it."""

    def __init__(self, site: Site, leg: Leg, beat: Beat, strategy: DistributedStrategy) -> None:
        super().__init__(site, leg)
        self._run_on(site.open(strategy, first_step=1 - leg.warmup_steps, record=leg.record))
        self.engine.on_step = beat
        self._evaluated: set[int] = set()
        reset_peak(site.device)
        self._handle = site.model.register_forward_pre_hook(lambda model, _: self._sees_forward(model.training))

    def step_done(self) -> bool:
        """See ``RunningLeg``."""
        self._num_steps += 1
        if self._num_steps == self._leg.warmup_steps:
            reset_peak(self._site.device)
        return self._num_steps == self._leg.warmup_steps + self._leg.steps

    def part(self, *, complete: bool) -> dict[str, Any]:
        """See ``RunningLeg``. A checkpoint that was loaded counts steps from elsewhere: they are counted from the leg's begin here."""
        self._handle.remove()
        if complete:
            self.engine.flush(end=True)
        self.engine.stopwatch.finish()
        recording = self.engine.recording()
        found: dict[str, list[Any]] = encode_steps(self.engine.stopwatch)
        steps = found["steps"]
        shift = steps[0]["record"]["step"] - (1 - self._leg.warmup_steps) if steps else 0
        for entry in (*(step["record"] for step in steps), *found["spans"]):
            entry["step"] -= shift
        return {
            "steps": steps,
            "spans": found["spans"],
            "complete": complete,
            "num_steps": self._num_steps,
            "plan": self.engine.plan.to_dict(),
            "recording": None if recording is None else recording.to_dict(),
            "evaluated": sorted(step - shift for step in self._evaluated),
            "peak_bytes": peak_bytes(self._site.device),
            "not_finite": not_finite(self.engine.stopwatch, self._site.model, self._num_steps),
        }

    def _sees_forward(self, training: bool) -> None:
        """A forward in evaluation mode follows the step before it, whose end it delays."""
        if not training and self._num_steps:
            self._evaluated.add(self.engine.step)


class RecordedLeg(TimedLeg):
    """Steps under the script's own strategy, and what the script is."""

    def __init__(self, site: Site, leg: Leg, beat: Beat) -> None:
        super().__init__(site, leg, beat, site.own_strategy)
        self._batch = BatchSize(site.model)
        self._reports_loss = False

    def report(self, loss: torch.Tensor | float) -> None:
        """See ``RunningLeg``."""
        super().report(loss)
        self._reports_loss = True

    def part(self, *, complete: bool) -> dict[str, Any]:
        """See ``RunningLeg``."""
        facts = facts_of(self._site, backend_of_world(), self._batch.value, reports_loss=self._reports_loss)
        return super().part(complete=complete) | {"facts": encode(facts)}


class ProfiledLeg(RunningLeg):
    """Layer times under one strategy's compute, of which nothing is exchanged; see ``real.profile_leg``."""

    def __init__(self, site: Site, leg: Leg, beat: Beat) -> None:
        super().__init__(site, leg)
        site.leave()
        self._measuring = ProfileLeg(site.model, site.optimizer, site.communicators)
        self._steps = self._measuring.steps(leg, beat)
        self._handles: list[RemovableHandle] = []
        self._measured: dict[str, Any] | None = None
        self._advance()
        self._run_on(self._measuring.engine)
        site.lend(self.engine)

    def step_done(self) -> bool:
        """See ``RunningLeg``."""
        self._num_steps += 1
        self._measuring.update_done()
        return self._advance()

    def part(self, *, complete: bool) -> dict[str, Any]:
        """See ``RunningLeg``."""
        if not complete:
            self._steps.close()
        self.engine.stopwatch.finish()
        found = not_finite(self.engine.stopwatch, self._site.model, self._num_steps)
        return {"complete": complete, "num_steps": self._num_steps, "layer_times": self._measured, "not_finite": found}

    def _advance(self) -> bool:
        """Go on to the next step; whether there is none."""
        try:
            with keeping_gradients(self._site.model):
                saved = next(self._steps)
        except StopIteration as end:
            self._measured = asdict(end.value)
            return True
        if saved is not None:
            self._count(saved)
        return False

    def _count(self, saved: SavedForBackward) -> None:
        """Count what the next forward in training saves."""
        model = self._site.model

        def enter(*_: object) -> None:
            if model.training and torch.is_grad_enabled():
                saved.__enter__()
                self._handles.append(model.register_forward_hook(leave))

        def leave(*_: object) -> None:
            saved.__exit__(None, None, None)
            while self._handles:
                self._handles.pop().remove()

        self._handles.append(model.register_forward_pre_hook(enter))


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


def leg_of(order: Order, site: Site, beat: Beat) -> RunningLeg:
    """Begin what the driver has ordered."""
    if order.kind == "profile":
        return ProfiledLeg(site, order.leg, beat)
    if order.kind == "record":
        return RecordedLeg(site, order.leg, beat)
    return TimedLeg(site, order.leg, beat, order.leg.strategy)
