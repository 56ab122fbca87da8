"""Evidence: the measurements of a tuning, as plain data in order of time, and its requests for more.

An outcome is stored under a digest of its leg, of what the leg is compared with, and of its side in a pair. A tuning
that makes the same request again, because it was interrupted or continues another one, finds the outcome here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleetbench.config import Config, encode
from fleetbench.digests import json_digest
from fleetbench.experiment import Experiment
from fleetbench.result import RunResult, step_s_of
from fleetbench.strategy import DistributedStrategy
from real.leg import Leg
from real.processes.diagnosis import LegFailed, LegLost
from tuner.recommendation import Reached, Recommendation
from tuner.sequential import gone
from tuner.space import learns_as

ROUNDS = 2
"""Number of rounds in which strategies are ranked, each with its own window of injected stragglers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Request for a leg of an arm."""

    arm: str
    """Name of the arm."""
    leg: Leg
    """Strategy, steps and window of the leg."""
    among: str = ""
    """Digest of the ranking, the pairs or the target that the leg is for."""
    side: str = ""
    """Side of the leg in a pair, ``default`` or ``finalist``, because both legs may be equal; else empty."""
    tries: int = 1
    """Largest number of tries while the machine is busy; the quietest try counts."""

    @property
    def ran(self) -> str:
        """Digest of the leg, ``among`` and ``side``, under which the outcome is stored."""
        return json_digest([_leg(self.leg), self.among, self.side])[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Config):
    """Comparison of a finalist with the default by pairs of legs, which may end in USE."""

    among: str
    """Digest of the compared legs and of the settings by which they are judged."""
    error: float
    """Allowed chance of a wrong USE, over all looks at the pairs."""
    limit: int
    """Largest number of pairs."""
    min_gain: float
    """Gain that USE has to exceed, as a share."""
    ended: tuple[int, ...] = ()
    """Numbers of pairs at which a budget ended and a last look was taken."""
    closed: bool = False
    """Whether no more looks follow; ``error`` is then the part that past looks have spent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Request for two legs that are compared, which should share one launch."""

    runs: tuple[Run, ...]
    comparison: Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """End of a decision: no more runs are needed or affordable."""

    recommendation: Recommendation
    comparisons: tuple[Comparison, ...]
    """Comparisons of the evidence, including the last look if the budget has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Config):
    """Result of a leg: a stored run, or a failure."""

    ran: str
    """Digest of the request; see ``Run.ran``."""
    among: str = ""
    """Digest of the ranking, the pairs or the target that the leg is for."""
    side: str = ""
    """Side of the leg in a pair, ``default`` or ``finalist``; else empty."""
    window: int = 0
    """Index of the leg's window of injected stragglers."""
    took_s: float = 0.0
    """Seconds that the leg took."""
    startup_s: float = 0.0
    """Expected seconds for another launch, as known after the leg."""
    run: str | None = None
    """Name of the run's folder; None if the leg failed."""
    failure: tuple[str | None, ...] = ()
    """Arguments of the ``LegFailed``; empty if there was none."""
    lost: bool = False
    """Whether the launch broke, so that another try may succeed."""
    steps: int = 0
    """Number of trained steps, without the warm-up."""
    step_s: float = 0.0
    """Mean seconds per step, from start to start."""
    host_s: float = 0.0
    """Seconds of the leg without the start of a launch; 0 if unknown."""
    void: bool = False
    """Whether the leg's times do not count in any pair, because other programs used the machine or the testbed was
    not as declared."""
    peak_bytes: int | None = None
    """Peak memory of a rank in bytes, if measured."""
    reached: Reached | None = None
    """Result of a run to the target; None for other legs."""

    @classmethod
    def of(cls, request: Run, took_s: float, startup_s: float) -> Outcome:
        """Return the outcome of a request, before its result is known."""
        return cls(
            ran=request.ran,
            among=request.among,
            side=request.side,
            window=request.leg.window,
            took_s=took_s,
            startup_s=startup_s,
        )

    def with_run(self, result: RunResult, reached: Reached | None) -> Outcome:
        """Return the outcome with the results of a stored run; a run to the target has no step times."""
        summary, steps = result.summary, result.steps
        assert result.path is not None
        known = replace(self, run=result.path.name, steps=int(steps["step"].max()), peak_bytes=max(result.peak_bytes, default=None))
        if reached is not None:
            return replace(known, reached=reached)
        void = summary.busy is not None or (summary.testbed is not None and not summary.testbed["counts"])
        return replace(known, step_s=step_s_of(result), host_s=result.host_s, void=void)

    def with_failure(self, failure: LegFailed) -> Outcome:
        """Return the outcome with a failure in place of a run."""
        said = tuple(None if one is None else str(one) for one in failure.args)
        return replace(self, failure=said, lost=isinstance(failure, LegLost))

    @property
    def ranks(self) -> bool:
        """Whether the leg ran to rank strategies, not in a pair or to the target."""
        return self.reached is None and self.window < ROUNDS

    def raise_failure(self) -> None:
        """Raise the failure, if there was one."""
        if self.failure:
            raise (LegLost if self.lost else LegFailed)(*self.failure)  # type: ignore[arg-type]  # as they were raised


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(Config):
    """All measurements, and the time that they took."""

    before_s: float = 0.0
    """Trainer seconds that had passed before the first leg."""
    startup_s: float = 0.0
    """Seconds that a launch takes, as known before the first leg."""
    outcomes: tuple[Outcome, ...] = ()
    """Outcomes in order of time."""
    comparisons: tuple[Comparison, ...] = ()
    """Comparisons, including those of an earlier tuning."""
    earlier: tuple[Outcome, ...] = ()
    """Outcomes of the earlier tunings that this one continues; their time does not count against its budget."""

    def spent_s(self, trainers: int) -> float:
        """Return the trainer seconds that count towards the budget."""
        return self.before_s + trainers * sum(outcome.took_s for outcome in self.outcomes)

    def taken_up(self) -> Evidence:
        """Return the evidence with which an interrupted tuning continues.

        A leg that ended it (its launch broke, or it was the default's and failed in a pair) is tried again.
        """
        ended_it = any(one.lost or (one.failure and one.side == "default") for one in self.outcomes[-1:])
        return replace(self, outcomes=self.outcomes[:-1]) if ended_it else self

    def inherited(self, limit: int, min_gain: float) -> Evidence:
        """Return the first evidence of a tuning that continues this one and judges pairs by these settings.

        Failed legs, and legs that were void in a ranking, are measured again.
        """
        sound = (one for one in (*self.earlier, *self.outcomes) if not one.failure and not (one.void and one.ranks))
        return Evidence(earlier=tuple(sound), comparisons=tuple(self._left(one, limit, min_gain) for one in self.comparisons))

    def _left(self, one: Comparison, limit: int, min_gain: float) -> Comparison:
        """Return the comparison for a continuing tuning: closed if its legs failed or its settings changed."""
        goes_on = (one.limit, one.min_gain) == (limit, min_gain) and not self.failed(one.among)
        return one if goes_on or one.closed else replace(one, closed=True, error=self.spent_of(one))

    def spent_of(self, one: Comparison) -> float:
        """Return the chance of a wrong USE that the looks of a comparison have spent."""
        return one.error if one.closed else one.error * gone(self.pairs_of(one.among), one.limit, one.ended)

    def with_outcome(self, outcome: Outcome) -> Evidence:
        """Return the evidence with one more outcome.

        It replaces an outcome of the same request (from a broken pair), but the time of both stays spent.
        """
        spent_s = sum(one.took_s for one in self.outcomes if one.ran == outcome.ran)
        others = tuple(one for one in self.outcomes if one.ran != outcome.ran)
        return replace(self, outcomes=(*others, replace(outcome, took_s=outcome.took_s + spent_s)))

    def with_comparison(self, comparison: Comparison) -> Evidence:
        """Return the evidence with a new comparison, or unchanged if the comparison is known."""
        known = any(one.among == comparison.among and not one.closed for one in self.comparisons)
        return self if known else replace(self, comparisons=(*self.comparisons, comparison))

    def pairs_of(self, among: str) -> int:
        """Return the number of pairs of a comparison in which both legs are valid."""
        legs = [one for one in (*self.earlier, *self.outcomes) if one.among == among and not one.failure and not one.void]
        windows = ({one.window for one in legs if one.side == side} for side in ("default", "finalist"))
        return len(set.intersection(*windows))

    def failed(self, among: str) -> bool:
        """Whether a leg of a comparison has failed."""
        return any(outcome.among == among and outcome.failure for outcome in self.outcomes)


def ranking_of(legs: Sequence[Leg]) -> str:
    """Return the digest of legs that are ranked together."""
    return json_digest(["ranked", *map(timed_by, legs)])[:16]


def compared_as(experiment: Experiment, *legs: Leg) -> str:
    """Return the digest of a finalist, of its pairs' legs, and of the settings by which they are judged."""
    return json_digest(["paired", *map(timed_by, legs), experiment.tune.pairs, experiment.tune.min_gain])[:16]


def reaching_as(experiment: Experiment) -> str:
    """Return the digest of the settings of runs to the target: loss, evaluation interval, steps and metric."""
    workload = experiment.workload
    return json_digest(["target", workload.target_loss, workload.eval_every, workload.steps, experiment.tune.metric])[:16]


def timed_by(leg: Leg) -> str:
    """Return the digest of a leg, independent of its window."""
    return _leg(replace(leg, window=0))[:16]


@functools.lru_cache(maxsize=4096)
def _leg(leg: Leg) -> str:
    """Return the digest of a leg; runs to the target have the same digest if their strategies train alike."""
    strategy = encode(leg.strategy) if not leg.ends_at_target else repr(learns_as(leg.strategy))
    return json_digest([encode(replace(leg, strategy=DistributedStrategy())), strategy])
