"""Ways of training: number of steps that each needs to the target, by virtual trainers, before real runs.

Bucket sizes and communicators change the seconds per step; local steps, an outer optimizer and merged
gradients change the number of steps. A strategy promises the product; real runs decide, with other seeds.

Ways outside the search space use the fastest timing knobs that the search found for the same number of local
steps.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment, Tune
from fleetbench.quantities import counted
from fleetbench.strategy import DistributedStrategy
from fleetbench.target import HITS_IN_A_ROW
from fleetbench.workload import LAYERS
from tuner.learning import Learn, Progress, Trainings, Way, trainings
from tuner.notes import Learnt, Note, left_out
from tuner.search import Search, StepS, Tried, timed
from tuner.space import name_of, way_of
from tuner.to_target import Updates

_Change = tuple[DistributedStrategy, dict[str, Any]]
"""A strategy, and changes to its fields."""
OUTER: Mapping[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_nesterov": True}
"""DiLoCo's outer optimizer (arXiv 2311.08105, section 3)."""
REFINED: tuple[dict[str, Any], ...] = (
    {"outer_lr": 0.4},
    {"outer_lr": 1.0},
    {"outer_momentum": 0.5},
    {"overlap_steps": 1},
    {"fragments": 2, "overlap_steps": 1},
)
"""Changes that are tried, one after the other, on the best way with local steps."""
RATES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Values of ``lr_scale`` that may be tried if ``tune.lr_scale`` is empty."""
SLACK = 2.0
"""Factor on the default's seconds to the target after which the run of another way is given up: above 1, because other
seeds may differ."""
NOTICED = 0.9
"""Share of the default's steps below which another learning rate is worth a note, and is used for other
ways."""
_CORE_FLOPS_S = 1e11
"""Peak FLOP/s of one core."""
_BY_STEPS = left_out("updates to the target", "are not known", "ways of training are ranked by the seconds of a step alone")


@dataclass(frozen=True, slots=True)
class Ways:
    """Results of virtual trainers for the ways of training in the search, and for others."""

    updates: Mapping[Way, tuple[float | None, ...]] = field(default_factory=dict)
    """Number of steps to the target by seed, for each way of training (``way_of``); None if the run does not arrive.
    Empty if nothing is known."""
    others: tuple[Tried, ...] = ()
    """Strategies of ways outside of the search space."""
    notes: tuple[Note, ...] = ()
    steps: int = 0
    """Largest number of steps of a run."""
    own: Way = ()
    """The default's way of training."""
    caveat: str | None = None
    """Note for the verdict's line if no way of training reaches the target."""
    rated: DistributedStrategy | None = None
    """The default at another learning rate at which it needs fewer steps; None if none is known."""
    lr_scale: float = 1.0
    """Learning-rate factor (``lr_scale``) of the experiment's own strategy."""
    in_vain: bool = False
    """Whether virtual trainers trained in vain: no way arrives, or the default or all others could not be trained."""

    def said_beside(self, strategy: DistributedStrategy, ran: Sequence[DistributedStrategy] = ()) -> str | None:
        """Return the text that ends a verdict: the ``caveat``, and the effect of the learning rate alone, if any.

        ``ran``: strategies that ran to the target for real.
        """
        if self.rated is None or way_of(strategy) == way_of(self.rated):
            return self.caveat
        own, rated = (self.updates[way] for way in (self.own, way_of(self.rated)))
        does = f"needs {self.default_steps / self.weight(self.rated):.2f}x fewer steps" if any(own) else "reaches the target"
        by = f"by virtual trainers ({counted(len(rated), 'seed')})"
        unproved = "" if way_of(self.rated) in map(way_of, ran) else ", not run for real"
        return "; ".join(filter(None, (self.caveat, f"lr_scale = {self.rated.lr_scale:g} alone {does}, {by}{unproved}")))

    def seconds(self, tried: Tried) -> float | None:
        """Return a strategy's simulated seconds to the target, or per step if no ways are known.

        None if its way of training is not known to arrive.
        """
        return self.weight(tried.strategy) * tried.simulated_s if self.arrives(tried.strategy) else None

    def weight(self, strategy: DistributedStrategy) -> float:
        """Return the number of steps to the target: ``default_steps`` times the mean ratio to the default over seeds.

        1 if no ways are known.
        """
        if not self.updates:
            return 1.0
        ratios = self.ratios(strategy)
        return self.default_steps * (math.exp(-ratios.mean) if ratios is not None and ratios.ratios else 1.0)

    @property
    def default_steps(self) -> float:
        """Mean number of the default's steps to the target; a seed with which it does not arrive counts ``steps``."""
        return statistics.fmean(self.steps if one is None else one for one in self.updates[self.own])

    def ratios(self, strategy: DistributedStrategy) -> Updates | None:
        """Return ratios of steps to the target by seed, default over the strategy's way of training.

        None for the default's own way, or if no ways are known.
        """
        if (way := way_of(strategy)) == self.own or not self.updates:
            return None
        return Updates.of_runs(self.updates[self.own], self.updates.get(way, ()), self.steps)

    def arrives(self, strategy: DistributedStrategy) -> bool:
        """Whether the strategy's way arrives at least as often as the default's with the same seeds.

        The default's own way always counts as arriving.
        """
        ratios = self.ratios(strategy)
        return ratios is None or (any(self.updates.get(way_of(strategy), ())) and sum(ratios.known) >= 0)


