"""Ways of training: number of steps that each needs to the target, by virtual trainers, before real runs.

Bucket sizes and communicators change the seconds per step; local steps, an outer optimizer and merged
gradients change the number of steps. A strategy promises the product; real runs decide, with other seeds.

Ways outside the search space use the fastest timing knobs that the search found for the same number of local
steps. With adaptive K, or local steps that begin late, the length of rounds varies. Seconds per step are then those
of fixed rounds that synchronise as often on the way to the target (``Ways.levels``).
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment, Tune
from fleetbench.plan.rounds import Levels, at_pace, levels
from fleetbench.quantities import counted
from fleetbench.strategy import AdaptiveLocalSGDConfigs, DistributedStrategy
from fleetbench.target import HITS_IN_A_ROW
from fleetbench.workload import LAYERS, Workload
from tuner.learning import Arrival, Learn, Progress, Reached, Trainings, Way, and_stays, trainings
from tuner.notes import Learnt, Note, left_out
from tuner.search import Search, StepS, Tried
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
    learnt: Mapping[str, Reached] = field(default_factory=dict)
    """Results of training runs, by key, which a later tuning need not repeat."""
    paces: Mapping[Way, float] = field(default_factory=dict)
    """Mean number of steps per round, for ways with varying rounds."""
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

    def levels(self, strategy: DistributedStrategy, workload: Workload | None = None) -> Levels:
        """Return strategies, with their shares, whose mean seconds per step are those of ``strategy``.

        They are the strategy itself or, if its rounds vary, fixed rounds that synchronise as often: as observed
        on the way to the target or, with a ``workload``, as scheduled over all of its steps. They have the
        experiment's learning rate: too high a rate would make a script's losses infinite.
        """
        pace, strategy = self.paces.get(way_of(strategy)), strategy.replace(lr_scale=self.lr_scale)
        if pace is not None:
            return at_pace(strategy, pace)
        return ((strategy, 1.0),) if workload is None else levels(strategy, workload.steps, workload.steps_per_epoch)

    def step_s(self, strategy: DistributedStrategy, measure: StepS) -> float:
        """Return a strategy's seconds per step: the mean of ``measure`` over its ``levels``, by share."""
        return math.fsum(share * measure(one) for one, share in self.levels(strategy))

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
    known: Mapping[str, Reached] | None = None,
    seed: int | None = None,
) -> Ways:
    """Train the ways of the search, and others, with virtual trainers within ``tune.search_seconds``.

    The default is trained first, then the largest K. ``updates`` is empty if ``learn`` is None, if there is no loss
    or too little time, if no way arrives, if the default or all others could not be trained, or for a user's
    script, whose ``others`` need real runs. ``known``: results of an earlier tuning. ``seed`` replaces ``run.seed``.
    """
    workload, run = experiment.workload, experiment.run
    if workload.target_loss is not None and run.launcher == "command":
        return _of_script(experiment, found, step_s)
    if learn is None or not learns(experiment):
        return Ways()
    if not is_trainable(experiment):
        least_s = _least_s(experiment)
        takes = f"they would take about {least_s:,.0f} s of a core to the target, or more (tune.search_seconds)"
        return Ways(notes=(left_out("virtual trainers", "are not asked", takes), _BY_STEPS))
    own = way_of(experiment.strategy)
    leaders = {way_of(one.strategy): one for one in filter(None, (found.advice, found.default, *reversed(found.ranked)))}
    others, refused = _others(experiment, leaders, step_s)
    tried = sorted([*leaders.values(), *others], key=lambda one: (way_of(one.strategy) != own, -one.strategy.local_steps, one.simulated_s))
    merged = [one for one in tried if one.strategy.gradient_merge and not experiment.strategy.gradient_merge]
    varying = _varying(experiment, leaders)
    with trainings(experiment, out, learn, known or {}, experiment.tune.search_seconds, "one seed", progress) as trained:
        trained.seeded = experiment if seed is None else experiment.replace(run=dataclasses.replace(run, seed=seed))
        arriving, rate = _train([one for one in tried if one not in merged], varying, trained, experiment.tune)
        refined = _refined([*tried, *arriving], trained, step_s) if experiment.tune.diloco else []
        most_s = SLACK * (trained.steps(experiment.strategy) or math.inf) * tried[0].simulated_s
        for one in merged:  # last, because they seldom gain
            start = one.strategy.replace(lr_scale=rate)
            if trained.steps(start, most_s / one.simulated_s) is not None:
                arriving.append(Tried(start, one.simulated_s))
    varying = [one.replace(lr_scale=rate) for one in varying]
    arrivals, learnt = trained.arrivals, trained.kept
    notes = (*_notes(trained), *refused, *trained.refused.values())
    if own not in arrivals or len(arrivals) == 1 or not any(arrivals.values()):
        in_vain = bool(arrivals) and not any(arrivals.values())
        never = f"no way that virtual trainers trained reaches loss {workload.target_loss:g} within workload.steps = {workload.steps}"
        return Ways(notes=(*notes, _BY_STEPS), learnt=learnt, caveat=never if in_vain else None, in_vain=True)
    updates = {way: (arrival and arrival.steps,) for way, arrival in arrivals.items()}
    known_ways = Ways(updates=updates, notes=notes, steps=workload.steps, own=own, learnt=learnt, lr_scale=experiment.strategy.lr_scale)
    known_ways = _with_varying(known_ways, [one for one in varying if arrivals.get(way_of(one))], arrivals, step_s)
    searched = {one.strategy for one in leaders.values()}
    others += [one for one in arriving if one.strategy not in {*searched, *(other.strategy for other in others)}]
    rates = [one.strategy for one in arriving if way_of(one.strategy.replace(lr_scale=known_ways.lr_scale)) == own]
    return dataclasses.replace(known_ways, others=(*others, *refined, *known_ways.others), rated=_better_rated(known_ways, rates))


