"""Scenario: everything that a simulated run depends on, including delays. Refuses what is not simulated."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from fleetbench.cluster import Cluster
from fleetbench.cores import on_cores, shares_cores
from fleetbench.declared import LOSSES, UNFOLLOWED, DeclaredScalars, refuse_undeclared
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.hardware import gpu_named
from fleetbench.plan.build import Plan, Setting, build_plan
from fleetbench.plan.combination import Combination
from fleetbench.plan.groups import queue_depth
from fleetbench.plan.layers import LayerTable
from fleetbench.plan.memory import trainer_bytes
from fleetbench.plan.state import State
from fleetbench.plan.training import PLANNED, CollectiveTraining, family
from fleetbench.profile import all_reduce_cost, profile_of, table_for
from fleetbench.quantities import Bytes
from fleetbench.result import skip, skipped_by_layers
from fleetbench.stragglers import LARGEST, ONE, Episode, Integers, draws
from fleetbench.support import RUN, WORKLOAD, refuse_unexecuted
from fleetbench.workload import LAYERS, OPTIMIZER_STATE
from sim.learning.trajectory import Trajectory
from sim.limits import refuse_large
from sim.network.links import Links

MOST_KEPT = 2**22
"""Largest number of delays that are drawn at once and kept. Kept delays are reused for other strategies."""
_CLUSTER = """
nodes trainers_per_node nics_per_node intra inter collective measured host_bandwidth cores_per_node gpu racks sites
node_overrides stragglers churn
"""
CLUSTER = frozenset(f"cluster.{name}" for name in _CLUSTER.split())
_WORKLOAD = WORKLOAD | LOSSES


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A resolved experiment, as an engine executes it."""

    table: LayerTable
    plan: Plan
    strategy: CollectiveTraining
    links: Links
    scalars: DeclaredScalars | Trajectory
    steps: range
    """Numbers of the warm-up and counted steps; the counted ones start at 1."""
    steps_per_epoch: int | None
    draws: Draws
    """Delays X of every rank and step."""
    fetch_every: int = 1
    """Number of steps between two times at which the host reads results back."""

    @classmethod
    def of(
        cls, experiment: Experiment, spared: Collection[int] = (), table: LayerTable | None = None, learnt: Trajectory | None = None
    ) -> Scenario:
        """Resolve an experiment. No straggler delays the ranks ``spared``.

        ``table``: the experiment's layer table, if it was looked up before. ``learnt``: results of the
        experiment's virtual trainers; their scalars replace those that the experiment declares.

        Raises ``ConfigError`` for a field that is not simulated, a run that is too large, or a missing
        profile, link or loss.
        """
        for part, executed in (("strategy", PLANNED), ("workload", _WORKLOAD), ("cluster", CLUSTER), ("run", RUN)):
            refuse_unexecuted(getattr(experiment, part), part, executed, "the simulator")
        if learnt is None:
            refuse_undeclared(experiment, experiment.strategy, "the simulator")
        refuse_large(experiment)
        table = table or on_cores(experiment, table_for(experiment))
        cluster, run, strategy = experiment.cluster, experiment.run, experiment.strategy
        plan = build_plan(strategy, table.by_readiness(), setting_of(experiment, table))
        steps = range(1 - run.warmup_steps, experiment.workload.steps + 1)
        return cls(
            table=table,
            plan=plan,
            strategy=family(strategy, plan),
            links=Links.of(experiment),
            scalars=learnt or DeclaredScalars(experiment.workload),
            steps=steps,
            steps_per_epoch=learnt.steps_per_epoch if learnt else experiment.workload.steps_per_epoch,
            draws=Draws(cluster=cluster, seed=run.seed, steps=steps, spared=tuple(spared)),
            fetch_every=strategy.fetch_every_n_steps,
        )

    def scalar(self, name: str, rank: int, state: State) -> float:
        """Return a scalar that a rank observes in the current step of ``state``.

        Raises ``ConfigError`` for a scalar without a declaration.
        """
        assert state.step is not None
        counts_updates = name == "lr" and self.strategy.combination.lr_counts_updates
        return self.scalars.scalar(name, rank, state.updates if counts_updates else state.step)


