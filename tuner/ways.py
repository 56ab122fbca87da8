"""Ways of training: how many steps of a trainer each takes to the target, by virtual trainers, before a process starts.

Bucket sizes and communicators move the seconds of a step; local steps, an outer optimizer and merged gradients move how many steps there
are. What a strategy promises is the product. Virtual trainers train the workload of the registry as real ones would, from the
parameters and on the data of a seed; real runs decide, with others.

Ways beside the search space take the fastest timing knobs that the search found for as many local steps. Rounds of adaptive K, and local
steps that begin late, are not alike: seconds are those of a fixed K that exchanges as often on the way to the target (``Ways.paced``).
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.profile import table_for
from fleetbench.quantities import counted
from fleetbench.strategy import AdaptiveLocalSGDConfigs, Averaging, DistributedStrategy, GradientMergeConfigs, LocalSGDConfigs
from fleetbench.target import HITS_IN_A_ROW
from fleetbench.workload import LAYERS
from sim.learning.trajectory import key_of
from tuner.recommendation import Trial
from tuner.search import Search, StepS, Tried
from tuner.space import name_of, parameters_of, way_of
from tuner.study import open_study
from tuner.to_target import Updates

Progress = Callable[[int, int], None]
_Change = tuple[DistributedStrategy, dict[str, Any]]
"""A strategy, and what of it is to change."""


class Arrival(NamedTuple):
    """A training that reaches its target."""

    steps: float
    """Of a trainer."""
    k: float = 1.0
    """Steps of a round until then, in the mean."""


Learn = Callable[[Experiment, float], Arrival | None]
"""The seam to virtual trainers: how an experiment reaches its target, none where it does not; raises ``TimeoutError`` where it takes more
than so many seconds."""
OUTER: Mapping[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_nesterov": True}
"""DiLoCo's outer optimizer (arXiv 2311.08105, section 3)."""
RATES = (2.0, 0.5)
"""Of the experiment's learning rate: what is tried beside it."""
_POWERS = (2, 3)
"""Of these, what may be tried after them."""
_FIRST = 3
"""Ways that are tried before a rate is."""
NOTICED = 0.9
"""Share of the default's steps below which another learning rate is worth a note."""
_LEARNT = "trainings to the target"
"""Attribute of a study: an ``Arrival`` by training, empty where it does not arrive, none where there was no time for it."""
Reached = tuple[float, ...]
"""An ``Arrival``, or empty."""
_FLAT: dict[str, Any] = {"use_hierarchical_allreduce": False, "hierarchical_inner_ranks": 0, "hierarchical_variant": "leader"}
_CORE_FLOPS_S = 1e11
"""What one core computes at most."""
_BY_STEPS = "ways of training are ranked by the seconds of a step alone"