def _train(tried: Sequence[Tried], varying: Sequence[DistributedStrategy], trained: Trainings, tune: Tune) -> tuple[list[Tried], float]:
    """Train the first way, the default's, at several learning rates; then the others, the best at several rates.

    Others are trained at the default's best rate, or at the experiment's if they do not arrive, or have an
    outer optimizer, which multiplies it. A run is given up if the default would arrive much sooner. Return the
    ways at each rate at which they arrive, without the default at its own rate; and the default's best rate.
    """
    default, *others = tried
    rates, own = tune.lr_scale or RATES, default.strategy
    steps = trained.steps(own) or math.inf
    if way_of(own) not in trained.arrivals:
        return [], own.lr_scale
    scaled = trained.climb(own, rates)
    best = min(scaled, key=lambda one: trained.steps(one) or math.inf, default=own)
    rate = best.lr_scale if (trained.steps(best) or math.inf) < NOTICED * steps else own.lr_scale
    arriving, priced = [Tried(one, default.simulated_s) for one in scaled], list[tuple[float, Tried]]()
    for one in others:
        at_best = one.strategy.replace(lr_scale=own.lr_scale if one.strategy.has_outer else rate)
        for start in dict.fromkeys((at_best, one.strategy)):
            if (taken := trained.steps(start, SLACK * steps * default.simulated_s / one.simulated_s)) is not None:
                priced.append((taken * one.simulated_s, Tried(start, one.simulated_s)))
                break
    for strategy in varying:
        trained.steps(strategy.replace(lr_scale=rate))
    arriving += [one for _, one in priced]
    for _, one in sorted(priced, key=lambda item: item[0])[: tune.finalists]:
        arriving += [Tried(scaled, one.simulated_s) for scaled in trained.climb(one.strategy, rates)]
    return arriving, rate


