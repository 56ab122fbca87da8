"""Search: simulated trials of strategies, the default first, Fleet's advice second.

Every different strategy of the space is simulated if that takes one core at most ``tune.search_seconds``;
otherwise, and with ``tune.storage``, Optuna's TPE proposes ``tune.trials`` of them. All trials share their
straggler draws, so that they differ only by strategy. The first ``PROBED`` run in this process; the others
may run at once (``sim.many.pool``).
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.combination import OUTSIDE
from fleetbench.strategy import DistributedStrategy
from sim.many.pool import Where, run_all
from tuner.notes import Note, left_out
from tuner.space import Equivalence, Space, learns_as, parameters_of, way_of
from tuner.study import open_study, run_trial, trials

MOST_PLANS = 20_000
"""Largest number of points of a space that is enumerated."""
_MOST_PRUNED = 4
"""Number of pruned proposals, as a multiple of ``tune.trials``, after which Optuna's search ends."""
PROBED = 20
"""Number of simulated strategies from which the time for all strategies is estimated."""
_WORTH_OTHERS_S = 1.0
"""Seconds of one core that are left of a search, above which it continues in other processes."""
WARMUP_STEPS = 2
STEADY_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(Experiment):
    """An experiment that is shortened to a few steps of a training run."""

    of_steps: int
    """Number of steps in the whole training run."""


Candidate = tuple[str | None, str, DistributedStrategy]
"""Arm (None for most), key and strategy of a candidate to simulate; see ``Tried``."""
StepS = Callable[[DistributedStrategy], float]
"""Function that returns the simulated seconds per step under a strategy, for the steps of ``shortened``."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A simulated strategy."""

    strategy: DistributedStrategy
    simulated_s: float
    """Simulated seconds per step."""
    key: str = ""
    """Key of the strategy; strategies with equal keys are equal to the simulator."""
    arm: str | None = None
    """Name ``default`` or ``advice``; None for other candidates."""
    took_s: float = field(default=0.0, compare=False)
    """Seconds that simulating it took."""


@dataclass(frozen=True, slots=True)
class Search:
    """Strategies in the order of their simulation: the default, then the advice, if any, then all others."""

    tried: tuple[Tried, ...]
    notes: tuple[Note, ...] = ()
    """Notes about what is not searched or could not be simulated, with reasons."""

    @property
    def default(self) -> Tried:
        """The experiment's own strategy."""
        return self.tried[0]

    @property
    def advice(self) -> Tried | None:
        """Fleet's advice; None if there was none to try."""
        return next((tried for tried in self.tried if tried.arm == "advice"), None)

    @property
    def different(self) -> tuple[Tried, ...]:
        """Each different strategy once."""
        return tuple({tried.key: tried for tried in reversed(self.tried)}.values())

    @property
    def ranked(self) -> tuple[Tried, ...]:
        """Distinct strategies other than the default and the advice, fastest first.

        Of candidates that learn alike and have equal simulated times, only the first is listed.
        """
        arms = {tried.key for tried in self.tried if tried.arm is not None}
        first: dict[object, Tried] = {}
        for tried in sorted(self.tried, key=lambda tried: tried.simulated_s):
            if tried.key not in arms:
                first.setdefault((*learns_as(tried.strategy), tried.simulated_s), tried)
        return tuple(first.values())

    def best(self, count: int, others: Sequence[Tried] = (), seconds: Callable[[Tried], float | None] | None = None) -> tuple[Tried, ...]:
        """Return the ``count`` best of ``ranked`` and ``others`` by ``seconds`` (default: seconds per step).

        Strategies for which ``seconds`` returns None are excluded. The best strategy of every family (way of training
        and wire, at any learning rate) is chosen before the second best of any family. If ``count`` exceeds 1, the
        best one with the default's own family and learning rate is always included, because if local steps miss the
        target, all strategies with as many of them miss it.
        """
        priced = [(one.simulated_s if seconds is None else seconds(one), one) for one in (*self.ranked, *others)]
        ranked = [one for price, one in sorted(((p, one) for p, one in priced if p is not None), key=lambda item: item[0])]
        safe = next((one for one in ranked if _family(one) == _family(self.default)), None) if count > 1 else None
        leaders = {_family(one, lr_scale=1.0): one for one in reversed(ranked)}
        first = [one for one in ranked if one in leaders.values() and one is not safe]
        chosen = [*first[: count - 1], safe] if safe is not None else first[:count]
        chosen += [one for one in ranked if one not in chosen][: count - len(chosen)]
        return tuple(one for one in ranked if one in chosen)


def _family(tried: Tried, lr_scale: float | None = None) -> tuple[object, ...]:
    """Return a strategy's family: way of training, and whether its wire is FP32; optionally at another ``lr_scale``."""
    strategy = tried.strategy if lr_scale is None else tried.strategy.replace(lr_scale=lr_scale)
    return *way_of(strategy), parameters_of(strategy)["wire"] == "fp32"


