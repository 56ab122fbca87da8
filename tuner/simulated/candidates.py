"""Candidates: the strategies that are tried, and their ranking by short simulations.

Around the experiment's own strategy, with and without each hierarchy and with fusion by a fixed size or by cost, lies the space of
``fleetbench tune``. With parameter servers they are Fleet's three modes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.servers.rules import WAIT_NS
from fleetbench.profile import table_for
from fleetbench.strategy import ASyncConfigs, DistributedStrategy
from sim.many.objective import StepTime
from sim.run import simulate
from tuner.search import Search, StepS, Tried, search
from tuner.space import Equivalence, Space, parameters_of, search_space

RANKED_STEPS = 10
"""Counted steps of one trial: ten rank strategies as fifty do."""
FINAL_STEPS = 50
"""Counted steps of one simulation of the best."""
WARMUP_STEPS = 2
MERGED = (1, 4, 16)
"""Gradients of one push, in the asynchronous mode."""
SERVED_ROUNDS = 2
"""GeoSGD's exchanges in one trial."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """What was tried, and what was not."""

    tried: tuple[Tried, ...]
    """Different strategies, fastest first."""
    num_trials: int
    notes: tuple[str, ...]

    @property
    def default(self) -> Tried:
        """The experiment's own strategy."""
        return next(tried for tried in self.tried if tried.arm is not None)

    def telling(self, count: int) -> list[DistributedStrategy]:
        """The default, the best ``count`` strategies, and the best one with each value that anything else has."""
        leaders = {(name, value): tried for tried in reversed(self.tried) for name, value in _values(tried.strategy)}
        chosen = [self.default, *self.tried[:count], *leaders.values()]
        return list(dict.fromkeys(tried.strategy for tried in chosen))


def ranked(experiment: Experiment, *, out: Path, progress: Progress | None = None) -> Ranking:
    """Try every different candidate, or as many as ``tune.trials`` allows, by Optuna. Raises ``ConfigError`` as ``simulate`` does."""
    step_s = step_time(shortened(experiment))
    if experiment.strategy.mode == "ps":
        strategies, notes = _served(experiment)
        found = _enumerated(experiment, {repr(strategy): strategy for strategy in strategies}, step_s, notes, progress)
        return Ranking(tried=found, num_trials=len(found), notes=tuple(notes))
    notes = []
    bases = list(_bases(experiment, notes))
    spaces = [(base, search_space(base)) for base in bases]
    notes += search_space(experiment).notes
    limit = experiment.tune.trials
    different = _different(experiment, [space for _, space in spaces]) if sum(space.size for _, space in spaces) <= 8 * limit else None
    if different is not None and len(different) <= limit:
        tried = _enumerated(experiment, different, step_s, notes, progress)
        num_trials = len(tried)
    else:
        searches = _searched(spaces, limit, step_s, out, progress)
        num_trials = sum(len(found.tried) for found in searches)
        tried = _merged(experiment, searches)
    return Ranking(tried=tried, num_trials=num_trials, notes=tuple(dict.fromkeys(notes)))


def shortened(experiment: Experiment, least: int = RANKED_STEPS) -> Experiment:
    """The experiment with at least ``least`` counted steps, in whole rounds of all cadences, and at most the workload's."""
    strategy, tune = experiment.strategy, experiment.tune
    if strategy.mode == "ps":
        rounds = SERVED_ROUNDS * max(max(_geo_steps(experiment), default=1), strategy.a_sync_configs.k_steps)
    else:
        cadences = tune.local_steps if experiment.workload.target_loss is not None else (strategy.local_steps,)
        rounds = math.lcm(*cadences) * strategy.gradient_merge_configs.k_steps
    steps = min(rounds * math.ceil(least / rounds), max(tune.simulated_steps, least), experiment.workload.steps)
    workload = dataclasses.replace(experiment.workload, steps=steps)
    run = dataclasses.replace(experiment.run, warmup_steps=min(WARMUP_STEPS, experiment.run.warmup_steps))
    return experiment.replace(workload=workload, run=run)


def step_time(experiment: Experiment) -> StepS:
    """Seconds of a step by strategy; strategies of one experiment share their draws."""
    if experiment.strategy.mode != "ps":
        return StepTime(experiment)

    def served(strategy: DistributedStrategy) -> float:
        summary = simulate(experiment.replace(strategy=strategy), timeline=False, table=False).summary
        return summary.wall_s / summary.steps

    return served


def _bases(experiment: Experiment, notes: list[str]) -> Iterator[Experiment]:
    """The experiment with each way to use its nodes, and each rule of fusion; what contradicts it goes to ``notes``."""
    strategy, cluster = experiment.strategy, experiment.cluster
    hierarchies: list[dict[str, object]] = [{}]
    if cluster.nodes > 1 and cluster.trainers_per_node > 1:
        inner = strategy.hierarchical_inner_ranks
        hierarchies = [{"use_hierarchical_allreduce": False, "hierarchical_inner_ranks": 0, "hierarchical_variant": "leader"}]
        for variant in ("leader", "reduce_scatter"):
            hierarchies.append({"use_hierarchical_allreduce": True, "hierarchical_inner_ranks": inner, "hierarchical_variant": variant})
    plain = DistributedStrategy()
    by_cost = {"fuse_grad_size_in_MB": plain.fuse_grad_size_in_MB, "fuse_grad_count": plain.fuse_grad_count}
    fusions: list[dict[str, object]] = [{}]
    if strategy.fuse_all_reduce_ops and strategy.fusion == "fleet":
        fusions += [{"fusion": rule, **by_cost} for rule in ("merged_gradient", "optimal")]
    for hierarchy in hierarchies:
        for fusion in fusions:
            changes = hierarchy | fusion
            try:
                yield experiment.replace(strategy=strategy.replace(**changes))
            except ConfigError as error:
                notes.append(f"not tried: {', '.join(f'{name} = {value}' for name, value in changes.items())}: {error.what}")


