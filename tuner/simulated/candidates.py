"""Candidates: the strategies that are tried, and their ranking by short simulations.

They are those of ``fleetbench tune`` (a space, or Fleet's modes of parameter servers) and sharded strategies.
The best are simulated again with other seeds (``over_seeds``), and ``choose`` picks one of them, for a single
cluster or for each size in a sweep.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from fleetbench.config import flat
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.combination import OUTSIDE as BESIDE
from fleetbench.plan.combination import Combination
from fleetbench.plan.rounds import levels
from fleetbench.profile import name_profile, profile_of
from fleetbench.result import step_s_of
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import LAYERS
from sim.many.objective import StepTime
from sim.many.pool import Where
from sim.run import simulate
from tuner.budget import seeds_of
from tuner.learning import Learn, Progress
from tuner.notes import Note, Remark, left_out
from tuner.search import StepS, Tried, Window, search
from tuner.search import shortened as of_collectives
from tuner.served import search_modes
from tuner.served import shortened as of_servers
from tuner.simulated import sharded
from tuner.space import learns_as, search_space, way_of
from tuner.ways import Ways, price_ways

PER_SAMPLES = 10**6
"""Number of samples whose cost is given if ``tune.samples`` is not set."""
FINAL_STEPS = 50
"""Number of counted steps in a simulation of one of the best strategies."""
SEEDS, SERVED_SEEDS = 8, 3
"""Number of seeds with which the best strategies are simulated again, without and with servers. Servers are
simulated event by event, which takes a hundred times as long."""
FINALISTS, SERVED_FINALISTS = 6, 3
TIE = 0.002
"""Relative difference of step times up to which ten simulated steps do not distinguish strategies."""

Times = dict[DistributedStrategy, float]
"""Seconds by strategy, per step or to the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Strategies that were tried, and notes about those that were not."""

    step_s: Times
    """Seconds per step by strategy, the fastest first, and of equal ones the simplest. The experiment's own
    strategy is included."""
    num_trials: int
    notes: tuple[Note, ...]
    ways: Ways = field(default_factory=Ways)
    """Steps to the target by way of training. If known, strategies are ordered by their time to the target, and
    ways that miss it are left out."""

    def with_ways(self, count: int) -> list[DistributedStrategy]:
        """Return all strategies; if ways are priced, the best of each of the first ``count`` ways comes first."""
        leaders = {way_of(strategy.replace(lr_scale=1.0)): strategy for strategy in reversed(self.step_s)}
        best = [strategy for strategy in self.step_s if strategy in leaders.values()] if self.ways.updates else []
        return list(dict.fromkeys([*best[:count], *self.step_s]))


def ranked(
    experiment: Experiment,
    *,
    out: Path,
    progress: Progress | None = None,
    learn: Learn | None = None,
    learning: Progress | None = None,
    on: Where = "local",
) -> Ranking:
    """Simulate and rank all distinct candidates, or as many as ``tune.trials`` allows, chosen by Optuna.

    ``learn`` is described in ``tuner.ways``; ``learning`` is its progress callback. ``on``: see ``tuner.search``.
    Raises ``ConfigError`` as ``simulate`` does.
    """
    tell = progress or (lambda *_: None)
    measure, own = step_time(shortened(experiment)), experiment.strategy
    if own.mode == "ps":
        found = search_modes(experiment, measure, tell)
    else:
        found = search(experiment, search_space(experiment), None, out=out, step_s=measure, progress=tell, on=on)
    first = {tried.key: tried for tried in reversed(found.tried)}
    seed = seeds_of(experiment).stop  # none of an answer's seeds, which test what this one chooses
    ways = Ways() if experiment.run.launcher == "command" else price_ways(experiment, found, measure, learn, out, learning, seed=seed)
    tried: tuple[Tried, ...] = (*first.values(), *ways.others)
    shards, told = sharded.candidates(experiment)
    shards += [one for one in sharded.recomputed(experiment) if sharded.is_timed(experiment.replace(strategy=one))]
    if ways.in_vain:  # nothing prices another way, or rounding
        tried = tuple(one for one in tried if learns_as(one.strategy) == learns_as(own))
        shards = [one for one in shards if learns_as(one) == learns_as(own)]
        what, raised = "no other way of training, and no other wire,", "raise workload.steps or the target, or tune.search_seconds"
        ways = dataclasses.replace(ways, notes=(*ways.notes[:-1], left_out(what, "is recommended", raised)))
    step_s = {one.strategy: one.simulated_s for one in tried}
    prices = {one.strategy: price for one in tried if (price := ways.seconds(one)) is not None}
    notes = [*found.notes, *told]
    for strategy in filter(ways.arrives, shards):
        step_s[strategy] = measure(strategy)
        prices[strategy] = ways.weight(strategy) * step_s[strategy]
    num_trials = len(found.different) + len(ways.others) + len(shards)
    fitting = {own, *sharded.fitting(experiment, prices)}  # the own one is needed for comparison
    if large := len(prices) - len(fitting):
        some = f"{large} of {num_trials} strategies"
        notes.append(left_out(some, "are left out", f"a {experiment.cluster.gpu} has too little memory for them"))
    by_price = ordered({one: price for one, price in prices.items() if one in fitting})
    if own.mode == "ps" and ways.updates:
        declared = "steps to the target are those of the declared cluster, which orders pushes and pulls, under every assumption"
        notes.append(Remark(text=declared))
    elif own.mode == "ps":
        notes.append(Remark(text="what staleness, or K steps between two exchanges, costs in loss is not simulated"))
    return Ranking(step_s={one: step_s[one] for one in by_price}, num_trials=num_trials, notes=tuple(notes), ways=ways)


def shortened(experiment: Experiment, least: int | None = None) -> Window:
    """Return the experiment with few counted steps: at least ``least`` (default: those of a trial)."""
    return (of_servers if experiment.strategy.mode == "ps" else of_collectives)(experiment, least)


def ordered(step_s: Times) -> Times:
    """Return the times, the fastest first, and of equal ones the strategy with the fewest changes."""
    return dict(sorted(step_s.items(), key=lambda item: (item[1], len(flat(item[0].changes())))))


def step_time(experiment: Window) -> StepS:
    """Return a function that times a strategy: seconds per step of the whole training, with shared draws."""
    return _step_times([experiment])[0]


def _step_times(seeded: Sequence[Window]) -> list[StepS]:
    """Return ``step_time`` of windows that differ only in their seeds, simulated together without servers."""
    first, seeds = seeded[0], [one.run.seed for one in seeded]
    if first.strategy.mode == "ps":
        return [partial(_served_step_s, one) for one in seeded]
    whole = dataclasses.replace(first.workload, steps=first.of_steps)
    step_s, of_whole = (StepTime(one, seeds=seeds) for one in (first, first.replace(workload=whole)))
    return [partial(mean_step_s, partial(step_s.of_run, run), partial(of_whole.of_run, run), one) for run, one in enumerate(seeded)]


def _served_step_s(window: Window, strategy: DistributedStrategy) -> float:
    return step_s_of(simulate(window.replace(strategy=strategy), timeline=False))


def mean_step_s(step_s: StepS, whole: StepS, window: Window, strategy: DistributedStrategy) -> float:
    """Return the mean seconds per step over the lengths of a training's rounds (``fleetbench.plan.rounds``).

    ``step_s`` times each length in the window. If rounds follow a declared loss, ``whole`` times the whole
    training instead.
    """
    if strategy.follows_loss and window.workload.loss_curve is not None:
        return whole(strategy)
    found = levels(strategy, window.of_steps, window.workload.steps_per_epoch)
    return math.fsum(share * _timed_in(step_s, window, one) for one, share in found)


def _timed_in(step_s: StepS, window: Window, strategy: DistributedStrategy) -> float:
    """Return the seconds per step in the window, or in a longer one if the window holds no whole round."""
    what = Combination.of(strategy)
    if what.whole_rounds(window.workload.steps) is None and what.is_local:
        workload = dataclasses.replace(window.workload, steps=BESIDE + what.steps_per_round)
        return StepTime(window.replace(workload=workload))(strategy)
    return step_s(strategy)


def seeded(experiment: Experiment, *, trial: bool = False) -> list[Window]:
    """Return the experiment with each seed of an answer, or with one if nothing is random.

    The ranking has used none of these seeds. ``trial``: whether with as few steps as in a trial.
    """
    number, steps = (SERVED_SEEDS, None) if experiment.strategy.mode == "ps" else (SEEDS, None if trial else FINAL_STEPS)
    length, first = shortened(experiment, steps), experiment.run.seed + 1
    seeds = range(first, first + (number if experiment.cluster.stragglers else 1))
    return [length.replace(run=dataclasses.replace(length.run, seed=seed)) for seed in seeds]


def over_seeds(experiment: Experiment) -> list[StepS]:
    """Return ``step_time`` for each of ``seeded``, so that equal clusters have equal times."""
    return _step_times(seeded(experiment))


def finalists(own: DistributedStrategy, ranking: Iterable[DistributedStrategy]) -> list[DistributedStrategy]:
    """Return the experiment's own strategy and the best of a ranking, without duplicates."""
    return list(dict.fromkeys([own, *islice(ranking, SERVED_FINALISTS if own.mode == "ps" else FINALISTS)]))