@dataclass(frozen=True, slots=True)
class Ways:
    """What virtual trainers say of the ways of training that are known to the search, and of others."""

    updates: Mapping[tuple[object, ...], tuple[float | None, ...]] = field(default_factory=dict)
    """By ``way_of``: steps to the target by seed, none where it does not arrive; empty where nothing is known."""
    others: tuple[Tried, ...] = ()
    """Strategies of ways outside of the search space."""
    notes: tuple[str, ...] = ()
    steps: int = 0
    """After which a training is over."""
    own: tuple[object, ...] = ()
    """The default's way."""
    learnt: Mapping[str, Reached] = field(default_factory=dict)
    """What a later tuning need not train again, by ``_key``."""
    paces: Mapping[tuple[object, ...], float] = field(default_factory=dict)
    """Of ways whose rounds differ: their mean, in steps."""
    caveat: str | None = None
    """Of the verdict's line: a learning rate with which the default itself takes fewer steps, or that nothing is known to arrive."""
    in_vain: bool = False
    """Virtual trainers were asked, and no way but the default's is known to arrive."""

    def of(self, strategy: DistributedStrategy) -> float | None:
        """Steps to the target, at least; none where nothing is known of them."""
        return self.weight(strategy) if way_of(strategy) in self.updates else None

    def seconds(self, tried: Tried) -> float | None:
        """Simulated seconds to the target, or of a step where no ways are known; none of a way that does not arrive, or is not known."""
        return self.weight(tried.strategy) * tried.trial.simulated_s if self.arrives(tried.strategy) else None

    def paced(self, strategy: DistributedStrategy) -> DistributedStrategy:
        """What has its seconds of a step: itself, or, where its rounds differ, the largest fixed K that exchanges no less often."""
        if (pace := self.paces.get(way_of(strategy))) is None:
            return strategy
        configs = strategy.localsgd_configs if strategy.localsgd else LocalSGDConfigs(**_averaging(strategy.adaptive_localsgd_configs))
        k_steps = math.floor(pace) // configs.fragments * configs.fragments
        fixed = dataclasses.replace(configs, k_steps=k_steps, begin_step=1) if k_steps > 1 else LocalSGDConfigs()
        never = {"adaptive_localsgd": False, "adaptive_localsgd_configs": AdaptiveLocalSGDConfigs()}
        return strategy.replace(localsgd=k_steps > 1, localsgd_configs=fixed, **never)

    def weight(self, strategy: DistributedStrategy) -> float:
        """Steps to the target, the default's in the mean over seeds and others by their mean ratio to it; 1 where no ways are known."""
        if not self.updates:
            return 1.0
        steps, ratios = statistics.fmean(self.steps if one is None else one for one in self.updates[self.own]), self.ratios(strategy)
        return steps * math.exp(-ratios.mean) if ratios is not None and ratios.ratios else steps

    def ratios(self, strategy: DistributedStrategy) -> Updates | None:
        """How many fewer steps than the default's its way takes, by seed; none of the default's own, or where no ways are known."""
        if (way := way_of(strategy)) == self.own or not self.updates:
            return None
        return Updates.of_runs(self.updates[self.own], self.updates.get(way, ()), self.steps)

    def arrives(self, strategy: DistributedStrategy) -> bool:
        """Whether its way arrives, as often as the default's with the same seeds; the default's own has a price in any case."""
        ratios = self.ratios(strategy)
        return ratios is None or (any(self.updates.get(way_of(strategy), ())) and sum(ratios.known) >= 0)


