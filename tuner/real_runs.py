"""Real runs: legs of strategies through one launch, each on disk before the next starts."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from fleetbench.experiment import Experiment
from fleetbench.plan.combination import OUTSIDE, Combination
from fleetbench.plan.servers.rules import rules_of
from fleetbench.result import RunResult, step_s_of
from fleetbench.store import save_run
from fleetbench.strategy import DistributedStrategy
from real.leg import Leg
from real.testbed.noise import TRIES
from tuner.recommendation import Pair
from tuner.sequential import LEAST_PAIRS
from tuner.to_target import FEWEST_SEEDS

DEFAULT = "default"
SECONDS_PER_HOUR = 3600.0
ROUNDS = 2
"""In which arms are ranked, each with a window of injected stragglers of its own."""
_LONGER = 1.5
"""Times the longest run to the target so far, which the next one is expected to take at most."""
_AMPLE = 1.5
"""Times what is expected, as a budget that is proposed."""
SPENT = "trainer seconds spent, of the budget's"
"""Stage of the progress in which the budget is shown."""


class Runner(Protocol):
    """The seam to the processes: ``real.job.session.Session``, or ``real.job.script_session.ScriptSession`` for a user's script."""

    @property
    def startup_s(self) -> float:
        """Seconds that the next leg may take beside its steps, because it needs another launch; as far as that is known."""
        ...

    def run(self, leg: Leg) -> RunResult:
        """Run one leg and return what happened. Raises ``LegFailed`` where its strategy does not go with a script."""
        ...

    def together(self, legs: Sequence[Leg]) -> None:
        """The next legs will be these, and are compared with each other: one launch is to carry them all, where it can."""
        ...


class BudgetSpent(Exception):  # noqa: N818  # an end of measuring, not an error of anybody
    """The next leg would exceed the budget of the real runs."""


def largest_geo_k(experiment: Experiment) -> int:
    """Of GeoSGD, with parameter servers: of those of ``tune.local_steps`` and the experiment's own, which Fleet may choose; 1 of none."""
    cluster, optimizer = experiment.cluster, experiment.workload.optimizer
    own = rules_of(experiment.strategy, cluster.trainers, cluster.servers, optimizer=optimizer, simulated=True).k_steps
    return max(1, own, *(experiment.tune.local_steps if optimizer == "sgd" else ()))


def leg_steps_of(experiment: Experiment) -> int:
    """``tune.leg_steps``, or as many as hold a round of every K that is searched: a step is priced in whole rounds."""
    own, tune = Combination.of(experiment.strategy), experiment.tune
    if experiment.strategy.mode == "ps":
        return max(tune.leg_steps, min(OUTSIDE + largest_geo_k(experiment), experiment.workload.steps))
    longest = max(tune.local_steps, default=1) if experiment.workload.target_loss is not None else 1
    if experiment.run.launcher == "command" and tune.diloco and longest > 1:  # a script's outer optimizer has twice the largest
        longest *= 2
    return max(tune.leg_steps, OUTSIDE + max(own.steps_per_round, own.steps_per_update * longest))


def budget_of(experiment: Experiment) -> tuple[float, str]:
    """Seconds that all trainers together may take in real runs, and the setting that says so; infinite where none does."""
    tune, trainers = experiment.tune, experiment.cluster.trainers
    limits = [(math.inf, "")]
    if tune.budget_gpu_hours is not None:
        limits.append((tune.budget_gpu_hours * SECONDS_PER_HOUR, f"tune.budget_gpu_hours = {tune.budget_gpu_hours:g}"))
    if tune.budget_minutes is not None:
        limits.append((tune.budget_minutes * 60 * trainers, f"tune.budget_minutes = {tune.budget_minutes:g}"))
    return min(limits)


