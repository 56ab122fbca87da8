"""Ways of training: how many steps of a trainer each takes to the target, by virtual trainers, before a process starts.

Bucket sizes and communicators move the seconds of a step; local steps, an outer optimizer and merged gradients move how many steps there
are. What a strategy promises is the product. Virtual trainers train the workload of the registry as real ones would, from the
parameters and on the data of ``run.seed``, so that their steps to the target are those of the first real run.

Ways beside the search space take the fastest timing knobs that the search found for as many local steps. Not tried: adaptive K and later
begins of local steps, whose steps take other times as training goes on, so that pairs of legs do not price them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy, GradientMergeConfigs
from fleetbench.workload import LAYERS
from tuner.recommendation import Trial
from tuner.search import Search, StepS, Tried
from tuner.space import parameters_of, way_of

Learn = Callable[[Experiment], float | None]
"""The seam to virtual trainers: an experiment's steps of a trainer to its target; none where it does not arrive."""
OUTER: Mapping[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_nesterov": True}
"""DiLoCo's outer optimizer (arXiv 2311.08105, section 3)."""
RATES = (0.5, 2.0)
"""Of the experiment's learning rate: what is tried beside it."""
NOTICED = 0.9
"""Share of the default's steps below which another learning rate is worth a note."""


@dataclass(frozen=True, slots=True)
class Ways:
    """What virtual trainers say of the ways of training that are known to the search, and of others."""

    updates: Mapping[tuple[object, ...], float | None] = field(default_factory=dict)
    """Steps to the target by ``way_of``; empty where virtual trainers were not asked."""
    others: tuple[Tried, ...] = ()
    """Strategies of ways outside of the search space."""
    notes: tuple[str, ...] = ()

    def of(self, strategy: DistributedStrategy) -> float | None:
        """Steps to the target; none where that is not known, or never."""
        return self.updates.get(way_of(strategy))

    def seconds(self, tried: Tried) -> float | None:
        """Simulated seconds to the target, or of a step where virtual trainers were not asked; none where it is not reached."""
        if not self.updates:
            return tried.trial.simulated_s
        updates = self.of(tried.strategy)
        return None if updates is None else updates * tried.trial.simulated_s


def by_virtual_trainers(experiment: Experiment) -> float | None:
    """Steps to the target; see ``Learn``. Raises ``ConfigError`` for what virtual trainers do not execute."""
    from sim.learning.virtual_training import train  # torch, which a search without a target does not need

    target = experiment.workload.target_loss
    reached = train(experiment, until=target).crossing(target)
    return None if reached is None else reached.smooth


def price_ways(
    experiment: Experiment,
    found: Search,
    step_s: StepS,
    learn: Learn | None,
    progress: Callable[[int, int], None] | None = None,
) -> Ways:
    """Train the ways of the search and those beside it virtually, largest K first, as many as ``tune.search_seconds`` has room for.

    Nothing is known where ``learn`` is none, no loss is learnt, or no way could be compared with the default's.
    """
    workload, run = experiment.workload, experiment.run
    if learn is None or workload.target_loss is None or workload.model == LAYERS or run.device == "emulated" or run.launcher == "command":
        return Ways()
    own = way_of(experiment.strategy)
    leaders = {way_of(tried.strategy): tried for tried in reversed(found.ranked)}
    for arm in filter(None, (found.default, found.advice)):
        leaders.setdefault(way_of(arm.strategy), arm)
    others, refused = _others(experiment, leaders, step_s, len(found.tried))
    tried = sorted((*leaders.values(), *others), key=lambda one: (way_of(one.strategy) != own, -one.strategy.local_steps))
    trainings: dict[object, Experiment] = {way_of(one.strategy): experiment.replace(strategy=one.strategy) for one in tried}
    lower, higher = ((factor, experiment.replace(workload=dataclasses.replace(workload, lr=workload.lr * factor))) for factor in RATES)
    trainings = dict([*[*trainings.items()][:1], higher, *[*trainings.items()][1:], lower])
    try:
        learnt = _learnt(trainings, learn, experiment.tune.search_seconds, progress or (lambda *_: None))
    except ConfigError as error:
        return Ways(notes=(f"{_BY_STEPS}: virtual trainers say {error.where}: {error.what}",))
    if len(learnt.keys() - {*RATES}) == 1:
        return Ways(notes=(f"{_BY_STEPS}: tune.search_seconds has no room for virtual trainers of more than the default",))
    names = {way_of(one.strategy): name_of(one.strategy) for one in tried}
    updates = {way: steps for way, steps in learnt.items() if way in names}
    return Ways(updates=updates, others=tuple(others), notes=(*_notes(experiment, learnt, names), *refused))


_BY_STEPS = "ways of training are ranked by the seconds of a step alone"


def _learnt(
    trainings: Mapping[object, Experiment], learn: Learn, limit_s: float, progress: Callable[[int, int], None]
) -> dict[Any, float | None]:
    """Steps to the target, of the first one at least; of others as long as one more fits into the limit."""
    began, found = time.monotonic(), dict[Any, float | None]()
    for number, (what, one) in enumerate(trainings.items()):
        took_s = time.monotonic() - began
        if number and took_s * (number + 1) / number > limit_s:
            break
        progress(number, len(trainings))
        found[what] = learn(one)
    progress(len(trainings), len(trainings))
    return found


def _others(
    experiment: Experiment, leaders: Mapping[tuple[object, ...], Tried], step_s: StepS, number: int
) -> tuple[list[Tried], list[str]]:
    """An outer optimizer for each K of the search, and merged gradients, if the experiment has neither; each with its leader's knobs.

    And what of them cannot be simulated.
    """
    tune, changes = experiment.tune, list[tuple[DistributedStrategy, dict[str, Any]]]()
    for strategy in (tried.strategy for tried in leaders.values()):
        configs = strategy.localsgd_configs
        if strategy.localsgd and not configs.has_outer and "diloco" in tune.outer:
            changes.append((strategy, {"localsgd_configs": dataclasses.replace(configs, **OUTER)}))
    plain = leaders[way_of(experiment.strategy)].strategy
    if not (plain.localsgd or plain.adaptive_localsgd or plain.gradient_merge):
        merges = [GradientMergeConfigs(k_steps=k) for k in tune.gradient_merge if k > 1]
        changes += [(plain, {"gradient_merge": True, "gradient_merge_configs": merge}) for merge in merges]
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


def _notes(experiment: Experiment, learnt: Mapping[Any, float | None], names: Mapping[Any, str]) -> list[str]:
    """What each way takes; another learning rate, where the default takes fewer steps with it; and what was not tried."""
    workload = experiment.workload
    said = ", ".join(f"{names[way]} {'never' if steps is None else f'{steps:.0f}'}" for way, steps in learnt.items() if way in names)
    notes = [f"steps to loss {workload.target_loss:g}, by virtual trainers of seed {experiment.run.seed}: {said}"]
    own = learnt[way_of(experiment.strategy)]
    for factor in RATES:
        steps = learnt.get(factor)
        if steps is not None and (own is None or steps < NOTICED * own):
            now = "never arrives" if own is None else f"takes {own:.0f} steps"
            notes.append(
                f"with workload.lr = {workload.lr * factor:g} the default itself takes {steps:.0f} steps, and now {now}: set that first"
            )
    left = [name for way, name in names.items() if way not in learnt]
    return [*notes, *([f"not tried, as tune.search_seconds had passed: {', '.join(left)}"] if left else [])]


def name_of(strategy: DistributedStrategy) -> str:
    """A way of training in words."""
    if strategy.adaptive_localsgd:
        return "adaptive K"
    merged = strategy.gradient_merge_configs.k_steps if strategy.gradient_merge else 1
    words = [f"K = {strategy.local_steps}" if strategy.localsgd else "synchronous", f"{merged} gradients merged" if merged > 1 else ""]
    outer = "an outer optimizer" if strategy.localsgd and strategy.localsgd_configs.has_outer else ""
    return " and ".join(filter(None, [*words, outer]))