def by_virtual_trainers(experiment: Experiment, limit_s: float) -> Arrival | None:
    """How it reaches the target; see ``Learn``. Raises ``ConfigError`` for what virtual trainers do not execute."""
    from sim.learning.virtual_training import train  # torch, which a search without a target does not need

    target, end = experiment.workload.target_loss, time.process_time() + limit_s

    def look(_done: int, _all: int) -> None:
        if time.process_time() > end:
            raise TimeoutError

    learnt = train(experiment, look, until=target)
    if (reached := learnt.crossing(target)) is None:
        return None
    counted_steps = learnt.local_steps[1 - learnt.first_step :][: reached.step]
    return Arrival(reached.smooth, reached.step / max(1, sum(length is not None for length in counted_steps)))


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
    """Train the ways of the search and those beside it virtually, largest K first, as many as ``tune.search_seconds`` has room for.

    ``seed``: of these trainings, in place of ``run.seed``.

    Nothing is known where ``learn`` is none, no loss is learnt, or no way arrives beside or before the default's; nor of a user's script,
    whose ``others`` real runs are to price. ``known``: what an earlier tuning has learnt.
    """
    workload, run = experiment.workload, experiment.run
    if workload.target_loss is not None and run.launcher == "command":
        return _of_script(experiment, found, step_s)
    if learn is None or workload.target_loss is None or workload.model == LAYERS or run.device == "emulated":
        return Ways()
    if (least_s := _least_s(experiment)) > experiment.tune.search_seconds and not (run.device == "cuda" and _has_gpu()):
        large = (
            f"virtual trainers are not asked: to the target they would take about {least_s:.3g} s of one core or more (tune.search_seconds)"
        )
        return Ways(notes=(large, _BY_STEPS))
    seeded = experiment if seed is None else experiment.replace(run=dataclasses.replace(run, seed=seed))
    own = way_of(experiment.strategy)
    leaders = {way_of(tried.strategy): tried for tried in reversed(found.ranked)}
    for arm in filter(None, (found.default, found.advice)):
        leaders.setdefault(way_of(arm.strategy), arm)
    others, refused = _others(experiment, leaders, step_s, len(found.tried))
    varying = _varying(experiment, leaders)
    tried = sorted(
        (*leaders.values(), *others), key=lambda one: (way_of(one.strategy) != own, -one.strategy.local_steps, one.trial.simulated_s)
    )
    strategies = [*(one.strategy for one in tried), *varying]
    names = {way_of(strategy): name_of(strategy) for strategy in strategies}
    ways: list[tuple[object, Experiment]] = [(way_of(strategy), _on_one_wire(seeded, strategy)) for strategy in strategies]
    higher, lower = ((rate, seeded.replace(workload=dataclasses.replace(workload, lr=workload.lr * rate))) for rate in RATES)
    trainings = [*ways[:_FIRST], higher, *ways[_FIRST:], lower]
    end = time.process_time() + experiment.tune.search_seconds
    by_number, kept = _learnt(experiment, [one for _, one in trainings], learn, out, progress, refused, known or {}, end)
    arrivals = {trainings[number][0]: arrival for number, arrival in by_number.items()}
    learnt = {way: None if arrival is None else arrival.steps for way, arrival in arrivals.items()}
    for rate, power in itertools.product(RATES, _POWERS):  # further in that direction, while that beats the default or nothing arrives
        last = rate ** (power - 1)
        if last in learnt and (_is_noticed(learnt[last], learnt.get(own)) or not any(learnt.values())):
            further = seeded.replace(workload=dataclasses.replace(workload, lr=workload.lr * rate**power))
            by_number, kept = _learnt(experiment, [further], learn, out, progress, refused, kept, end)
            if 0 in by_number:
                learnt[rate**power] = by_number[0] and by_number[0].steps
    updates = {way: (steps,) for way, steps in learnt.items() if way in names}
    better = _better_rate(workload.lr, learnt, own)
    notes = (*_notes(seeded, learnt, names, refused), *refused)
    if own not in updates or len(updates) == 1 or not any(map(any, updates.values())):
        in_vain = bool(updates) and not any(map(any, updates.values()))
        never = f"no way that virtual trainers trained reaches loss {workload.target_loss:g} within workload.steps = {workload.steps}"
        return Ways(notes=(*notes, _BY_STEPS), learnt=kept, caveat=better or (never if in_vain else None), in_vain=True)
    paces = {way_of(one): arrival.k for one in varying if (arrival := arrivals.get(way_of(one))) is not None}
    known_ways = Ways(
        updates=updates, others=tuple(others), notes=notes, steps=workload.steps, own=own, learnt=kept, paces=paces, caveat=better
    )
    arriving = [(one, dict[str, Any]()) for one in varying if way_of(one) in paces]
    paced, beside = _simulated(arriving, lambda one: step_s(known_ways.paced(one)), len(found.tried) + len(others))
    fastest = sorted(paced, key=lambda one: known_ways.weight(one.strategy) * one.trial.simulated_s)
    adaptive = [one for one in fastest if one.strategy.adaptive_localsgd]  # the rules' legs are alike: one of them is enough
    timed = [
        f"{names[way]}: its steps are timed as those of K = {max(1, math.floor(pace))}, for rounds of {pace:.3g} in the mean to the target"
        for way, pace in paces.items()
    ]
    paced = [one for one in paced if one not in adaptive[1:]]
    return dataclasses.replace(known_ways, others=(*others, *paced), notes=(*notes, *timed, *beside))


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
    """The ways of the strategies, and the default's, trained with as many of the seeds as all of them had time for in ``limit_s``.

    Of others, with a seed each, nothing is known any more: the luckiest of them would overtake what several seeds say.
    """
    if not ways.updates:
        return ways
    of_ways = {way_of(strategy): strategy for strategy in (experiment.strategy, *strategies)}
    updates: dict[tuple[object, ...], tuple[float | None, ...]] = dict.fromkeys(of_ways, ())
    kept, end = dict(ways.learnt), time.process_time() + limit_s
    for number, seed in enumerate(seeds):
        if progress is not None:
            progress(number, len(seeds))
        seeded = experiment.replace(run=dataclasses.replace(experiment.run, seed=seed))
        trainings = [_on_one_wire(seeded, strategy) for strategy in of_ways.values()]
        found, kept = _learnt(experiment, trainings, learn, out, None, [], kept, end)
        if len(found) < len(trainings):
            break
        arrivals = [found[number] for number in range(len(of_ways))]
        updates = {way: (*updates[way], one and one.steps) for way, one in zip(of_ways, arrivals, strict=True)}
    if not updates[ways.own]:
        return ways
    said = [f"{name_of(of_ways[way])}: {_in_words(each)}" for way, each in updates.items()]
    by = f"by virtual trainers of {counted(len(updates[ways.own]), 'seed')}, mean (least to most)"
    note = f"steps to loss {experiment.workload.target_loss:g}, {by}: {'; '.join(said)}"
    return dataclasses.replace(ways, updates=updates, learnt=kept, notes=(*ways.notes, note))