def budget_for(experiment: Experiment, held_s: float) -> str | None:
    """The setting of a budget with ample room for so many seconds of all trainers together; none where there is no budget."""
    _, setting = budget_of(experiment)
    if "minutes" in setting:
        return f"tune.budget_minutes = {_AMPLE * held_s / experiment.cluster.trainers / 60:.2g}"
    return f"tune.budget_gpu_hours = {_AMPLE * held_s / SECONDS_PER_HOUR:.2g}" if setting else None


def seeds_of(experiment: Experiment) -> range:
    """Of the runs to the target of each way of training, at most, the experiment's own first; a declared loss has no seed."""
    number = 1 if experiment.run.device == "emulated" else experiment.tune.target_seeds or FEWEST_SEEDS
    return range(experiment.run.seed, experiment.run.seed + number)


@dataclass(slots=True, kw_only=True)
class RealRuns:
    """Runs legs, stores them below ``folder``, and counts the trainers' time against the budget."""

    experiment: Experiment
    runner: Runner
    folder: Path
    step_s: float
    """Expected seconds of a step, until a leg has shown what it really takes."""
    clock: Callable[[], float] = time.perf_counter
    spent_s: float = 0.0
    """Seconds of all trainers together; those of a user's script begin with what its profile took."""
    trained_steps: int = 0
    """Of the longest run to the target so far, which says what the next may take."""
    on_spent: Callable[[float], None] = lambda _: None
    """Hears of ``spent_s``, before the first leg and after every one."""
    runs: dict[str, list[str]] = field(default_factory=dict)
    """Names of the stored folders by arm."""
    void: dict[str, list[str]] = field(default_factory=dict)
    """Of these, those during which the machine was not quiet, in any of their repeats."""

    @property
    def num_void(self) -> int:
        """Void runs of all arms."""
        return sum(map(len, self.void.values()))

    def __post_init__(self) -> None:
        self.on_spent(self.spent_s)

    def run(
        self,
        arm: str,
        strategy: DistributedStrategy,
        *,
        steps: int,
        start: Literal["continue", "initial"] = "continue",
        seed: int | None = None,
        evaluate: bool = False,
        window: int = 0,
    ) -> RunResult:
        """Run one leg of an arm, again where the machine was busy; of one that is evaluated updates count, and no times.

        ``seed`` and ``window``: see ``Leg``. An evaluated leg of a script has no warm-up, in which local steps have not begun: it trains as
        an ordinary launch does.

        Raises ``BudgetSpent`` before a leg that would exceed the budget, and what the runner raises.
        """
        run = self.experiment.run
        leg = Leg(
            strategy=strategy,
            steps=steps,
            warmup_steps=0 if evaluate and run.launcher == "command" else run.warmup_steps,
            start=start,
            evaluate=evaluate,
            ends_at_target=evaluate,
            window=window,
            seed=seed,
        )
        if not self._has_room(leg):
            raise BudgetSpent
        result = self._once(leg)
        for _ in range(TRIES - 1):
            if evaluate or not result.summary.busy or not self._has_room(leg):
                break
            result = min(result, self._once(leg), key=lambda run: run.summary.foreign_cores or 0.0)
        summary = result.summary
        stored = save_run(result, self.folder)
        assert stored.path is not None
        self.runs.setdefault(arm, []).append(stored.path.name)
        if not evaluate and (summary.busy is not None or (summary.testbed is not None and not summary.testbed["counts"])):
            self.void.setdefault(arm, []).append(stored.path.name)
        return stored

    def pairs(self, finalist: str, strategy: DistributedStrategy, default: DistributedStrategy, *, first: int = 0) -> Iterator[Pair]:
        """Pairs of the default's strategy and another, ``tune.pairs`` at the most, from the ``first``: A B, B A, A B, ....

        Each has a window of injected stragglers of its own, which its legs share. A pair of which a leg is void says nothing, and is
        left out. Raises what the legs raise.
        """
        arms, default_first = [(DEFAULT, default), (finalist, strategy)], first % 2 == 0
        steps = leg_steps_of(self.experiment)
        for window in range(ROUNDS + first, ROUNDS + self.experiment.tune.pairs):
            ordered, void = arms if default_first else arms[::-1], self.num_void
            self.together((arm for _, arm in ordered), steps=steps, window=window)
            step_s = {name: step_s_of(self.run(name, arm, steps=steps, window=window)) for name, arm in ordered}
            if self.num_void == void:
                yield Pair(default_s=step_s[DEFAULT], finalist_s=step_s[finalist], default_first=default_first)
                default_first = not default_first

    def affords(self, number: int, *, num_targets: int = 0) -> bool:
        """Whether the budget has room for so many legs, and runs to the target, if there is one."""
        return self.spent_s + self.expected_s(number, num_targets=num_targets) <= budget_of(self.experiment)[0]

    def refuse_small_budget(self, num_others: int) -> None:
        """Raise ``BudgetSpent`` where, by the first leg, there is no room to run so many beside the default, and an interval's pairs."""
        num_arms, is_first = 1 + num_others, sum(map(len, self.runs.values())) == 1
        if not num_others or not is_first or self.affords(wanted := 2 * (num_arms + LEAST_PAIRS) - 1, num_targets=1):
            return
        (_, setting), workload, trainers = budget_of(self.experiment), self.experiment.workload, self.experiment.cluster.trainers
        needs_s = self.spent_s + self.expected_s(wanted, num_targets=1)
        to_target = "" if workload.target_loss is None else f", a run of {workload.steps} steps to the target"
        what = f"{2 * num_arms} runs of {leg_steps_of(self.experiment)} steps to choose among {num_arms} strategies{to_target}"
        takes = f"{what} and {LEAST_PAIRS} pairs would take {needs_s / trainers / 60:.2g} minutes by the first run"
        raise BudgetSpent(
            f"{setting} has no room for a verdict: {takes}; set {budget_for(self.experiment, needs_s)}, or fewer tune.finalists"
        )

    def expected_s(self, number: int, *, num_targets: int) -> float:
        """Seconds of all trainers together that so many legs and runs to the target take, one of which may be longer than all so far."""
        workload = self.experiment.workload
        steps = number * (leg_steps_of(self.experiment) + self.experiment.run.warmup_steps)
        if workload.target_loss is not None and num_targets:
            steps += (num_targets - 1) * (self.trained_steps or workload.steps) + self._expected_steps(workload.steps)
        return self._ahead_s(steps, starts=number // 2 + num_targets)  # of a script, a pair or a run each

    def _expected_steps(self, steps: int) -> int:
        """Of a run to the target."""
        return min(steps, round(_LONGER * self.trained_steps)) if self.trained_steps else steps

    def _has_room(self, leg: Leg) -> bool:
        steps = self._expected_steps(leg.steps) if leg.ends_at_target else leg.steps
        return self.spent_s + self._ahead_s(steps + leg.warmup_steps, starts=1) <= budget_of(self.experiment)[0]

    def _ahead_s(self, steps: int, starts: int) -> float:
        return self.experiment.cluster.trainers * (steps * self.step_s + starts * self.runner.startup_s)

    def _once(self, leg: Leg) -> RunResult:
        trainers = self.experiment.cluster.trainers
        began = self.clock()
        try:
            result = self.runner.run(leg)
        finally:  # one that fails has held its trainers too; one of an interrupted tuning is there at once, and among what was spent before
            took_s = self.clock() - began
            self.spent_s += trainers * took_s
            self.on_spent(self.spent_s)
        if leg.ends_at_target:
            self.trained_steps = max(self.trained_steps, result.experiment.workload.steps)
        else:
            self.step_s = (result.host_s or took_s) / (leg.steps + leg.warmup_steps)  # without the start of a launch, which startup_s has
        return result

    def together(self, strategies: Iterable[DistributedStrategy], *, steps: int, window: int) -> None:
        """Legs of these strategies follow, which are compared with each other."""
        warmup_steps = self.experiment.run.warmup_steps
        self.runner.together([Leg(strategy=strategy, steps=steps, warmup_steps=warmup_steps, window=window) for strategy in strategies])