def setting_of(experiment: Experiment, table: LayerTable) -> Setting:
    """Return the setting of an experiment's plan.

    Raises ``ConfigError`` for a link that trainers use but that is neither declared nor measured.
    """
    cluster = experiment.cluster
    return Setting(
        trainers=cluster.trainers,
        trainers_per_node=cluster.trainers_per_node,
        queue_depth=queue_depth(experiment.run.backend),
        holds_scatters=experiment.transport == "gloo",
        is_scripts=experiment.run.launcher == "command",
        cost=all_reduce_cost(experiment, table),
        num_state_slots=len(Combination.of(experiment.strategy).slots(OPTIMIZER_STATE[experiment.workload.optimizer])),
        buffers_nbytes=table.buffers_nbytes,
        averaged_nbytes=table.averaged_nbytes,
        order=tuple(gradient.name for layer in table.layers for gradient in layer.gradients),
    )


def not_realised(experiment: Experiment, *, learnt: bool = False) -> list[dict[str, str]]:
    """Return notes on parts of the experiment that a simulated run leaves out."""
    workload, cluster, strategy = experiment.workload, experiment.cluster, experiment.strategy
    profile = None if workload.model == LAYERS else profile_of(experiment)
    measured = None if profile is None else profile.communication
    served, curve, local = strategy.mode == "ps", workload.loss_curve, strategy.localsgd_configs
    found = [skip("measured layer times", profile.compute)] if profile is not None and profile.estimated is not None else []
    if workload.target_loss is not None and not learnt and (served or curve is None):
        unknown = "no loss is simulated, so final_loss and time_to_target_s are null: --loss trains"
        found.append(skip("workload.target_loss", unknown if curve is None else UNFOLLOWED))
    found += skipped_by_layers(workload, strategy)
    is_cored = cluster.cores_per_node != type(cluster)().cores_per_node and cluster.gpu is None and not shares_cores(experiment)
    is_unheard = not served and cluster.host_bandwidth is not None and cluster.collective != "gloo"
    unknown_cost = strategy.quantises and (measured is None or not measured.quantise)
    left_out = (
        (is_cored, "cluster.cores_per_node", "layer times that are declared, or of a device or a testbed, do not depend on it"),
        (
            served and cluster.intra,
            "cluster.intra",
            "trainers have no collectives; messages to a server on the same host take no time",
        ),
        (
            served and cluster.server_placement == "shared",
            "cluster.server_placement",
            "servers share the nodes' links; their use of the trainers' cores is left out",
        ),
        *_unlimited(cluster, served=served),
        (served and cluster.collective != "ring", "cluster.collective", "trainers have no collectives"),
        (is_unheard, "cluster.host_bandwidth", 'copies and sums of collectives take time only with collective = "gloo"'),
        (unknown_cost, "strategy.localsgd_configs.outer_wire", "quantising takes no time in the simulation: no profile has measured it"),
        (local.outer_on_host, "strategy.localsgd_configs.outer_on_host", "its copies are not simulated"),
        (experiment.run.environment, "run.environment", "no process is started"),
        (cluster.churn, "cluster.churn", "the steps are those of an undisturbed run; goodput has figures of its own"),
    )
    return found + [skip(name, why) for is_set, name, why in left_out if is_set]


def memory_of(experiment: Experiment, plan: Plan) -> dict[str, int] | None:
    """Return a trainer's bytes of memory by content (``trainer_bytes``); ``None`` if no profile gives them.

    A profile's memory belongs to its first table. If the strategy recomputes and has its own table, the
    activations are those that this table keeps, plus those of the largest block while a block's backward
    runs.
    """
    profile = None if experiment.workload.model == LAYERS else profile_of(experiment)
    if profile is None or profile.memory is None:
        return None
    first, own, memory = profile.tables[0], table_for(experiment), profile.memory
    if experiment.strategy.recompute and own.key != first.key:
        blocks = [f"{name}." for name in experiment.strategy.recompute_configs.checkpoints]
        within = [sum(layer.activation_bytes for layer in first.layers if f"{layer.name}.".startswith(block)) for block in blocks]
        saved = sum(one.activation_bytes - other.activation_bytes for one, other in zip(first.layers, own.layers, strict=True))
        saved -= max(within, default=0)
        memory = replace(memory, activations=Bytes(memory.activations - saved), peak=Bytes(memory.peak - saved))
    return trainer_bytes(memory, plan, Combination.of(experiment.strategy))


