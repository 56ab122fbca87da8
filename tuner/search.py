"""Search: simulated trials of strategies, the default first, Fleet's advice second.

Where the space holds no more different strategies than ``tune.trials``, every one of them is
simulated; otherwise Optuna's TPE proposes. All trials share their draws of stragglers, so that
their difference is that of the strategies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState

from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from tuner.recommendation import Trial
from tuner.space import Equivalence, Parameters, Space, parameters_of, without_equal_values
from tuner.study import ask, complete, open_study, trials

ENUMERATED = 4096
"""Points of a space up to which its different strategies are counted beforehand."""


StepS = Callable[[DistributedStrategy], float]
"""Simulated seconds of a step under a strategy, in as many steps as ``shortened`` says."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A trial with its strategy."""

    trial: Trial
    strategy: DistributedStrategy
    key: str
    """Strategies of equal keys are equal to the simulator."""
    arm: str | None = None
    """``default`` or ``advice``; none for a candidate of the space."""


@dataclass(frozen=True, slots=True)
class Search:
    """All complete trials: the default is the first, the advice the second."""

    tried: tuple[Tried, ...]

    @property
    def default(self) -> Tried:
        """The experiment's own strategy."""
        return next(tried for tried in self.tried if tried.arm == "default")

    @property
    def advice(self) -> Tried | None:
        """Fleet's advice; none where the only trial was the default's."""
        return next((tried for tried in self.tried if tried.arm == "advice"), None)

    def best(self, count: int) -> tuple[Tried, ...]:
        """The best different strategies besides the default and the advice, fastest first.

        The best of each number of local steps goes before the second best of any, and one that
        keeps the default's is always among them: a target that local steps miss is missed by all
        strategies that take as many.
        """
        seen = {tried.key for tried in self.tried if tried.arm is not None}
        ranked = []
        for tried in sorted(self.tried, key=_rank):
            if tried.key not in seen:
                seen.add(tried.key)
                ranked.append(tried)
        leaders = {tried.strategy.local_steps: tried for tried in reversed(ranked)}
        safe = leaders.get(self.default.strategy.local_steps) if count > 1 else None
        first = [tried for tried in ranked if leaders[tried.strategy.local_steps] is tried and tried is not safe]
        chosen = [*first[: count - 1], safe] if safe is not None else first[:count]
        chosen += [tried for tried in ranked if tried not in chosen][: count - len(chosen)]
        return tuple(sorted(chosen, key=_rank))


def _rank(tried: Tried) -> tuple[float, int]:
    return tried.trial.simulated_s, tried.trial.number


def search(
    experiment: Experiment,
    space: Space,
    advised: DistributedStrategy,
    *,
    out: Path,
    step_s: StepS,
    progress: Callable[[int, int], None] | None = None,
) -> Search:
    """Run the trials that the experiment's study still lacks; see the module. Raises what ``step_s`` raises."""
    same = Equivalence(experiment)
    arms = {"default": experiment.strategy, "advice": advised}
    with open_study(experiment, out) as study:
        searcher = _Searcher(experiment, space, arms, same, study)
        while True:
            taken = trials(study, TrialState.COMPLETE, TrialState.RUNNING, TrialState.WAITING)  # asked for once a trial: it takes a while
            number = sum(trial.state == TrialState.COMPLETE for trial in taken)
            if number >= searcher.num_trials or not searcher.prepare(taken):
                break
            if progress is not None:
                progress(number, searcher.num_trials)
            searcher.run_one(step_s, taken)
        found = searcher.result()
    if progress is not None:
        progress(len(found.tried), len(found.tried))
    return found


def shortened(experiment: Experiment) -> Experiment:
    """The experiment with the steps of one simulated trial."""
    steps = min(experiment.workload.steps, experiment.tune.simulated_steps)
    return experiment.replace(workload=dataclasses.replace(experiment.workload, steps=steps))


