"""Ledger: the evidence as a decision reads it, from the start: a leg either has an outcome, or is the next to run.

The ledger also keeps the budget. A leg's seconds count as spent when the decision reads its outcome, so repeating
a decision with the same evidence gives the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from real.leg import Leg
from real.processes.diagnosis import LegFailed, LegLost
from real.testbed.noise import TRIES
from tuner.budget import BudgetSpent, budget_for, budget_of, leg_steps_of
from tuner.evidence import ROUNDS, Comparison, Evidence, Outcome, Pair, Run, compared_as, reaching_as
from tuner.recommendation import Arm
from tuner.recommendation import Pair as Paired
from tuner.sequential import ERROR, LEAST_PAIRS

FIRST_SHARE = 0.85
"""Share of the remaining chance of a wrong USE that each new finalist gets."""
_LONGER = 1.5
"""Factor from the steps of the longest run to the target so far to the expected steps of the next run."""


class Wanted(Exception):  # noqa: N818  # a question to the caller, not an error
    """Raised if the evidence has no outcome for ``request``: a question to the caller, not an error."""

    def __init__(self, request: Run | Pair) -> None:
        super().__init__(request)
        self.request = request


@dataclass(slots=True)
class Ledger:
    """Results read from the evidence so far, and the budget spent on them."""

    experiment: Experiment
    evidence: Evidence
    step_s: float
    """Expected seconds per step, then those of the last leg that was read."""
    spent_s: float = field(init=False)
    """Trainer seconds spent so far."""
    startup_s: float = field(init=False)
    """Expected seconds per launch."""
    trained_steps: int = 0
    """Number of steps in the longest run to the target so far, which bounds the next one."""
    runs: dict[str, list[str]] = field(default_factory=dict)
    """Names of stored runs, by arm."""
    void: set[str] = field(default_factory=set)
    """Names of the stored runs that are void."""
    _outcomes: tuple[Outcome, ...] = field(init=False)
    """Outcomes in order of time, an earlier tuning's first."""
    _places: dict[str, int] = field(init=False)
    _read: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.spent_s, self.startup_s = self.evidence.before_s, self.evidence.startup_s
        self._outcomes = (*self.evidence.earlier, *self.evidence.outcomes)
        self._places = {outcome.ran: place for place, outcome in enumerate(self._outcomes)}

    def leg(self, strategy: DistributedStrategy, window: int = 0) -> Leg:
        """Return a leg that measures the strategy's seconds per step."""
        return Leg(strategy=strategy, steps=leg_steps_of(self.experiment), warmup_steps=self.experiment.run.warmup_steps, window=window)

    def run(self, request: Run) -> Outcome:
        """Return the outcome of the requested leg.

        Raises ``Wanted`` or ``BudgetSpent`` if it is not known, and ``LegFailed`` if the leg failed.
        """
        outcome = self._answer(request)
        assert outcome.run is not None
        self.runs.setdefault(request.arm, []).append(outcome.run)
        if outcome.void:
            self.void.add(outcome.run)
        return outcome

    def seeds_before(self, arm: Arm, seeds: Sequence[int]) -> int:
        """Return the number of seeds with which an earlier tuning ran the arm's way of training to the target."""
        places = (self._places.get(self.to_target(arm, seed).ran) for seed in seeds)
        return sum(place is not None and place < len(self.evidence.earlier) for place in places)

    def pairs(self, finalist: Arm, default: Arm, comparison: Comparison) -> Iterator[Paired]:
        """Yield at most ``tune.pairs`` pairs of the default and a finalist, in the order A B, B A, A B, ....

        Each pair has its own window of injected stragglers, which its legs share. A pair with a void leg is
        left out. Raises as ``run``, and ``LegLost`` if the default's leg failed.
        """
        default_first, count, limit = True, 0, self.experiment.tune.pairs
        void_before = {one.window for one in self.evidence.earlier if one.among == comparison.among and one.void}
        for window in range(ROUNDS, ROUNDS + limit + len(void_before)):
            if count == limit:
                return
            legs = [(default, "default"), (finalist, "finalist")][:: 1 if default_first else -1]
            runs = [Run(arm=arm.name, leg=self.leg(arm.timed, window), among=comparison.among, side=side) for arm, side in legs]
            runs.sort(key=lambda one: self._places.get(one.ran, len(self._places)))
            if not self._is_whole(runs):
                self._want(runs, comparison)
            is_first, found = runs[0].side == "default", {one.side: self._in_pair(one) for one in runs}
            if not any(outcome.void for outcome in found.values()):
                yield Paired(default_s=found["default"].step_s, finalist_s=found["finalist"].step_s, default_first=is_first)
                default_first, count = not is_first, count + 1

    def _in_pair(self, request: Run) -> Outcome:
        """Return the outcome of a leg of a pair, as ``run``.

        Raises ``LegLost`` if the default's leg failed: it has run before, so the machine is to blame.
        """
        try:
            return self.run(request)
        except LegFailed as failure:
            if request.side == "default":
                raise LegLost(*failure.args) from failure
            raise

    def comparison(self, finalist: Arm, default: Arm) -> Comparison:
        """Return the open comparison of a finalist, or a new one with a share of the remaining error."""
        tune = self.experiment.tune
        among = compared_as(self.experiment, *map(self.leg, (finalist.strategy, finalist.timed, default.timed)))
        known = (one for one in self.evidence.comparisons if one.among == among and not one.closed)
        new = Comparison(among=among, error=FIRST_SHARE * self.error_left(), limit=tune.pairs, min_gain=tune.min_gain)
        return next(known, new)

    def error_left(self) -> float:
        """Return the allowed chance of a wrong USE that is left for further finalists."""
        evidence = self.evidence
        taken = (evidence.spent_of(one) if evidence.failed(one.among) else one.error for one in evidence.comparisons)
        return max(0.0, ERROR - sum(taken))

    def affords(self, number: int, *, num_targets: int = 0) -> bool:
        """Whether the budget has room for ``number`` legs and, with a target, ``num_targets`` runs to it."""
        return self.spent_s + self.expected_s(number, num_targets=num_targets) <= budget_of(self.experiment)[0]

    def refuse_small_budget(self, num_others: int) -> None:
        """Raise ``BudgetSpent`` if the first leg shows that the budget is too small for the other arms and pairs."""
        num_arms, is_first = 1 + num_others, sum(map(len, self.runs.values())) == 1
        if (
            not num_others
            or not is_first
            or self.evidence.earlier
            or self.affords(wanted := 2 * (num_arms + LEAST_PAIRS) - 1, num_targets=1)
        ):
            return
        (_, setting), trainers = budget_of(self.experiment), self.experiment.cluster.trainers
        needs_s = self.spent_s + self.expected_s(wanted, num_targets=1)
        what = (
            f"to rank {num_arms} strategies and run {LEAST_PAIRS} pairs would take {needs_s / trainers / 60:.2g} minutes by the first run"
        )
        raise BudgetSpent(
            f"{setting} has no room for a verdict: {what}; set {budget_for(self.experiment, needs_s)}, or fewer tune.finalists"
        )

    def expected_s(self, number: int, *, num_targets: int) -> float:
        """Return the expected trainer seconds of ``number`` legs and ``num_targets`` runs to the target.

        One run may take longer than all so far.
        """
        workload = self.experiment.workload
        steps = number * (leg_steps_of(self.experiment) + self.experiment.run.warmup_steps)
        if workload.target_loss is not None and num_targets:
            steps += (num_targets - 1) * (self.trained_steps or workload.steps) + self._expected_steps(workload.steps)
        return self._ahead_s(steps, starts=number // 2 + num_targets)  # for a script, each pair or run needs a launch

    def to_target(self, arm: Arm, seed: int) -> Run:
        """Return the request for an arm's run to the target with a seed.

        A script's run has no warm-up, because local steps begin only after it; so the run trains like an
        ordinary launch.
        """
        run = self.experiment.run
        leg = Leg(
            strategy=arm.strategy,
            steps=self.experiment.workload.steps,
            warmup_steps=0 if run.launcher == "command" else run.warmup_steps,
            start="initial",
            seed=seed,
            evaluate=True,
            ends_at_target=True,
        )
        return Run(arm=arm.name, leg=leg, among=reaching_as(self.experiment))

    def _answer(self, request: Run) -> Outcome:
        if (place := self._places.get(request.ran)) is None:
            self._want([request])
        outcome, leg = self._outcomes[place], request.leg
        if request.ran not in self._read and place >= len(self.evidence.earlier):
            self.spent_s += self.experiment.cluster.trainers * outcome.took_s
            self.startup_s = outcome.startup_s
        self._read.add(request.ran)
        outcome.raise_failure()
        if leg.ends_at_target:
            self.trained_steps = max(self.trained_steps, outcome.steps)
        else:  # without the start of a launch, which is in startup_s
            self.step_s = (outcome.host_s or outcome.took_s) / (leg.steps + leg.warmup_steps)
        return outcome

    def _is_whole(self, runs: list[Run]) -> bool:
        """Whether the outcomes of both legs of a pair are known, or the outcome of one that failed."""
        places = [self._places.get(one.ran) for one in runs]
        return None not in places or any(place is not None and self._outcomes[place].failure for place in places)

    def _want(self, runs: Sequence[Run], comparison: Comparison | None = None) -> NoReturn:
        """Raise ``Wanted`` for the missing runs, or ``BudgetSpent`` if the budget has no room for them.

        Outcomes that were not read count as spent, too. In case the machine is busy, a request has up to
        ``TRIES`` tries within the budget, except runs to the target, which have no times.
        """
        unread = (outcome.took_s for outcome in self.evidence.outcomes if outcome.ran not in self._read)
        self.spent_s += self.experiment.cluster.trainers * sum(unread)
        most = 1 if runs[0].leg.ends_at_target else TRIES
        tries = sum(self._has_room(runs[0].leg, number * len(runs)) for number in range(1, most + 1))
        if not tries:
            raise BudgetSpent
        first, *others = (replace(run, tries=tries) for run in runs)
        raise Wanted(first if comparison is None else Pair(runs=(first, *others), comparison=comparison))

    def _has_room(self, leg: Leg, times: int) -> bool:
        steps = self._expected_steps(leg.steps) if leg.ends_at_target else leg.steps
        return self.spent_s + self._ahead_s(times * (steps + leg.warmup_steps), starts=1) <= budget_of(self.experiment)[0]

    def _expected_steps(self, steps: int) -> int:
        """Return the expected number of steps in a run to the target, at most ``steps``."""
        return min(steps, round(_LONGER * self.trained_steps)) if self.trained_steps else steps

    def _ahead_s(self, steps: int, starts: int) -> float:
        return self.experiment.cluster.trainers * (steps * self.step_s + starts * self.startup_s)
