"""Search: simulated trials of strategies, the default first, Fleet's advice second.

Every different strategy of the space is simulated if that takes at most ``tune.search_seconds``; otherwise
Optuna's TPE proposes ``tune.trials`` of them. All trials share their straggler draws, so that they differ
only by strategy.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.combination import OUTSIDE
from fleetbench.strategy import DistributedStrategy
from tuner.notes import Note, left_out
from tuner.recommendation import Trial
from tuner.space import Equivalence, Space, parameters_of, way_of, with_different_sizes
from tuner.study import open_study, run_trial, trials

MOST_PLANS = 20_000
"""Number of points up to which a space is searched for different strategies; bucket sizes that give equal
buckets count once."""
PROBED = 20
"""Number of trials from which the time of all of them is estimated."""
WARMUP_STEPS = 2
STEADY_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(Experiment):
    """An experiment that is shortened to a few steps of a training run."""

    of_steps: int
    """Number of steps in the training run."""


StepS = Callable[[DistributedStrategy], float]
"""Function that returns the simulated seconds per step under a strategy, for the steps of ``shortened``."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A trial with its strategy."""

    trial: Trial
    strategy: DistributedStrategy
    key: str
    """Key of the strategy; strategies with equal keys are equal to the simulator."""
    arm: str | None = None
    """Name ``default`` or ``advice``; none for a candidate of the space."""


@dataclass(frozen=True, slots=True)
class Search:
    """All complete trials: the default is the first, the advice the second."""

    tried: tuple[Tried, ...]
    notes: tuple[Note, ...] = ()
    """Parts that are not searched or could not be simulated, with reasons."""

    @property
    def default(self) -> Tried:
        """Trial of the experiment's own strategy."""
        return next(tried for tried in self.tried if tried.arm == "default")

    @property
    def advice(self) -> Tried | None:
        """Trial of Fleet's advice; none if only the default was tried."""
        return next((tried for tried in self.tried if tried.arm == "advice"), None)

    @property
    def ranked(self) -> tuple[Tried, ...]:
        """Different strategies besides the default and the advice, fastest first.

        Candidates of a family with equal simulations share one place, which the first of them takes.
        """
        seen: set[object] = {tried.key for tried in self.tried if tried.arm is not None}
        found = []
        for tried in sorted(self.tried, key=_rank):
            equal = _family(tried), parameters_of(tried.strategy)["wire"], tried.trial.simulated_s
            if tried.key not in seen and equal not in seen:
                seen |= {tried.key, equal}
                found.append(tried)
        return tuple(found)

    def best(self, count: int, others: Sequence[Tried] = (), seconds: Callable[[Tried], float | None] | None = None) -> tuple[Tried, ...]:
        """Return the best of ``ranked`` and ``others`` by ``seconds`` (default: seconds per step).

        ``seconds`` returns none to exclude one. The best of each family (way of training, wire), at whatever
        learning rate, comes before the second best of any. One of the default's own family is always
        included: a target that local steps miss is missed by all strategies with as many.
        """
        price = {id(tried): tried.trial.simulated_s if seconds is None else seconds(tried) for tried in (*self.ranked, *others)}

        def rank(tried: Tried) -> tuple[float, int]:
            return price[id(tried)] or 0.0, tried.trial.number

        ranked = sorted((tried for tried in (*self.ranked, *others) if price[id(tried)] is not None), key=rank)
        leaders = {_family(tried): tried for tried in reversed(ranked)}
        safe = leaders.get(_family(self.default)) if count > 1 else None
        best = {_family(tried, lr_scale=1.0): tried for tried in reversed(ranked)}
        first = [tried for tried in ranked if best[_family(tried, lr_scale=1.0)] is tried and tried is not safe]
        chosen = [*first[: count - 1], safe] if safe is not None else first[:count]
        chosen += [tried for tried in ranked if tried not in chosen][: count - len(chosen)]
        return tuple(sorted(chosen, key=rank))


def _family(tried: Tried, lr_scale: float | None = None) -> tuple[object, ...]:
    """Return what affects learning or the simulation error, optionally at another learning rate."""
    strategy = tried.strategy if lr_scale is None else tried.strategy.replace(lr_scale=lr_scale)
    return *way_of(strategy), parameters_of(strategy)["wire"] == "fp32"


def _rank(tried: Tried) -> tuple[float, int]:
    return tried.trial.simulated_s, tried.trial.number