def choose(experiment: Experiment, step_s: Times) -> DistributedStrategy:
    """Return the strategy with the fewest changes among those that fit and are within ``TIE`` of the fastest.

    Return the experiment's own strategy if it fits and the other gains no more than ``tune.min_gain``.
    """
    own, times = experiment.strategy, {one: step_s[one] for one in sharded.fitting(experiment, step_s)}
    least = min(times.values())
    tied = [strategy for strategy in times if times[strategy] <= least * (1 + TIE)]
    chosen = min(tied, key=lambda strategy: len(flat(strategy.changes())))
    return chosen if own not in times or times[own] / times[chosen] > 1 + experiment.tune.min_gain else own


OUTSIDE = "outside of this answer: tensor, pipeline, context and expert parallelism"


def with_compute(experiment: Experiment, out: Path) -> Experiment:
    """Return the experiment with known layer times: declared, from its profile, or estimated.

    Estimates are for ``cluster.gpu``, and stored below ``out``. Raises ``ConfigError`` if layer times remain
    unknown, because nothing is measured here.
    """
    workload, gpu = experiment.workload, experiment.cluster.gpu
    if workload.model == LAYERS or workload.profile is not None:
        return experiment
    if gpu is not None:
        from real.estimate.step import estimated

        experiment = estimated(experiment, gpu, out)
        return _with_recomputed(experiment, lambda strategy: estimated(experiment.replace(strategy=strategy), gpu, out))
    hint = "estimate them: fleetbench estimate EXPERIMENT.toml --gpu H100; name a cluster.gpu; or a workload.profile that was measured"
    raise ConfigError("the model's layer times are not known, and --simulate-only measures nothing", "workload.profile", hint=hint)