def search(
    experiment: Experiment,
    space: Space,
    advised: DistributedStrategy | None,
    *,
    out: Path,
    step_s: StepS,
    progress: Callable[[int, int], None] | None = None,
    on: Where = "local",
) -> Search:
    """Simulate the default, the advice, if any, and the space, as the module describes.

    ``on``: where all strategies of the space are simulated; see ``sim.many.pool``. Whether they are, and their
    times, do not depend on it, and Optuna's proposals are simulated in this process. Raises the errors of
    ``step_s``.
    """
    tell, same = progress or (lambda *_: None), Equivalence(experiment)
    arms = {"default": experiment.strategy} | ({} if advised is None else {"advice": advised})
    is_shared = experiment.tune.storage is not None
    found = None if is_shared else _enumerated(experiment, space, arms, same, step_s, tell, on)
    why = "they exclude each other's values, or are one of the others to the simulator"
    if found is None:
        found = _proposed(experiment, space, arms, same, step_s, tell, out)
        because = "tune.storage is set" if is_shared else "all are too many, or take more than tune.search_seconds"
        why = f"Optuna proposed the others (tune.trials), because {because}"
    tell(len(found.tried), len(found.tried))
    number = space.size - sum(one.arm is None or space.point_of(one.strategy) is not None for one in found.different)
    left = left_out(f"{number:,} of {space.size:,} combinations", "are not simulated", why)
    return dataclasses.replace(found, notes=(*space.notes, *dict.fromkeys(found.notes), left))


def search_listed(
    strategies: Sequence[DistributedStrategy],
    name_of: Callable[[DistributedStrategy], str],
    step_s: StepS,
    progress: Callable[[int, int], None] | None,
) -> Search:
    """Simulate ``strategies``, of which the first is the experiment's own.

    Raises the error of ``step_s`` for the first.
    """
    listed: list[Candidate] = [("default" if not place else None, f"{place}", strategy) for place, strategy in enumerate(strategies)]
    found = _simulated(listed, step_s, progress or (lambda *_: None), name_of)
    assert found is not None, "without a limit"
    return found


def _simulated(
    listed: Sequence[Candidate],
    step_s: StepS,
    tell: Callable[[int, int], None],
    name_of: Callable[[DistributedStrategy], str],
    is_too_long: Callable[[int], bool] = lambda _: False,
    on: Where = "local",
) -> Search | None:
    """Simulate candidates; notes name those that cannot be simulated.

    None as soon as ``is_too_long`` of the number of simulated candidates is true. Raises the error of
    ``step_s`` for an arm.
    """
    found, num_tried, began = dict[str, _Outcome](), 0, time.monotonic()
    for done, (arm, key, strategy) in enumerate(listed):
        tell(done, len(listed))
        if key not in found:
            found[key] = _outcome(step_s, strategy)
        outcome = found[key][0]
        if isinstance(outcome, ConfigError) and arm is not None:
            raise outcome
        num_tried += not isinstance(outcome, ConfigError)
        if is_too_long(num_tried):
            return None
        if num_tried == PROBED:
            break
    others = {key: strategy for _, key, strategy in listed if key not in found}
    is_worth = (time.monotonic() - began) / max(1, len(found)) * len(others) > _WORTH_OTHERS_S

    def told(done: int, total: int) -> None:
        tell(len(listed) - total + done, len(listed))

    where: tuple[Where, int | None] = (on, None) if is_worth else ("local", 1)
    rest = run_all(partial(_outcome, step_s), [*others.values()], on=where[0], processes=where[1], progress=told)
    found |= zip(others, rest, strict=True)
    tell(len(listed), len(listed))
    tried, notes = list[Tried](), list[Note]()
    for arm, key, strategy in listed:
        outcome, took_s = found[key]
        if isinstance(outcome, ConfigError):
            notes.append(left_out(name_of(strategy), "cannot be simulated", outcome))
        else:
            tried.append(Tried(strategy, outcome, key, arm, took_s))
    return Search(tuple(tried), tuple(notes))


_Outcome = tuple[float | ConfigError, float]
"""Seconds per step, or the error of what cannot be simulated; and the seconds that it took."""


def _outcome(step_s: StepS, strategy: DistributedStrategy) -> _Outcome:
    began = time.perf_counter()
    try:
        return step_s(strategy), time.perf_counter() - began
    except ConfigError as error:
        return error, time.perf_counter() - began


def timed(strategy: DistributedStrategy, step_s: StepS) -> Tried:
    """Simulate a strategy. Raises the error of ``step_s``."""
    began = time.perf_counter()
    return Tried(strategy, step_s(strategy), took_s=time.perf_counter() - began)


