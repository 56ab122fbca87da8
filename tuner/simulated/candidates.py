"""Candidates: the strategies that are tried, and their ranking by short simulations.

Around the experiment's own strategy, with and without each hierarchy and with fusion by a fixed size or by cost, lies the space of
``fleetbench tune``. With parameter servers they are Fleet's three modes.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.hardware.gpus import gpu_named
from fleetbench.plan.combination import Combination
from fleetbench.plan.servers.rules import WAIT_NS
from fleetbench.profile import profile_of, table_for
from fleetbench.strategy import ASyncConfigs, DistributedStrategy
from fleetbench.workload import LAYERS
from sim.many.objective import StepTime
from sim.run import simulate
from tuner.search import StepS, Tried, search
from tuner.space import Equivalence, Space, parameters_of, search_space

RANKED_STEPS = 10
"""Counted steps of one trial: ten rank strategies as fifty do."""
FINAL_STEPS = 50
"""Counted steps of one simulation of the best."""
WARMUP_STEPS = 2
MERGED = (4, 16)
"""Gradients of one push, in the asynchronous mode."""
MOST_COUNTED = 8
"""Points of a space, for each trial, up to which its different strategies are counted beforehand."""
SERVED_ROUNDS = 2
"""GeoSGD's exchanges in one trial."""

FUSION = ("fusion", "fuse_grad_size_in_MB", "fuse_grad_count")
HIERARCHY = ("use_hierarchical_allreduce", "hierarchical_inner_ranks", "hierarchical_variant")

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """What was tried, and what was not."""

    step_s: dict[DistributedStrategy, float]
    """Seconds of a step of different strategies, fastest first, the experiment's own among them."""
    num_trials: int
    notes: tuple[str, ...]

    @property
    def strategies(self) -> list[DistributedStrategy]:
        """Fastest first."""
        return list(self.step_s)

    def telling(self, count: int) -> list[DistributedStrategy]:
        """The best ``count`` strategies, and the best one with each value that any of the others has."""
        leaders = {value: strategy for strategy in reversed(self.strategies) for value in _values(strategy)}
        return list(dict.fromkeys([*self.strategies[:count], *leaders.values()]))


def ranked(experiment: Experiment, *, out: Path, progress: Progress | None = None) -> Ranking:
    """Try every different candidate, or as many as ``tune.trials`` allows, by Optuna. Raises ``ConfigError`` as ``simulate`` does."""
    tell = progress or (lambda *_: None)
    measure, notes, limit = step_time(shortened(experiment)), list[str](), experiment.tune.trials
    if experiment.strategy.mode == "ps":
        candidates: list[DistributedStrategy] | None = _served(experiment, notes)
    else:
        spaces = [(base, search_space(base)) for base in _bases(experiment, notes)]
        notes += search_space(experiment).notes
        few = sum(space.size for _, space in spaces) <= MOST_COUNTED * limit
        candidates = _different(experiment, [space for _, space in spaces]) if few else None
    step_s: dict[DistributedStrategy, float] = {}
    if candidates is not None and (len(candidates) <= limit or experiment.strategy.mode == "ps"):
        for done, strategy in enumerate(candidates):
            tell(done, len(candidates))
            try:
                step_s[strategy] = measure(strategy)
            except ConfigError as error:
                if strategy == experiment.strategy:
                    raise
                notes.append(f"not simulated: {error.where}: {error.what}")
        num_trials = len(step_s)
        tell(num_trials, num_trials)
    else:
        step_s, num_trials = _searched(spaces, limit, measure, out, tell)
        if experiment.strategy not in step_s:  # another that comes to the same
            step_s[experiment.strategy] = measure(experiment.strategy)
    ordered = dict(sorted(step_s.items(), key=lambda item: item[1]))
    return Ranking(step_s=ordered, num_trials=num_trials, notes=tuple(dict.fromkeys(notes)))


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
    plain, hierarchies = DistributedStrategy(), [_taken(strategy, HIERARCHY)]
    if cluster.nodes > 1 and cluster.trainers_per_node > 1 and cluster.is_even:
        on: dict[str, object] = {"use_hierarchical_allreduce": True, "hierarchical_inner_ranks": strategy.hierarchical_inner_ranks}
        hierarchies = [_taken(plain, HIERARCHY), *({**on, "hierarchical_variant": variant} for variant in ("leader", "reduce_scatter"))]
    fusions = [_taken(strategy, FUSION)]
    if strategy.fuse_all_reduce_ops and strategy.fusion == "fleet":
        fusions += [{**_taken(plain, FUSION), "fusion": rule} for rule in ("merged_gradient", "optimal")]
    for hierarchy in hierarchies:
        for fusion in fusions:
            changes = hierarchy | fusion
            try:
                yield experiment.replace(strategy=strategy.replace(**changes))
            except ConfigError as error:
                notes.append(f"not tried: {', '.join(f'{name} = {value}' for name, value in changes.items())}: {error.what}")


def _taken(strategy: DistributedStrategy, names: tuple[str, ...]) -> dict[str, object]:
    return {name: getattr(strategy, name) for name in names}