def price_ways(
    experiment: Experiment,
    found: Search,
    step_s: StepS,
    learn: Learn | None,
    out: Path,
    progress: Progress | None = None,
    seed: int | None = None,
) -> Ways:
    """Train the ways of the search, and others, with virtual trainers within ``tune.search_seconds``.

    The default is trained first, then the largest K. ``updates`` is empty if ``learn`` is None, if there is no loss
    or too little time, if no way arrives, if the default or all others could not be trained, or for a user's
    script, whose ``others`` need real runs. ``seed`` replaces ``run.seed``.
    """
    workload, run, strategy = experiment.workload, experiment.run, experiment.strategy
    if workload.target_loss is not None and run.launcher == "command":
        return _of_script(experiment, found, step_s)
    if learn is None or not learns(experiment):
        return Ways()
    if not is_trainable(experiment):
        least_s = _least_s(experiment)
        takes = f"they would take about {least_s:,.0f} s of a core to the target, or more (tune.search_seconds)"
        return Ways(notes=(left_out("virtual trainers", "are not asked", takes), _BY_STEPS))
    own = way_of(strategy)
    leaders = {way_of(one.strategy): one for one in filter(None, (found.advice, found.default, *reversed(found.ranked)))}
    default = leaders.pop(own)
    others, refused = _others(experiment, default, leaders.values(), step_s)
    tried = sorted([*leaders.values(), *others], key=lambda one: (one.strategy.gradient_merge, -one.strategy.local_steps, one.simulated_s))
    with trainings(experiment, out, learn, experiment.tune.search_seconds, "one seed", progress) as trained:
        trained.seeded = experiment if seed is None else experiment.replace(run=dataclasses.replace(run, seed=seed))
        arriving = _train(default, tried, trained, experiment.tune, step_s)
    arrivals = trained.arrivals
    notes = (*_notes(trained), *refused, *trained.refused.values())
    if own not in arrivals or len(arrivals) == 1 or not any(arrivals.values()):
        in_vain = bool(arrivals) and not any(arrivals.values())
        never = f"no way that virtual trainers trained reaches loss {workload.target_loss:g} within workload.steps = {workload.steps}"
        return Ways(notes=(*notes, _BY_STEPS), caveat=never if in_vain else None, in_vain=True)
    updates = {way: (steps,) for way, steps in arrivals.items()}
    known = {one.strategy for one in (default, *tried)}
    new = (*others, *(one for one in arriving if one.strategy not in known))
    ways = Ways(updates=updates, others=new, notes=notes, steps=workload.steps, own=own, lr_scale=strategy.lr_scale)
    rates = [one.strategy for one in arriving if way_of(one.strategy.replace(lr_scale=strategy.lr_scale)) == own]
    return dataclasses.replace(ways, rated=_better_rated(ways, rates))


def _train(default: Tried, others: Sequence[Tried], trained: Trainings, tune: Tune, step_s: StepS) -> list[Tried]:
    """Train the default at several learning rates; then the others, of which the best at several rates.

    Others are trained at the default's best rate, or at the experiment's if they do not arrive, or have an
    outer optimizer, which multiplies it. A run is given up if the default would arrive much sooner. Return the
    ways at each rate at which they arrive, without the default at its own rate.
    """
    rates, own = tune.lr_scale or RATES, default.strategy
    steps = trained.steps(own) or math.inf
    if way_of(own) not in trained.arrivals:
        return []
    arriving = [Tried(one, default.simulated_s) for one in trained.climb(own, rates)]

    def seconds(one: Tried) -> float:
        return (trained.steps(one.strategy) or math.inf) * one.simulated_s

    best = min([default, *arriving], key=seconds)
    rate = best.strategy.lr_scale if seconds(best) < NOTICED * seconds(default) else own.lr_scale
    found = list[Tried]()
    for one in others:
        at_best = one.strategy.replace(lr_scale=own.lr_scale if one.strategy.has_outer else rate)
        for start in dict.fromkeys((at_best, one.strategy)):
            if trained.steps(start, SLACK * steps * default.simulated_s / one.simulated_s) is not None:
                found.append(Tried(start, one.simulated_s))
                break
    for one in sorted(found, key=seconds)[: tune.finalists]:
        found += [Tried(scaled, one.simulated_s) for scaled in trained.climb(one.strategy, rates)]
    local = min((one for one in found if one.strategy.localsgd), key=seconds, default=None)
    refined = [] if local is None or not tune.diloco else _refined(local, seconds(local), trained, step_s)
    return [*arriving, *found, *refined]