def short_of_memory(experiment: Experiment, needed: int | None) -> list[dict[str, str]]:
    """Return a note if a trainer's GPU has less memory than it needs, and both are known."""
    if needed is None or experiment.cluster.gpu is None:
        return []
    has = gpu_named(experiment.cluster.gpu, "cluster.gpu").memory
    why = f"the strategy needs {needed / 1e9:.3g} GB per trainer, and the GPU has {has / 1e9:.3g} GB: it would not run"
    return [skip("cluster.gpu", why)] if needed > has else []


def _unlimited(cluster: Cluster, *, served: bool) -> Iterator[tuple[bool, str, str]]:
    """Yield for each link whether its limit per connection is ignored, the limit's field, and the reason."""
    if not served and cluster.collective != "measured" and not cluster.collective.startswith("nccl-"):
        return
    why = "messages of servers and of NCCL, and measured all-reduces, use the interface's full bandwidth"
    overrides = [(f"cluster.node_overrides[{index}]", own.intra, own.inter) for index, own in enumerate(cluster.node_overrides)]
    for place, *links in (("cluster", cluster.intra, cluster.inter), *overrides):
        for kind, link in zip(("intra", "inter"), links, strict=True):
            yield link is not None and link.flow_limit is not None, f"{place}.{kind}.flow_limit", why
            yield link is not None and bool(link.loss), f"{place}.{kind}.loss", why


@dataclass(slots=True, kw_only=True)
class Draws:
    """Delays of the trainers of one run. X is in units of 2^-24. No straggler delays the ranks ``spared``."""

    cluster: Cluster
    seed: int
    steps: range
    spared: tuple[int, ...] = ()
    _kept: tuple[int, Integers] = field(init=False, default=(0, np.zeros((0, 0), dtype=np.int64)), repr=False, compare=False)
    """Index of the first drawn step, and the rows of the drawn steps."""

    def of_ranks(self) -> Integers:
        """Return X of all steps, shape ``(trainers, num_steps)``.

        Raises as ``fleetbench.stragglers.draws`` does.
        """
        return self._drawn(self.steps)

    def rows(self, begin: int, end: int) -> Integers:
        """Return X of the steps with indices from ``begin`` to ``end``, which is excluded.

        The shape is ``(end - begin, trainers)``, contiguous by step. Steps after them are drawn in advance. All steps
        are drawn at once if they are few, or if delays depend on earlier steps.
        """
        first, rows = self._kept
        if begin < first or end > first + len(rows):
            ahead = max(end - begin, MOST_KEPT // self.cluster.trainers)
            if ahead >= len(self.steps) or any(isinstance(straggler, Episode) for straggler in self.cluster.stragglers):
                begin_drawn, ahead = 0, len(self.steps)
            else:
                begin_drawn = begin
            self._kept = first, rows = begin_drawn, np.ascontiguousarray(self._drawn(self.steps[begin_drawn : begin_drawn + ahead]).T)
        return rows[begin - first : end - first]

    def _drawn(self, steps: range) -> Integers:
        cluster = self.cluster
        found = draws(cluster.stragglers, self.seed, cluster.trainers, cluster.node_by_rank, steps.start, len(steps))
        found[list(self.spared)] = 0
        factors = np.array([cluster.slowdown(node) for node in range(cluster.nodes)])
        return found if (factors == 1.0).all() else _times(found, np.repeat(factors, cluster.trainers_by_node)[:, None])


def _times(delays: Integers, factors: npt.NDArray[np.float64]) -> Integers:
    """Return X for which 1 + X is ``factors`` times as large, rounded.

    A node's ``slowdown`` s makes 1 + X of its ranks s (1 + X). Raises ``ConfigError`` if 1 + X exceeds a
    million.
    """
    product = (delays + ONE) * factors
    if product.max(initial=0.0) > LARGEST * ONE:
        what = "makes a step take more than a million times its own compute"
        value = f"{product.max() / ONE:.3g} times"
        raise ConfigError(what, "cluster.node_overrides", value, "slowdown and stragglers multiply: lower the slowdown")
    return np.rint(product).astype(np.int64) - ONE