class _Searcher:
    """One pass over the study. What comes next follows from the trials that are there, so a pass can end anywhere."""

    def __init__(
        self, experiment: Experiment, space: Space, arms: dict[str, DistributedStrategy], same: Equivalence, study: optuna.Study
    ) -> None:
        self.experiment = experiment
        self.space = without_equal_values(space, same) if space.size <= ENUMERATED else space
        self.arms = arms
        self.same = same
        self.study = study
        self.different = self._different_points()
        """One point for each strategy that differs from all others and from the arms; none where they are too many."""

    @property
    def num_trials(self) -> int:
        """How many trials will be complete in the end."""
        limit = self.experiment.tune.trials
        return limit if self.different is None else min(limit, len(self.arms) + len(self.different))

    def prepare(self, taken: Sequence[FrozenTrial]) -> bool:
        """Enqueue the next trial where it is known beforehand; false when nothing is left to try."""
        if any(trial.state == TrialState.WAITING for trial in taken):
            return True
        # Another process may be running an arm and die of it: an arm counts once it is complete.
        present = {trial.user_attrs.get("arm") for trial in taken if trial.state == TrialState.COMPLETE}
        for arm, strategy in self.arms.items():
            if arm not in present:
                self.study.enqueue_trial(self.space.point_of(strategy) or {}, user_attrs={"arm": arm})
                return True
        if self.different is None:
            return True
        keys = {trial.user_attrs.get("key") for trial in taken}
        for key, point in self.different.items():
            if key not in keys:
                self.study.enqueue_trial(point, user_attrs={"key": key})
                return True
        return False

    def run_one(self, step_s: StepS, taken: Sequence[FrozenTrial]) -> None:
        """Ask for a trial and complete it, by simulation or from an equal one before it."""
        trial = ask(self.study, self.experiment.run.seed, sum(other.state != TrialState.WAITING for other in taken))
        try:
            arm = trial.user_attrs.get("arm")
            if arm is None or self.space.point_of(self.arms[arm]) is not None:
                for name, values in self.space.choices:
                    trial.suggest_categorical(name, values)
            strategy = self._strategy(arm, trial.params)
            key = self.same.key(strategy)
            if trial.user_attrs.get("key") != key:
                trial.set_user_attr("key", key)
            before = (other.value for other in taken if other.state == TrialState.COMPLETE and other.user_attrs["key"] == key)
            value = next(before, None)
            if value is None:
                value = step_s(strategy)
        except BaseException:
            self.study.tell(trial, state=TrialState.FAIL)
            raise
        complete(self.study, trial, value)

    def result(self) -> Search:
        """The complete trials, numbered from 0."""
        seen: set[str] = set()
        tried = []
        for number, trial in enumerate(trials(self.study, TrialState.COMPLETE)):
            arm, key = trial.user_attrs.get("arm"), trial.user_attrs["key"]
            strategy = self._strategy(arm, trial.params)
            assert trial.value is not None
            record = Trial(number=number, parameters=dict(parameters_of(strategy)), simulated_s=trial.value, repeated=key in seen)
            tried.append(Tried(record, strategy, key, arm))
            seen.add(key)
        return Search(tuple(tried))

    def _strategy(self, arm: str | None, point: Parameters) -> DistributedStrategy:
        return self.space.strategy(point) if arm is None else self.arms[arm]

    def _different_points(self) -> dict[str, Parameters] | None:
        if self.space.size > ENUMERATED:
            return None
        arms = {self.same.key(strategy) for strategy in self.arms.values()}
        base = parameters_of(self.space.base)

        def distance(point: Parameters) -> int:
            return sum(base[name] != value for name, value in point.items())

        found: dict[str, Parameters] = {}
        # Of points that are equal to the simulator, the one that changes least stands for all.
        for point in sorted(self.space.points(), key=distance):
            key = self.same.key(self.space.strategy(point))
            if key not in arms:
                found.setdefault(key, point)
        few = len(found) + len(self.arms) <= self.experiment.tune.trials
        return found if few else None