def _in_words(steps: Sequence[float | None]) -> str:
    """Steps of one way over seeds: their mean and range, and how many arrive where some do not."""
    arrived = [one for one in steps if one is not None]
    if not arrived:
        return "never"
    some = "" if len(arrived) == len(steps) else f", {len(arrived)} of {len(steps)} arrive"
    return f"{statistics.fmean(arrived):.0f} ({min(arrived):.0f} to {max(arrived):.0f}{some})"


def _on_one_wire(experiment: Experiment, strategy: DistributedStrategy) -> Experiment:
    """Ways are compared on the experiment's wire, and without a hierarchy, in which sums have another order and ways no other name."""
    base = experiment.strategy
    wire = {"fp16_allreduce": base.fp16_allreduce, "bf16_allreduce": base.bf16_allreduce}
    return experiment.replace(strategy=strategy.replace(**wire, **_FLAT))


def _has_gpu() -> bool:
    import torch  # which a search without a target does not need

    return torch.cuda.is_available()


def _least_s(experiment: Experiment) -> float:
    """About the least that a training to a target takes: a dense layer 6 operations a number and token, a look-up none."""
    workload = experiment.workload
    numbers = sum(
        gradient.numel for gradient in table_for(experiment).by_readiness() if not gradient.sparse and "embeddings" not in gradient.name
    )
    length = workload.data_options.get("length")
    tokens = experiment.cluster.trainers * workload.batch_size * (length if isinstance(length, int) else 1)
    return 6 * numbers * tokens * (experiment.run.warmup_steps + HITS_IN_A_ROW * workload.eval_every) / _CORE_FLOPS_S


def _key(experiment: Experiment) -> str:
    """Of all that the steps to the target depend on, among it the seed. Raises ``ConfigError`` for what virtual trainers do not execute."""
    learnt = key_of(experiment) if experiment.strategy.mode != "ps" else experiment.digest()  # with servers the clock is part of it
    return f"{learnt} to {experiment.workload.target_loss}"


