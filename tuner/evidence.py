"""Evidence: what a tuning has measured, as plain data, in the order in which it ran; and what it asks for next.

An outcome is kept under one digest of what was run: the leg, what it is compared with, and which repeat it is. A tuning that asks for
the same again, because it was interrupted or goes on from another one, has its answer here.
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
from tuner.recommendation import Recommendation
from tuner.sequential import gone
from tuner.space import learns_as

ROUNDS = 2
"""Rounds in which strategies are ranked, each with a window of injected stragglers of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Asks for a leg of an arm."""

    arm: str
    leg: Leg
    among: str = ""
    """Digest of what it is compared with."""
    side: str = ""
    """Whose leg of a pair it is, ``default`` or ``finalist``: their legs may be equal."""
    tries: int = 1
    """How often, at most, where the machine is busy; the quietest counts."""

    @property
    def ran(self) -> str:
        """Digest of what is run."""
        return json_digest([_leg(self.leg), self.among, self.side])[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Config):
    """Pairs of a finalist and the default, which may end in USE."""

    among: str
    """Digest of what is compared, and by which settings it is judged."""
    error: float
    """Chance of a USE without the gain, over all looks at the pairs."""
    limit: int
    """The largest number of pairs."""
    min_gain: float
    ended: tuple[int, ...] = ()
    """After how many pairs budgets ended, with a last look."""
    closed: bool = False
    """No look follows, and ``error`` is what the looks have spent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Asks for two legs that are compared: one launch is to carry both."""

    runs: tuple[Run, ...]
    comparison: Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Asks for nothing more."""

    recommendation: Recommendation
    comparisons: tuple[Comparison, ...]
    """Those of the evidence, with the last look of a budget that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached(Config):
    """What a run to the target came to."""

    updates: float | None = None
    """Steps of a trainer to the target; none of a run that was over before it arrived."""
    noise: float | None = None
    """Standard deviation of their logarithm; see ``TargetCheck``."""
    final_loss: float | None = None
    metric: float | None = None
    """``tune.metric`` at the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Config):
    """What a leg gave: a stored run, or a failure."""

    ran: str
    """Digest of what was run."""
    timed: str = ""
    """Digest of the leg alone, whichever its window."""
    among: str = ""
    side: str = ""
    window: int = 0
    took_s: float = 0.0
    startup_s: float = 0.0
    """Seconds that another launch takes, as was known after the leg."""
    run: str | None = None
    """Name of the run's folder."""
    failure: tuple[str | None, ...] = ()
    """Arguments of the ``LegFailed`` that it was."""
    lost: bool = False
    """The launch broke, and the machine may do better another time."""
    steps: int = 0
    """Trained, without the warm-up."""
    step_s: float = 0.0
    """Mean seconds of a step, from its start to the next one's."""
    host_s: float = 0.0
    """Seconds of the leg, without the start of a launch; 0 where that is not known."""
    void: bool = False
    """Its times count in no pair: other programs computed on this machine, or its testbed was not what was declared."""
    peak_bytes: int | None = None
    """The most memory that a rank took, where that was looked at."""
    reached: Reached | None = None
    """Of a run to the target."""

    @classmethod
    def of(cls, request: Run, took_s: float, startup_s: float) -> Outcome:
        """Of a request, before it is said what it gave."""
        leg, among, side = request.leg, request.among, request.side
        named = cls(ran=request.ran, timed=timed_by(leg), among=among, side=side, window=leg.window)
        return replace(named, took_s=took_s, startup_s=startup_s)

    def with_run(self, result: RunResult, reached: Reached | None) -> Outcome:
        """With a stored run; one to the target has no times."""
        summary, steps = result.summary, result.steps
        assert result.path is not None
        known = replace(self, run=result.path.name, steps=int(steps["step"].max()), peak_bytes=max(result.peak_bytes, default=None))
        if reached is not None:
            return replace(known, reached=reached)
        void = summary.busy is not None or (summary.testbed is not None and not summary.testbed["counts"])
        return replace(known, step_s=step_s_of(result), host_s=result.host_s, void=void)

    def with_failure(self, failure: LegFailed) -> Outcome:
        """With why there is no run."""
        said = tuple(None if one is None else str(one) for one in failure.args)
        return replace(self, failure=said, lost=isinstance(failure, LegLost))

    @property
    def ranks(self) -> bool:
        """It is of a round in which strategies are ranked."""
        return self.reached is None and self.window < ROUNDS

    def raise_failure(self) -> None:
        """Raise the failure that it was, if it was one."""
        if self.failure:
            raise (LegLost if self.lost else LegFailed)(*self.failure)  # type: ignore[arg-type]  # as they were raised


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(Config):
    """All that has been measured, and what measuring has spent."""

    before_s: float = 0.0
    """Seconds of all trainers together that were gone before the first leg."""
    held_s: float = 0.0
    """Seconds of all trainers together that are gone so far."""
    startup_s: float = 0.0
    """Seconds that a launch takes, as was known before the first leg."""
    outcomes: tuple[Outcome, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    """With an earlier tuning's."""
    earlier: tuple[Outcome, ...] = ()
    """Of tunings from which this one goes on, which cost it nothing."""

    def spent_s(self, trainers: int) -> float:
        """Seconds of all trainers together, of which a budget knows."""
        return self.before_s + trainers * sum(outcome.took_s for outcome in self.outcomes)

    def taken_up(self, trainers: int) -> Evidence:
        """What a tuning that was interrupted goes on with: what ended it, a launch that broke or a default's leg in a pair, is tried again.

        What the interruption cost is spent after the last leg that is kept, so that what was decided before is decided again.
        """
        ended_it = any(one.lost or (one.failure and one.side == "default") for one in self.outcomes[-1:])
        outcomes = self.outcomes[:-1] if ended_it else self.outcomes
        kept = replace(self, outcomes=outcomes)
        lost_s = max(0.0, self.held_s - kept.spent_s(trainers))
        if not outcomes:
            return replace(kept, before_s=self.before_s + lost_s)
        *others, last = outcomes
        return replace(kept, outcomes=(*others, replace(last, took_s=last.took_s + lost_s / trainers)))

    def inherited(self, limit: int, min_gain: float) -> Evidence:
        """What a tuning that goes on from this one, and judges pairs so, has: what failed, or was void in a ranking, is measured again."""
        sound = (one for one in (*self.earlier, *self.outcomes) if not one.failure and not (one.void and one.ranks))
        return Evidence(earlier=tuple(sound), comparisons=tuple(self._left(one, limit, min_gain) for one in self.comparisons))

    def _left(self, one: Comparison, limit: int, min_gain: float) -> Comparison:
        """A comparison as it is gone on with: closed where its legs failed, or pairs are judged otherwise now."""
        goes_on = (one.limit, one.min_gain) == (limit, min_gain) and not self.failed(one.among)
        return one if goes_on or one.closed else replace(one, closed=True, error=self.spent_of(one))

    def spent_of(self, one: Comparison) -> float:
        """The error that a comparison's looks have spent."""
        return one.error if one.closed else one.error * gone(self.pairs_of(one.among), one.limit, one.ended)

    def with_outcome(self, outcome: Outcome) -> Evidence:
        """With one more; half of a pair that was broken off is replaced, and what it took stays spent."""
        spent_s = sum(one.took_s for one in self.outcomes if one.ran == outcome.ran)
        others = tuple(one for one in self.outcomes if one.ran != outcome.ran)
        return replace(self, outcomes=(*others, replace(outcome, took_s=outcome.took_s + spent_s)))

    def with_comparison(self, comparison: Comparison) -> Evidence:
        """With one that is new; as it is where that is known."""
        known = any(one.among == comparison.among and not one.closed for one in self.comparisons)
        return self if known else replace(self, comparisons=(*self.comparisons, comparison))

    def pairs_of(self, among: str) -> int:
        """How many pairs of a comparison count."""
        legs = [one for one in (*self.earlier, *self.outcomes) if one.among == among and not one.failure and not one.void]
        windows = ({one.window for one in legs if one.side == side} for side in ("default", "finalist"))
        return len(set.intersection(*windows))

    def failed(self, among: str) -> bool:
        """Whether a leg of a comparison has failed."""
        return any(outcome.among == among and outcome.failure for outcome in self.outcomes)


def ranking_of(legs: Sequence[Leg]) -> str:
    """Digest of legs that are ranked together."""
    return json_digest(["ranked", *map(timed_by, legs)])[:16]


def compared_as(experiment: Experiment, *legs: Leg) -> str:
    """Digest of a finalist, of the legs of its pairs, and of the settings by which they are judged."""
    return json_digest(["paired", *map(timed_by, legs), experiment.tune.pairs, experiment.tune.min_gain])[:16]


def reaching_as(experiment: Experiment) -> str:
    """Digest of what a run to the target is to reach, and where that is looked at."""
    workload = experiment.workload
    return json_digest(["target", workload.target_loss, workload.eval_every, workload.steps, experiment.tune.metric])[:16]


def timed_by(leg: Leg) -> str:
    """Digest of a leg, whichever its window."""
    return _leg(replace(leg, window=0))[:16]


@functools.lru_cache(maxsize=4096)
def _leg(leg: Leg) -> str:
    """Digest of what it depends on: of a run to the target, how it trains, and not how long that takes."""
    strategy = encode(leg.strategy) if not leg.ends_at_target else repr(learns_as(leg.strategy))
    return json_digest([encode(replace(leg, strategy=DistributedStrategy())), strategy])