def _refined(known: Sequence[Tried], trained: Trainings, step_s: StepS) -> list[Tried]:
    """Try the changes of ``REFINED`` on the best way with local steps; return the improved way, if any."""

    def seconds(tried: Tried) -> float:
        return (trained.steps(tried.strategy) or math.inf) * tried.simulated_s

    local = [one for one in known if one.strategy.localsgd and trained.arrivals.get(way_of(one.strategy))]
    if not local:
        return []
    first = best = min(local, key=seconds)
    for changes in REFINED:
        if not best.strategy.localsgd_configs.has_outer and any(name.startswith("outer") for name in changes):
            continue
        try:
            strategy = best.strategy.replace(localsgd_configs=changes)
            other = Tried(strategy, step_s(strategy))
        except ConfigError:  # rounds too short for it
            continue
        trained.steps(strategy, seconds(best) / other.simulated_s)
        if way_of(strategy) not in trained.arrivals:  # no time
            break
        best = min(best, other, key=seconds)
    return [] if best is first else [best]


def _with_varying(ways: Ways, arriving: Sequence[DistributedStrategy], arrivals: Mapping[Way, Arrival | None], step_s: StepS) -> Ways:
    """Return ``ways`` and the ways with varying rounds, timed by fixed rounds that synchronise as often."""
    paces = {way_of(one): arrival.k for one in arriving if (arrival := arrivals[way_of(one)]) is not None}
    paced_ways = dataclasses.replace(ways, paces=paces)
    paced, beside = _simulated([(one, {}) for one in arriving], lambda one: paced_ways.step_s(one, step_s))
    fastest = sorted(paced, key=lambda one: ways.weight(one.strategy) * one.simulated_s)
    adaptive = [one for one in fastest if one.strategy.adaptive_localsgd]  # the rules' legs are alike, so one of them is enough
    mean = "of fixed rounds that meet as often, of {:.3g} in the mean to the target"
    timed = [left_out(name_of(one), "has the step time", mean.format(paces[way_of(one)])) for one in arriving]
    others = tuple(one for one in paced if one not in adaptive[1:])
    return dataclasses.replace(paced_ways, others=others, notes=(*ways.notes, *timed, *beside))


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
    with trainings(experiment, out, learn, ways.learnt, limit_s, "other seeds") as trained:
        for number, seed in enumerate(seeds):
            tell(number, len(seeds))
            trained.seeded, trained.arrivals = experiment.replace(run=dataclasses.replace(experiment.run, seed=seed)), {}
            trained.learn, trained.whose = learn, ""
            least = math.ceil(trained.steps(experiment.strategy) or experiment.workload.steps)
            trained.learn, trained.whose = and_stays(learn, least), f", and is there after {least}"
            steps = [trained.steps(strategy) for strategy in of_ways.values()]
            if len(trained.arrivals) < len(of_ways):
                break
            updates = {way: (*updates[way], one) for way, one in zip(of_ways, steps, strict=True)}
    tell(len(updates[ways.own]), len(updates[ways.own]))
    if not updates[ways.own]:
        no_time = left_out("further seeds", "are not trained", "there was no time (tune.search_seconds)")
        return dataclasses.replace(ways, notes=(*ways.notes, no_time))
    said = tuple(f"{name_of(of_ways[way])}: {_in_words(each)}" for way, each in updates.items())
    by = f"{counted(len(updates[ways.own]), 'seed')}, mean (least to most), not lost before the default is there"
    note = Learnt(target_loss=experiment.workload.target_loss or 0.0, seeds=by, ways=said)
    ways = dataclasses.replace(ways, updates=updates, learnt=trained.kept, notes=(*ways.notes, note))
    return dataclasses.replace(ways, rated=ways.rated and _better_rated(ways, [ways.rated]))