def _refined(best: Tried, least_s: float, trained: Trainings, step_s: StepS) -> list[Tried]:
    """Try the changes of ``REFINED``, one after the other, on a way that takes ``least_s``; return the improved way, if any."""
    first = best
    for changes in REFINED:
        if not best.strategy.localsgd_configs.has_outer and any(name.startswith("outer") for name in changes):
            continue
        try:
            strategy = best.strategy.replace(localsgd_configs=changes)
            other = timed(strategy, step_s)
        except ConfigError:  # rounds too short for it
            continue
        took_s = (trained.steps(strategy, least_s / other.simulated_s) or math.inf) * other.simulated_s
        best, least_s = (other, took_s) if took_s < least_s else (best, least_s)
    return [] if best is first else [best]


def over_seeds(
    experiment: Experiment,
    ways: Ways,
    strategies: Sequence[DistributedStrategy],
    learn: Learn,
    out: Path,
    seeds: Sequence[int],
    progress: Progress | None = None,
    *,
    limit_s: float,
) -> Ways:
    """Train the ways of ``strategies``, and the default's, with as many ``seeds`` as ``limit_s`` seconds allow.

    A way that has lost the target again when the default arrives does not count as arriving. Because of such
    ways, all strategies are also trained at the experiment's learning rate. Results of other ways, with one seed
    each, are dropped: the luckiest of them would beat the means over several seeds.
    """
    if not ways.updates:
        return ways
    tell, at_own = progress or (lambda *_: None), [one.replace(lr_scale=ways.lr_scale) for one in strategies]
    of_ways = {way_of(strategy): strategy for strategy in filter(None, (experiment.strategy, *strategies, *at_own, ways.rated))}
    updates: dict[Way, tuple[float | None, ...]] = dict.fromkeys(of_ways, ())
    with trainings(experiment, out, learn, limit_s, "other seeds") as trained:
        for number, seed in enumerate(seeds):
            tell(number, len(seeds))
            trained.seeded = experiment.replace(run=dataclasses.replace(experiment.run, seed=seed))
            trained.arrivals, trained.at_least = {}, 0
            trained.at_least = math.ceil(trained.steps(experiment.strategy) or experiment.workload.steps)
            steps = [trained.steps(strategy) for strategy in of_ways.values()]
            if len(trained.arrivals) < len(of_ways):
                break
            updates = {way: (*updates[way], one) for way, one in zip(of_ways, steps, strict=True)}
    tell(len(updates[ways.own]), len(updates[ways.own]))
    if not updates[ways.own]:
        no_time = left_out("further seeds", "are not trained", "there was no time (tune.search_seconds)")
        return dataclasses.replace(ways, notes=(*ways.notes, no_time))
    said = tuple(f"{name_of(of_ways[way])}: {', '.join(map(_in_words, each))}" for way, each in updates.items())
    by = f"{counted(len(updates[ways.own]), 'seed')}, not lost before the default is there"
    note = Learnt(target_loss=experiment.workload.target_loss or 0.0, seeds=by, ways=said)
    ways = dataclasses.replace(ways, updates=updates, notes=(*ways.notes, note))
    return dataclasses.replace(ways, rated=ways.rated and _better_rated(ways, [ways.rated]))


def _in_words(steps: float | None) -> str:
    return "not reached" if steps is None else f"{steps:.0f}"


def learns(experiment: Experiment) -> bool:
    """Whether there is a loss to learn, and a target for it."""
    return experiment.workload.target_loss is not None and experiment.workload.model != LAYERS and experiment.run.device != "emulated"


def is_trainable(experiment: Experiment) -> bool:
    """Whether virtual trainers can reach a target within ``tune.search_seconds``, or have a GPU for it."""
    if not learns(experiment):
        return False
    import torch  # imported here because a search without a target does not need it

    has_gpu = experiment.run.device == "cuda" and torch.cuda.is_available()
    return has_gpu or _least_s(experiment) <= experiment.tune.search_seconds


def _least_s(experiment: Experiment) -> float:
    """Return the approximate least seconds to a target: the time of all trainers' steps until enough evaluations."""
    from sim.learning.prepared import step_flops  # imports torch, which a search without a target does not need

    steps = experiment.run.warmup_steps + HITS_IN_A_ROW * experiment.workload.eval_every
    return steps * experiment.cluster.trainers * step_flops(experiment.workload) / _CORE_FLOPS_S