def shortened(experiment: Experiment, least: int | None = None) -> Window:
    """Return the experiment shortened to whole rounds with at least ``least`` counted steps.

    Default: ``tune.simulated_steps``. Without random stragglers all steps are alike, and a few are enough.
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
    """Return the experiment with at least ``least`` steps, or its own number if that is smaller, plus ``beside``.

    ``rounds``: steps per whole round. The warm-up is short.
    """
    steps = rounds * math.ceil(min(least, experiment.workload.steps) / rounds) + beside
    workload = dataclasses.replace(experiment.workload, steps=steps)
    run = dataclasses.replace(experiment.run, warmup_steps=min(WARMUP_STEPS, experiment.run.warmup_steps))
    parts = {one.name: getattr(experiment, one.name) for one in dataclasses.fields(Experiment)}
    return Window(**{**parts, "workload": workload, "run": run}, of_steps=experiment.workload.steps)


def different(space: Space, same: Equivalence, arms: Sequence[DistributedStrategy]) -> dict[str, DistributedStrategy]:
    """Return the strategies of the space that differ from each other and from ``arms``, by key.

    Of strategies with equal keys, the one with the fewest changes is kept.
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
    on: Where,
) -> Search | None:
    """Simulate all different strategies of the space.

    None if there are more than ``MOST_PLANS`` points, or if more than ``tune.trials`` strategies take too long.
    """
    tune, began = experiment.tune, time.monotonic()
    if space.size > MOST_PLANS:
        return None
    candidates: list[Candidate] = [(arm, same.key(strategy), strategy) for arm, strategy in arms.items()]
    candidates += [(None, *item) for item in different(space, same, [*arms.values()]).items()]
    planned = time.monotonic()
    limit_s = math.inf if len(candidates) <= tune.trials else tune.search_seconds

    def is_too_long(number: int) -> bool:
        return number == PROBED and planned - began + (time.monotonic() - planned) / PROBED * len(candidates) > limit_s

    return _simulated(candidates, step_s, progress, lambda _: "a strategy", is_too_long, on) if limit_s else None


def _proposed(
    experiment: Experiment,
    space: Space,
    arms: Mapping[str, DistributedStrategy],
    same: Equivalence,
    step_s: StepS,
    progress: Callable[[int, int], None],
    out: Path,
) -> Search:
    """Simulate the arms and Optuna's proposals until the study has ``tune.trials`` complete trials."""
    wanted, known, refused = experiment.tune.trials, dict[str, float](), list[ConfigError]()

    def strategy_of(trial: optuna.Trial | FrozenTrial) -> DistributedStrategy:
        arm = trial.user_attrs.get("arm")
        return space.strategy(trial.params) if arm is None else arms[arm]

    def objective(trial: optuna.Trial) -> float:
        """Simulate a trial, or reuse an equal earlier one; what cannot be simulated is pruned, except an arm."""
        arm = trial.user_attrs.get("arm")
        if arm is None or space.point_of(arms[arm]) is not None:
            for name, values in space.choices:
                trial.suggest_categorical(name, values)
        try:
            key = same.key(strategy := strategy_of(trial))
            trial.set_user_attr("key", key)
            known[key] = known[key] if key in known else step_s(strategy)
        except ConfigError as error:
            if arm is not None:
                raise
            refused.append(error)
            raise optuna.TrialPruned from None
        return known[key]

    with open_study(experiment, out) as study:
        while True:
            complete = trials(study, TrialState.COMPLETE)
            known |= {trial.user_attrs["key"]: trial.value for trial in complete if trial.value is not None}
            present = {trial.user_attrs.get("arm") for trial in complete}
            is_over = len(complete) >= wanted or len(trials(study, TrialState.PRUNED)) >= _MOST_PRUNED * wanted
            if is_over and "default" in present:
                break
            progress(len(complete), wanted)
            missing = [arm for arm in arms if arm not in present]
            if missing and not trials(study, TrialState.WAITING):  # a killed process may have left a waiting trial
                study.enqueue_trial(space.point_of(arms[missing[0]]) or {}, user_attrs={"arm": missing[0]})
            run_trial(study, experiment.run.seed, objective)
    # in a study of several processes, others may be complete before the arms
    complete.sort(key=lambda trial: [*arms, None].index(trial.user_attrs.get("arm")))
    keyed = [(trial, trial.user_attrs["key"]) for trial in complete]
    tried = tuple(Tried(strategy_of(trial), known[key], key, trial.user_attrs.get("arm")) for trial, key in keyed)
    many = f"{len(refused)} of Optuna's proposals"
    return Search(tried, tuple(left_out(many, "cannot be simulated", error) for error in refused[:1]))