def _in_words(steps: Sequence[float | None]) -> str:
    """Describe the steps of one way over seeds: mean, range, and how many runs arrive if some do not."""
    arrived = [one for one in steps if one is not None]
    if not arrived:
        return "never"
    words = [f"{min(arrived):.0f} to {max(arrived):.0f}"] if len(arrived) > 1 else []
    if len(arrived) < len(steps):
        words.append(f"{len(arrived)} of {len(steps)} arrive")
    return f"{statistics.fmean(arrived):.0f}" + (f" ({', '.join(words)})" if words else "")


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


def _others(experiment: Experiment, leaders: Mapping[Way, Tried], step_s: StepS) -> tuple[list[Tried], list[Note]]:
    """Return ways outside the search space, with the knobs of their ``leaders``, and notes about failures.

    They are an outer optimizer for each searched K that has none, and merged gradients, unless the default has
    these or local steps.
    """
    tune, changes = experiment.tune, list[_Change]()
    if experiment.strategy.mode == "ps":
        return [], []
    for strategy in (tried.strategy for tried in leaders.values()):
        configs = strategy.localsgd_configs
        if strategy.localsgd and not configs.has_outer and tune.diloco:
            changes.append((strategy, {"localsgd_configs": OUTER}))
    own = leaders[way_of(experiment.strategy)].strategy
    if not (own.is_local or own.gradient_merge):
        changes += [(own, {"gradient_merge": True, "gradient_merge_configs": {"k_steps": k}}) for k in tune.gradient_merge if k > 1]
    return _simulated(changes, step_s)


def _varying(experiment: Experiment, leaders: Mapping[Way, Tried]) -> list[DistributedStrategy]:
    """Return strategies with varying rounds: adaptive K, and local steps from the first learning-rate decay on.

    Adaptive K starts from the largest searched K, by two rules that follow the loss.
    """
    tune, decays = experiment.tune, experiment.workload.lr_decay
    averaged = [one.strategy for one in leaders.values() if one.strategy.localsgd and not one.strategy.localsgd_configs.has_outer]
    own = experiment.strategy
    if not averaged or not tune.adaptive or own.mode == "ps" or own.adaptive_localsgd or own.localsgd_configs.begin_step > 1:
        return []
    largest = max(averaged, key=lambda strategy: strategy.local_steps)
    rules: tuple[Literal["fleet", "paper"], ...] = ("paper", "fleet")
    shared = largest.localsgd_configs.shared()
    adaptive = [AdaptiveLocalSGDConfigs(init_k_steps=largest.local_steps, variant=rule, **shared) for rule in rules]
    found = [largest.without("localsgd").replace(adaptive_localsgd=True, adaptive_localsgd_configs=configs) for configs in adaptive]
    begin_step = min((decay.step for decay in decays), default=1)
    late = [one.replace(localsgd_configs={"begin_step": begin_step}) for one in averaged]
    return list({way_of(one): one for one in [*found, *(late if begin_step > 1 else [])]}.values())


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
            found.append(Tried(strategy, step_s(strategy)))
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
    for way, one in trained.arrivals.items():
        end, scale = trained.ends[way], strategies[way].lr_scale
        steps = f"{one.steps:.0f}" if one is not None else "never" if end >= workload.steps else f"not in {end}"
        taken.setdefault(name_of(strategies[way].replace(lr_scale=1.0)), []).append(steps + (f" at {scale:g}x" if scale != 1 else ""))
    said = tuple(f"{name}: {', '.join(steps)}" for name, steps in taken.items())
    rates = " (at 2x: at twice workload.lr)" if any(one.lr_scale != 1 for one in strategies.values()) else ""
    notes: list[Note] = [Learnt(target_loss=workload.target_loss or 0.0, seeds=f"seed {run.seed}{rates}", ways=said)] if said else []
    untried = [name_of(one) for way, one in strategies.items() if way not in trained.arrivals and way not in trained.refused]
    if untried:
        raised = f"there was no time; raise tune.search_seconds = {trained.seeded.tune.search_seconds:g}"
        notes.append(left_out(", ".join(untried), "are not trained", raised))
    return notes