def _others(experiment: Experiment, default: Tried, leaders: Iterable[Tried], step_s: StepS) -> tuple[list[Tried], list[Note]]:
    """Return ways outside the search space, with the knobs of their ``leaders``, and notes about failures.

    They are an outer optimizer for each searched K that has none, and merged gradients, unless the default has
    these or local steps.
    """
    tune, own, changes = experiment.tune, default.strategy, list[_Change]()
    if own.mode == "ps":
        return [], []
    for strategy in (own, *(tried.strategy for tried in leaders)):
        if strategy.localsgd and not strategy.localsgd_configs.has_outer and tune.diloco:
            changes.append((strategy, {"localsgd_configs": OUTER}))
    if not (own.is_local or own.gradient_merge):
        changes += [(own, {"gradient_merge": True, "gradient_merge_configs": {"k_steps": k}}) for k in tune.gradient_merge if k > 1]
    return _simulated(changes, step_s)


def _of_script(experiment: Experiment, found: Search, step_s: StepS) -> Ways:
    """Return the ways of a user's script that real runs try.

    They are an outer optimizer for the K with the fastest steps and for the next larger K (or 2 K), and the
    learning rates of ``tune.lr_scale`` with the default and the fastest K.
    """
    local = [tried for tried in (found.default, *found.ranked) if tried.strategy.localsgd]
    fastest = min(local, key=lambda tried: tried.simulated_s, default=found.default).strategy
    configs, tune = fastest.localsgd_configs, experiment.tune
    changes: list[_Change] = [
        (strategy, {"lr_scale": rate})
        for strategy in dict.fromkeys((experiment.strategy, fastest))
        for rate in dict.fromkeys(tune.lr_scale)
        if rate != strategy.lr_scale
    ]
    if fastest.localsgd and not configs.has_outer and tune.diloco:
        both = configs.k_steps, min((k for k in tune.local_steps if k > configs.k_steps), default=2 * configs.k_steps)
        changes += [(fastest, {"localsgd_configs": {"k_steps": k, **OUTER}}) for k in both]
    others, refused = _simulated(changes, step_s)
    names = "; ".join(name_of(tried.strategy) for tried in others)
    why = f"they train no script; real runs try, beside tune.finalists (tune.diloco, tune.lr_scale): {names}"
    notes = [left_out("virtual trainers", "are not asked", why)] if others else []
    return Ways(others=tuple(others), notes=(*notes, *refused), lr_scale=experiment.strategy.lr_scale)


def _simulated(changes: Sequence[_Change], step_s: StepS) -> tuple[list[Tried], list[Note]]:
    """Simulate strategies with changes; return them, and notes about those that cannot be simulated."""
    found, refused = list[Tried](), list[Note]()
    for leader, changed in changes:
        try:
            strategy = leader.replace(**changed)
            found.append(timed(strategy, step_s))
        except ConfigError as error:
            refused.append(left_out(", ".join(changed), "is not tried", error))
    return found, refused


def _better_rated(ways: Ways, rated: Sequence[DistributedStrategy]) -> DistributedStrategy | None:
    """Return the default at the learning rate with the fewest steps, or None if it is not worth a note."""
    best = min(filter(ways.arrives, rated), key=ways.weight, default=None)
    is_noticed = best is not None and (not any(ways.updates[ways.own]) or ways.weight(best) < NOTICED * ways.default_steps)
    return best if is_noticed else None


def _notes(trained: Trainings) -> list[Note]:
    """Return notes about the steps of each way, by learning rate, and about ways that were not trained."""
    run, workload, strategies = trained.seeded.run, trained.seeded.workload, trained.strategies
    taken: dict[str, list[str]] = {}
    for way, steps in trained.arrivals.items():
        scale = strategies[way].lr_scale
        words = _in_words(steps) + (f" at {scale:g}x" if scale != 1 else "")
        taken.setdefault(name_of(strategies[way].replace(lr_scale=1.0)), []).append(words)
    said = tuple(f"{name}: {', '.join(steps)}" for name, steps in taken.items())
    rates = " (at 2x: at twice workload.lr)" if any(one.lr_scale != 1 for one in strategies.values()) else ""
    notes: list[Note] = [Learnt(target_loss=workload.target_loss or 0.0, seeds=f"seed {run.seed}{rates}", ways=said)] if said else []
    untried = [name_of(one) for way, one in strategies.items() if way not in trained.arrivals and way not in trained.refused]
    if untried:
        raised = f"there was no time; raise tune.search_seconds = {trained.seeded.tune.search_seconds:g}"
        notes.append(left_out(", ".join(untried), "are not trained", raised))
    return notes