def search(
    experiment: Experiment,
    space: Space,
    advised: DistributedStrategy | None,
    *,
    out: Path,
    step_s: StepS,
    progress: Callable[[int, int], None] | None = None,
) -> Search:
    """Simulate the default, the advice, if any, and the space; see the module. Raises as ``step_s``."""
    tell, same = progress or (lambda *_: None), Equivalence(experiment)
    arms = {"default": experiment.strategy} | ({} if advised is None else {"advice": advised})
    found = _enumerated(experiment, space, arms, same, step_s, tell) or _proposed(experiment, space, arms, same, step_s, tell, out)
    tell(len(found.tried), len(found.tried))
    return dataclasses.replace(found, notes=(*space.notes, *found.notes))


def search_listed(
    experiment: Experiment,
    candidates: Sequence[DistributedStrategy],
    name_of: Callable[[DistributedStrategy], str],
    step_s: StepS,
    progress: Callable[[int, int], None] | None,
    notes: Sequence[Note] = (),
) -> Search:
    """Simulate the experiment's own strategy, which is the first candidate, and the others.

    Raises as ``step_s`` for the own one.
    """
    tell, left, found = progress or (lambda *_: None), [*notes], list[Tried]()
    for done, strategy in enumerate(candidates):
        tell(done, len(candidates))
        try:
            trial = Trial(number=done, parameters=parameters_of(strategy), simulated_s=step_s(strategy))
        except ConfigError as error:
            if strategy == experiment.strategy:
                raise
            left.append(left_out(name_of(strategy), "is not simulated", error))
        else:
            found.append(Tried(trial, strategy, f"candidate {done}", None if found else "default"))
    tell(len(candidates), len(candidates))
    return Search(tuple(found), tuple(left))


def shortened(experiment: Experiment, least: int | None = None) -> Window:
    """Return the experiment with at least ``least`` counted steps (default: a trial's), in whole rounds.

    Without random stragglers all steps are alike, and a few are enough.
    """
    strategy, tune = experiment.strategy, experiment.tune
    least = least or tune.simulated_steps
    least = least if experiment.cluster.stragglers else min(least, STEADY_STEPS)
    tried = (*tune.local_steps, *tune.gradient_merge) if experiment.workload.target_loss is not None else ()
    twice = 2 * max(tried, default=0) if experiment.run.launcher == "command" and tune.diloco else 0
    cadences = (strategy.local_steps, *tried, *([twice] if twice > 2 else []))
    rounds = math.lcm(*cadences) if math.lcm(*cadences) <= experiment.workload.steps else max(cadences)
    return with_steps(experiment, least, rounds * strategy.gradient_merge_configs.k_steps, beside=OUTSIDE)


def with_steps(experiment: Experiment, least: int, rounds: int, *, beside: int = 0) -> Window:
    """Return the experiment with at least ``least`` steps, or its own, in whole rounds, plus ``beside``.

    Its warm-up is short.
    """
    steps = rounds * math.ceil(min(least, experiment.workload.steps) / rounds) + beside
    workload = dataclasses.replace(experiment.workload, steps=steps)
    run = dataclasses.replace(experiment.run, warmup_steps=min(WARMUP_STEPS, experiment.run.warmup_steps))
    parts = {one.name: getattr(experiment, one.name) for one in dataclasses.fields(Experiment)}
    return Window(**{**parts, "workload": workload, "run": run}, of_steps=experiment.workload.steps)


def different(space: Space, same: Equivalence, arms: Sequence[DistributedStrategy]) -> dict[str, DistributedStrategy]:
    """Return strategies that differ from each other and from ``arms``, by key.

    Of strategies with equal keys, keep the one with the fewest changes.
    """
    base = parameters_of(space.base)

    def distance(strategy: DistributedStrategy) -> tuple[int, float]:
        own = parameters_of(strategy)
        return sum(base[name] != value for name, value in own.items()), -strategy.fuse_grad_size_in_MB

    seen = {same.key(strategy) for strategy in arms}
    found: dict[str, DistributedStrategy] = {}
    for strategy in sorted((space.strategy(point) for point in space.points()), key=distance):
        key = same.key(strategy)
        if key not in seen:
            found.setdefault(key, strategy)
    return found