def _different(experiment: Experiment, spaces: list[Space]) -> dict[str, DistributedStrategy]:
    """Strategies by what tells them apart; of equal ones the one that changes least, with the largest cap of a bucket."""
    same = Equivalence(experiment)
    own = dict(_values(experiment.strategy))
    points = [space.strategy(point) for space in spaces for point in space.points()]
    points.sort(key=lambda strategy: (sum(own[name] != value for name, value in _values(strategy)), -strategy.fuse_grad_size_in_MB))
    found = {same.key(experiment.strategy): experiment.strategy}
    for strategy in points:
        found.setdefault(same.key(strategy), strategy)
    return found


def _enumerated(
    experiment: Experiment, strategies: dict[str, DistributedStrategy], step_s: StepS, notes: list[str], progress: Progress | None
) -> tuple[Tried, ...]:
    found = []
    for number, (key, strategy) in enumerate(strategies.items()):
        if progress is not None:
            progress(number, len(strategies))
        arm = "default" if strategy == experiment.strategy else None
        try:
            seconds = step_s(strategy)
        except ConfigError as error:
            if arm is not None:
                raise
            notes.append(f"not simulated: {error.where}: {error.what}")
            continue
        found.append(_tried(number, strategy, key, seconds, arm))
    if progress is not None:
        progress(len(strategies), len(strategies))
    return tuple(sorted(found, key=_rank))


def _searched(spaces: list[tuple[Experiment, Space]], limit: int, step_s: StepS, out: Path, progress: Progress | None) -> list[Search]:
    """A search of its own around each base, which share the trials."""
    found = []
    for number, (base, space) in enumerate(spaces):
        if progress is not None:
            progress(number, len(spaces))
        part = base.replace(tune=dataclasses.replace(base.tune, trials=max(2, limit // len(spaces))))
        found.append(search(part, space, base.strategy, out=out, step_s=step_s))
    return found


def _merged(experiment: Experiment, searches: list[Search]) -> tuple[Tried, ...]:
    found: dict[str, Tried] = {}
    for tried in (tried for one in searches for tried in one.tried):
        arm = "default" if tried.strategy == experiment.strategy else None
        if arm is not None or tried.key not in found:
            found[tried.key] = _tried(len(found), tried.strategy, tried.key, tried.trial.simulated_s, arm)
    return tuple(sorted(found.values(), key=_rank))


def _tried(number: int, strategy: DistributedStrategy, key: str, seconds: float, arm: str | None) -> Tried:
    from tuner.recommendation import Trial

    return Tried(Trial(number=number, parameters=dict(parameters_of(strategy)), simulated_s=seconds), strategy, key, arm)


def _rank(tried: Tried) -> tuple[float, int]:
    return tried.trial.simulated_s, tried.trial.number


def _values(strategy: DistributedStrategy) -> list[tuple[str, object]]:
    """What the candidates differ in."""
    names = ("use_hierarchical_allreduce", "hierarchical_variant", "fusion", "a_sync", "a_sync_configs")
    return [*parameters_of(strategy).items(), *((name, getattr(strategy, name)) for name in names)]


def _geo_steps(experiment: Experiment) -> tuple[int, ...]:
    """K of GeoSGD: those of ``tune.local_steps`` above 1."""
    return tuple(k for k in experiment.tune.local_steps if k > 1) if experiment.workload.optimizer == "sgd" else ()


def _served(experiment: Experiment) -> tuple[list[DistributedStrategy], list[str]]:
    """Synchronous, asynchronous with pushes of several gradients, and GeoSGD, the experiment's own strategy first.

    A trainer that is silent for ``send_wait_times`` pauses sends what it has; so that K and merging mean anything, there are as
    many pauses as one and a half steps' compute take.
    """
    strategy, table = experiment.strategy, table_for(experiment)
    own = strategy.a_sync_configs
    pauses = math.ceil(1.5 * (table.forward_ns + table.backward_ns) / WAIT_NS)
    pauses = max(pauses, own.send_wait_times)
    found = [strategy, strategy.replace(a_sync=False, a_sync_configs=ASyncConfigs())]
    for merged in MERGED:
        waits = own.send_wait_times if merged == 1 else pauses
        configs = dataclasses.replace(own, k_steps=0, max_merge_var_num=merged, send_wait_times=waits)
        found.append(strategy.replace(a_sync=True, a_sync_configs=configs))
    for k_steps in _geo_steps(experiment):
        configs = dataclasses.replace(own, k_steps=k_steps, send_wait_times=pauses)
        found.append(strategy.replace(a_sync=True, a_sync_configs=configs))
    notes = ["what staleness, or K steps between two exchanges, costs in loss is not simulated"]
    if not _geo_steps(experiment):
        notes.append(f"GeoSGD is not tried: it is for SGD, and workload.optimizer is {experiment.workload.optimizer}")
    return list(dict.fromkeys(found)), notes