def _with_recomputed(experiment: Experiment, estimated: Callable[[DistributedStrategy], Experiment]) -> Experiment:
    """Add a layer table for recomputation to the profile, if no strategy fits without recomputation.

    The new profile is made only if its file does not exist.
    """
    again, first, path = sharded.recomputed(experiment), profile_of(experiment), Path(str(experiment.workload.profile))
    if not again or first is None:
        return experiment
    both = path.with_name(f"{path.stem}-recompute.toml")
    if both.exists():
        return experiment.replace(workload=dataclasses.replace(experiment.workload, profile=str(both)))
    second = profile_of(estimated(again[0]))
    assert second is not None
    return name_profile(experiment, dataclasses.replace(first, tables=(*first.tables, *second.tables)), both)


def says(experiment: Experiment) -> str:
    """Describe the source of an experiment's known layer times, and the delays that are added to them."""
    profile = profile_of(experiment)
    return ("declared compute" if profile is None else profile.compute) + experiment.cluster.said_of_stragglers


def caveats(experiment: Experiment) -> list[Note]:
    """Return the notes that every answer has, and those of an estimated profile."""
    profile = profile_of(experiment)
    return [Remark(text=text) for text in (OUTSIDE, *(profile.notes if profile is not None and profile.estimated is not None else ()))]