def _enumerated(
    experiment: Experiment,
    space: Space,
    arms: Mapping[str, DistributedStrategy],
    same: Equivalence,
    step_s: StepS,
    progress: Callable[[int, int], None],
) -> Search | None:
    """Simulate all different strategies.

    None if there are too many, or they take too long and exceed ``tune.trials``.
    """
    tune, began = experiment.tune, time.monotonic()
    fewer = with_different_sizes(space, same)
    if fewer.size > MOST_PLANS:
        return None
    candidates = different(fewer, same, [*arms.values()])
    total, planned, values = len(arms) + len(candidates), time.monotonic(), dict[str, float]()
    limit_s = math.inf if total <= tune.trials else tune.search_seconds
    if limit_s == 0:
        return None
    tried: list[Tried] = []
    notes: list[Note] = []
    in_turn = [*((arm, same.key(strategy), strategy) for arm, strategy in arms.items()), *((None, *one) for one in candidates.items())]
    for arm, key, strategy in in_turn:
        progress(len(tried), total)
        is_known = key in values
        if not is_known:
            try:
                values[key] = step_s(strategy)
            except ConfigError as error:
                if arm is not None:
                    raise
                notes.append(left_out("some strategies", "are not simulated", error))
                continue
        trial = Trial(number=len(tried), parameters=parameters_of(strategy), simulated_s=values[key], repeated=is_known)
        tried.append(Tried(trial, strategy, key, arm))
        if len(tried) == PROBED and planned - began + (time.monotonic() - planned) / PROBED * total > limit_s:
            return None
    why = "they exclude each other's values, or are one of those to the simulator"
    notes.append(_not_simulated(space, sum(one.arm is None for one in tried), why))
    return Search(tuple(tried), tuple(dict.fromkeys(notes)))


def _proposed(
    experiment: Experiment,
    space: Space,
    arms: Mapping[str, DistributedStrategy],
    same: Equivalence,
    step_s: StepS,
    progress: Callable[[int, int], None],
    out: Path,
) -> Search:
    """Simulate the arms, and Optuna's proposals up to ``tune.trials``, over all runs of the study."""
    fewer, wanted, known = with_different_sizes(space, same), experiment.tune.trials, dict[str, float]()

    def strategy_of(trial: optuna.Trial | FrozenTrial) -> DistributedStrategy:
        arm = trial.user_attrs.get("arm")
        return fewer.strategy(trial.params) if arm is None else arms[arm]

    def objective(trial: optuna.Trial) -> float:
        """Simulate a trial, or reuse an equal earlier one; values that exclude each other are pruned."""
        arm = trial.user_attrs.get("arm")
        if arm is None or fewer.point_of(arms[arm]) is not None:
            for name, values in fewer.choices:
                trial.suggest_categorical(name, values)
        try:
            strategy = strategy_of(trial)
        except ConfigError:
            raise optuna.TrialPruned from None
        key = same.key(strategy)
        trial.set_user_attr("key", key)
        if key not in known:
            known[key] = step_s(strategy)
        return known[key]

    with open_study(experiment, out) as study:
        while True:
            complete = trials(study, TrialState.COMPLETE)
            known |= {trial.user_attrs["key"]: trial.value for trial in complete if trial.value is not None}
            if len(complete) >= wanted:
                break
            progress(len(complete), wanted)
            _enqueue_arm(study, fewer, arms, complete)
            run_trial(study, experiment.run.seed, objective)
    tried: list[Tried] = []
    for number, trial in enumerate(complete):
        strategy, key = strategy_of(trial), trial.user_attrs["key"]
        repeated = any(one.key == key for one in tried)
        found = Trial(number=number, parameters=parameters_of(strategy), simulated_s=known[key], repeated=repeated)
        tried.append(Tried(found, strategy, key, trial.user_attrs.get("arm")))
    why = "Optuna proposed those (tune.trials), because all are too many, or take more than tune.search_seconds"
    return Search(tuple(tried), (_not_simulated(space, len(tried), why),))


def _not_simulated(space: Space, number: int, why: str) -> Note:
    return left_out(f"all but {number:,} of {space.size:,} combinations", "are not simulated", why)


def _enqueue_arm(study: optuna.Study, space: Space, arms: Mapping[str, DistributedStrategy], complete: Sequence[FrozenTrial]) -> None:
    """Enqueue the first incomplete arm if nothing waits: another process may have died while running it."""
    present = {trial.user_attrs.get("arm") for trial in complete}
    missing = [arm for arm in arms if arm not in present]
    if missing and not trials(study, TrialState.WAITING):
        arm = missing[0]
        study.enqueue_trial(space.point_of(arms[arm]) or {}, user_attrs={"arm": arm})
