"""Legs: real runs of strategies through one launch, each on disk before the next starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from fleetbench.experiment import Experiment
from fleetbench.result import RunResult
from fleetbench.store import save_run
from fleetbench.strategy import DistributedStrategy
from real.leg import Leg

SECONDS_PER_HOUR = 3600.0


class Runner(Protocol):
    """The seam to the processes; ``real.session.Session`` is the one in use."""

    def run(self, leg: Leg) -> RunResult:
        """Run one leg and return what happened."""
        ...


class BudgetSpent(Exception):  # noqa: N818  # an end of measuring, not an error of anybody
    """The next leg would exceed ``tune.budget_gpu_hours``."""


@dataclass(slots=True, kw_only=True)
class Legs:
    """Runs legs, stores them below ``folder``, and counts the trainers' time against the budget."""

    experiment: Experiment
    runner: Runner
    folder: Path
    step_s: float
    """Expected seconds of a step, until a leg has shown what it really takes."""
    clock: Callable[[], float] = time.perf_counter
    spent_s: float = 0.0
    """Seconds of all trainers together."""
    runs: dict[str, list[str]] = field(default_factory=dict)
    """Names of the stored folders by arm."""
    num_void: int = 0
    """Legs during which a testbed's machine was not quiet, in any of their repeats."""

    def run(
        self,
        arm: str,
        strategy: DistributedStrategy,
        *,
        steps: int,
        start: Literal["continue", "initial"] = "continue",
        evaluate: bool = False,
    ) -> RunResult:
        """Run one leg of an arm. Raises ``BudgetSpent`` before a leg that would exceed the budget."""
        leg = Leg(strategy=strategy, steps=steps, warmup_steps=self.experiment.run.warmup_steps, start=start, evaluate=evaluate)
        trainers, steps_run = self.experiment.cluster.trainers, leg.steps + leg.warmup_steps
        budget = self.experiment.tune.budget_gpu_hours
        if budget is not None and self.spent_s + trainers * steps_run * self.step_s > budget * SECONDS_PER_HOUR:
            raise BudgetSpent
        began = self.clock()
        result = self.runner.run(leg)
        took_s = self.clock() - began
        self.spent_s += trainers * took_s
        self.step_s = took_s / steps_run
        self.num_void += result.summary.testbed is not None and not result.summary.testbed["counts"]
        stored = save_run(result, self.folder)
        assert stored.path is not None
        self.runs.setdefault(arm, []).append(stored.path.name)
        return stored