def _different(experiment: Experiment, spaces: list[Space]) -> list[DistributedStrategy]:
    """The experiment's own, and what differs from it; of equal ones the one that changes least, with the largest cap of a bucket."""
    same = Equivalence(experiment)
    own = _values(experiment.strategy)
    points = [space.strategy(point) for space in spaces for point in space.points()]
    points.sort(key=lambda strategy: (sum(map(operator.ne, own, _values(strategy))), -strategy.fuse_grad_size_in_MB))
    found = {same.key(experiment.strategy): experiment.strategy}
    for strategy in points:
        found.setdefault(same.key(strategy), strategy)
    return list(found.values())


def _searched(
    spaces: list[tuple[Experiment, Space]], limit: int, measure: StepS, out: Path, progress: Progress
) -> tuple[dict[DistributedStrategy, float], int]:
    """Seconds of a step and the number of trials: a search of its own around each base, which share the trials."""
    found: dict[str, Tried] = {}
    num_trials = 0
    for number, (base, space) in enumerate(spaces):
        progress(number, len(spaces))
        part = base.replace(tune=dataclasses.replace(base.tune, trials=max(2, limit // len(spaces))))
        searched = search(part, space, base.strategy, out=out, step_s=measure).tried
        num_trials += len(searched)
        found = {tried.key: tried for tried in reversed(searched)} | found  # the first stays
    return {tried.strategy: tried.trial.simulated_s for tried in found.values()}, num_trials


def _values(strategy: DistributedStrategy) -> list[tuple[str, object]]:
    """What the candidates differ in."""
    names = ("use_hierarchical_allreduce", "hierarchical_variant", "fusion", "a_sync", "a_sync_configs")
    return [*parameters_of(strategy).items(), *((name, getattr(strategy, name)) for name in names)]


def _geo_steps(experiment: Experiment) -> tuple[int, ...]:
    """K of GeoSGD: those of ``tune.local_steps`` above 1."""
    return tuple(k for k in experiment.tune.local_steps if k > 1) if experiment.workload.optimizer == "sgd" else ()


def _served(experiment: Experiment, notes: list[str]) -> list[DistributedStrategy]:
    """Synchronous, asynchronous with pushes of several gradients, and GeoSGD, the experiment's own strategy first.

    A trainer that is silent for ``send_wait_times`` pauses sends what it has; so that K and merging mean anything, there are as
    many pauses as one and a half steps' compute take.
    """
    strategy, table = experiment.strategy, table_for(experiment)
    own = strategy.a_sync_configs
    pauses = max(own.send_wait_times, math.ceil(1.5 * (table.forward_ns + table.backward_ns) / WAIT_NS))
    modes: list[dict[str, Any]] = [{"k_steps": 0, "max_merge_var_num": 1}]
    modes += [{"k_steps": 0, "max_merge_var_num": merged, "send_wait_times": pauses} for merged in MERGED]
    modes += [{"k_steps": k_steps, "send_wait_times": pauses} for k_steps in _geo_steps(experiment)]
    notes.append("what staleness, or K steps between two exchanges, costs in loss is not simulated")
    if not _geo_steps(experiment):
        notes.append(f"GeoSGD is not tried: it is for SGD, and workload.optimizer is {experiment.workload.optimizer}")
    found = [strategy, strategy.replace(a_sync=False, a_sync_configs=ASyncConfigs())]
    found += [strategy.replace(a_sync=True, a_sync_configs=dataclasses.replace(own, **mode)) for mode in modes]
    return list(dict.fromkeys(found))


OUTSIDE = (
    "outside of this answer: sharded optimizers, tensor and pipeline parallelism; every trainer holds the whole model, its gradients and "
    "its optimizer's state"
)


def with_compute(experiment: Experiment, out: Path) -> Experiment:
    """The experiment with its layer times known: as declared, from its profile, or estimated for its ``cluster.gpu``, below ``out``.

    Raises ``ConfigError`` where nothing tells them, for nothing is measured here.
    """
    workload, gpu = experiment.workload, experiment.cluster.gpu
    if workload.model == LAYERS or workload.profile is not None:
        return experiment
    if gpu is not None:
        from real.estimate.step import estimated

        return estimated(experiment, gpu, out)
    hint = "estimate them: fleetbench estimate EXPERIMENT.toml --gpu H100; name a cluster.gpu; or a workload.profile that was measured"
    raise ConfigError("the model's layer times are not known, and --simulate-only measures nothing", "workload.profile", hint=hint)


def says(experiment: Experiment) -> str:
    """Where the layer times of an experiment with known compute come from, in words."""
    profile = profile_of(experiment)
    return "declared compute" if profile is None else profile.compute


def fits(experiment: Experiment) -> bool | None:
    """Whether a trainer's memory suffices, with the copies that local steps keep; none where its need or the GPU is not known."""
    profile, gpu = profile_of(experiment), experiment.cluster.gpu
    if profile is None or profile.memory is None or gpu is None:
        return None
    needed = profile.memory.peak + Combination.of(experiment.strategy).num_copies * profile.memory.parameters
    return needed <= gpu_named(gpu, "cluster.gpu").memory


def samples_and_tokens(experiment: Experiment, step_s: float) -> tuple[float, float | None]:
    """Of all trainers together, a second; tokens where ``workload.data_options`` says how many a sample has."""
    samples_per_s = experiment.cluster.trainers * experiment.workload.batch_size / step_s
    length = experiment.workload.data_options.get("length")
    return samples_per_s, samples_per_s * length if isinstance(length, int) else None