def _learnt(
    experiment: Experiment,
    trainings: Sequence[Experiment],
    learn: Learn,
    out: Path,
    progress: Progress | None,
    refused: list[str],
    known: Mapping[str, Reached],
    end: float,
) -> tuple[dict[int, Arrival | None], dict[str, Reached]]:
    """How the target is reached, by number, of as many as there is time for until the process has computed for ``end`` seconds; and by key.

    What is refused joins ``refused``.

    The experiment's study below ``out`` keeps them, so that a tuning that is taken up again has the same finalists.
    """
    tell, found = progress or (lambda *_: None), dict[int, Arrival | None]()
    with open_study(experiment, out) as study:
        kept: dict[str, Reached | None] = {**known, **study.user_attrs.get(_LEARNT, {})}
        for number, one in enumerate(trainings):
            tell(number, len(trainings))
            try:
                key, left_s = _key(one), end - time.process_time()
                if key not in kept:
                    arrival = learn(one, left_s) if left_s > 0 else None
                    kept[key] = None if left_s <= 0 else arrival or ()
            except ConfigError as error:
                refused.append(f"virtual trainers do not train {name_of(one.strategy)}: {error.where}: {error.what}")
                if number == 0:
                    break
                continue
            except TimeoutError:
                kept[key], end = None, 0.0
            if (reached := kept[key]) is not None:
                found[number] = Arrival(*reached) if reached else None
        study.set_user_attr(_LEARNT, kept)
    tell(len(trainings), len(trainings))
    return found, {key: tuple(reached) for key, reached in kept.items() if reached is not None}


def _others(
    experiment: Experiment, leaders: Mapping[tuple[object, ...], Tried], step_s: StepS, number: int
) -> tuple[list[Tried], list[str]]:
    """An outer optimizer for each K of the search, and merged gradients, if the experiment has neither; each with its leader's knobs.

    And what of them cannot be simulated.
    """
    tune, changes = experiment.tune, list[_Change]()
    if experiment.strategy.mode == "ps":
        return [], []
    for strategy in (tried.strategy for tried in leaders.values()):
        configs = strategy.localsgd_configs
        if strategy.localsgd and not configs.has_outer and tune.diloco:
            changes.append((strategy, {"localsgd_configs": dataclasses.replace(configs, **OUTER)}))
    own = leaders[way_of(experiment.strategy)].strategy
    if not (own.localsgd or own.adaptive_localsgd or own.gradient_merge):
        merges = [GradientMergeConfigs(k_steps=k) for k in tune.gradient_merge if k > 1]
        changes += [(own, {"gradient_merge": True, "gradient_merge_configs": merge}) for merge in merges]
    return _simulated(changes, step_s, number)


def _varying(experiment: Experiment, leaders: Mapping[tuple[object, ...], Tried]) -> list[DistributedStrategy]:
    """Adaptive K from the largest K of the search, by two rules that follow the loss; local steps from the learning rate's first decay."""
    tune, decays = experiment.tune, experiment.workload.lr_decay
    averaged = [one.strategy for one in leaders.values() if one.strategy.localsgd and not one.strategy.localsgd_configs.has_outer]
    own = experiment.strategy
    if not averaged or not tune.adaptive or own.mode == "ps" or own.adaptive_localsgd or own.localsgd_configs.begin_step > 1:
        return []
    largest = max(averaged, key=lambda strategy: strategy.local_steps)
    begun = {"localsgd": False, "localsgd_configs": LocalSGDConfigs(), "adaptive_localsgd": True}
    rules: tuple[Literal["fleet", "paper"], ...] = ("paper", "fleet")
    averaging = _averaging(largest.localsgd_configs)
    adaptive = [AdaptiveLocalSGDConfigs(init_k_steps=largest.local_steps, variant=rule, **averaging) for rule in rules]
    found = [largest.replace(adaptive_localsgd_configs=configs, **begun) for configs in adaptive]
    begin_step = min((decay.step for decay in decays), default=1)
    late = [one.replace(localsgd_configs=dataclasses.replace(one.localsgd_configs, begin_step=begin_step)) for one in averaged]
    return [*found, *late] if begin_step > 1 else found


