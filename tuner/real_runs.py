"""Real runs: processes run the legs that a decision requests; each leg is stored before the next one starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.result import RunResult
from fleetbench.store import save_run
from real.leg import Leg
from real.processes.diagnosis import LegFailed
from real.testbed.noise import quietest
from tuner.evidence import Comparison, Evidence, Outcome, Pair, Run
from tuner.recommendation import Reached
from tuner.to_target import arrival_of


class Runner(Protocol):
    """Interface to the processes: ``Session`` or ``ScriptSession`` of ``real.job``."""

    @property
    def startup_s(self) -> float:
        """Seconds that the next leg may need for another launch, as far as known."""
        ...

    def run(self, leg: Leg) -> RunResult:
        """Run one leg and return the result. Raises ``LegFailed`` if a script cannot run its strategy."""
        ...

    def together(self, legs: Sequence[Leg]) -> None:
        """Announce the next legs, which are compared with each other and should share one launch."""
        ...


@dataclass(slots=True, kw_only=True)
class RealRuns:
    """Carries out requests, stores their runs below ``folder``, and adds them to the evidence."""

    experiment: Experiment
    runner: Runner
    folder: Path
    step_s: float = 0.0
    """Expected seconds per step, until a leg has measured them."""
    evidence: Evidence = field(default_factory=Evidence)
    """Evidence so far."""
    clock: Callable[[], float] = time.perf_counter
    keep: Callable[[Evidence], None] = lambda _: None
    """Callback that receives the evidence after every leg, however it ended."""

    def carry_out(self, request: Run | Pair) -> None:
        """Run one leg, or both legs of a pair.

        A failure is an outcome, too, and ends a pair. Any other error of the runner is raised.
        """
        runs = (request,) if isinstance(request, Run) else request.runs
        if isinstance(request, Pair):
            self.evidence = self.evidence.with_comparison(request.comparison)
            self.runner.together([run.leg for run in runs])
        for run in runs:
            outcome = self._run(run)
            self.evidence = self.evidence.with_outcome(outcome)
            self.keep(self.evidence)
            if outcome.failure:
                break

    def close(self, comparisons: tuple[Comparison, ...]) -> None:
        """Store the final comparisons after a verdict."""
        self.evidence = replace(self.evidence, comparisons=comparisons)
        self.keep(self.evidence)

    def _run(self, request: Run) -> Outcome:
        began = self.clock()
        try:
            result = quietest(lambda: self.runner.run(request.leg), lambda run: run.summary.foreign_cores, request.tries)
        except LegFailed as failure:
            return Outcome.of(request, self.clock() - began, self.runner.startup_s).with_failure(failure)
        outcome = Outcome.of(request, self.clock() - began, self.runner.startup_s)
        reached = self._reached(result) if request.leg.ends_at_target else None
        return outcome.with_run(save_run(result, self.folder), reached)

    def _reached(self, result: RunResult) -> Reached:
        """Return the steps, noise, final loss and metric of a run that trained towards the target.

        Raises ``ConfigError`` if it does not report ``tune.metric``.
        """
        updates, noise = arrival_of(result, self.experiment)
        wanted, reported, metric = self.experiment.tune.metric, result.summary.metrics or {}, None
        if wanted is not None and result.summary.steps_to_target is not None:
            if wanted not in reported:
                known = ", ".join(reported) or "none"
                hint = f"known here: {known}; a script calls fleet.report(loss=loss, {wanted}=value), {wanted} wherever it reports the loss"
                raise ConfigError("is nothing that a run reports", "tune.metric", repr(wanted), hint)
            metric = reported[wanted]
        return Reached(updates=updates, noise=noise, final_loss=result.summary.final_loss, metric=metric)