def _averaging(configs: Averaging) -> dict[str, Any]:
    """What trainers average, and how, of one kind of local steps for the other."""
    return {one.name: getattr(configs, one.name) for one in dataclasses.fields(Averaging)}


def _of_script(experiment: Experiment, found: Search, step_s: StepS) -> Ways:
    """An outer optimizer on the K whose steps are fastest, and on the next larger K, or on twice that K where there is none."""
    local = [tried for tried in (found.default, *found.ranked) if tried.strategy.localsgd]
    fastest = min(local, key=lambda tried: tried.trial.simulated_s, default=found.default).strategy
    configs, tune = fastest.localsgd_configs, experiment.tune
    if not fastest.localsgd or configs.has_outer or not tune.diloco:
        return Ways()
    both = configs.k_steps, min((k for k in tune.local_steps if k > configs.k_steps), default=2 * configs.k_steps)
    changes: list[_Change] = [(fastest, {"localsgd_configs": dataclasses.replace(configs, k_steps=k, **OUTER)}) for k in both]
    others, refused = _simulated(changes, step_s, len(found.tried))
    names = " and ".join(f"K = {tried.strategy.local_steps}" for tried in others)
    note = f"virtual trainers train no script, so real runs try an outer optimizer with {names} beside tune.finalists (tune.diloco)"
    return Ways(others=tuple(others), notes=(*([note] if others else []), *refused))


def _simulated(changes: Sequence[_Change], step_s: StepS, number: int) -> tuple[list[Tried], list[str]]:
    """Changed strategies, tried from that number on, and what of them cannot be."""
    found, refused = list[Tried](), list[str]()
    for leader, changed in changes:
        try:
            strategy = leader.replace(**changed)
            trial = Trial(number=number + len(found), parameters=parameters_of(strategy), simulated_s=step_s(strategy))
        except ConfigError as error:
            refused.append(f"{', '.join(changed)}: not tried: {error.where}: {error.what}")
        else:
            found.append(Tried(trial, strategy, f"way {trial.number}"))
    return found, refused


def _is_noticed(steps: float | None, now: float | None) -> bool:
    """Whether so many steps to the target are fewer than now, by enough to be said."""
    return steps is not None and (now is None or steps < NOTICED * now)


def _better_rate(lr: float, learnt: Mapping[Any, float | None], own: tuple[object, ...]) -> str | None:
    """The learning rate among those that were tried with which the default takes the fewest steps, in words; none where it is its own."""
    now = learnt.get(own)
    tried = {rate: steps for rate, steps in learnt.items() if isinstance(rate, float) and steps is not None}
    best = min(tried, key=lambda rate: tried[rate], default=1.0)
    if own not in learnt or not _is_noticed(tried.get(best), now):
        return None
    before = "and never arrives now" if now is None else f"instead of {now:.0f}"
    takes = f"takes {tried[best]:.0f} steps {before} (virtual trainers, one seed)"
    return f"with workload.lr = {lr * best:g} the default itself {takes}: set that first"


def _notes(experiment: Experiment, learnt: Mapping[Any, float | None], names: Mapping[Any, str], refused: Sequence[str]) -> list[str]:
    """What each way takes, and what was not tried."""
    workload = experiment.workload
    said = [f"{names[way]}: {'never' if steps is None else f'{steps:.0f}'}" for way, steps in learnt.items() if way in names]
    notes = (
        [f"steps to loss {workload.target_loss:g}, by virtual trainers of seed {experiment.run.seed}: {', '.join(said)}"] if said else []
    )
    left = [name for way, name in names.items() if way not in learnt and not any(f"not train {name}:" in note for note in refused)]
    left += [f"the default at workload.lr = {workload.lr * rate:g}" for rate in RATES if rate not in learnt and not refused]
    if left:
        seconds = f"tune.search_seconds = {experiment.tune.search_seconds:g}"
        notes.append(f"not compared, for {seconds} had no time to train them (raise it): {', '.join(left)}")
    return notes
