"""Scenario: all that a simulated run depends on, or the refusal of what is not simulated yet."""

from __future__ import annotations

from dataclasses import dataclass

from fleetbench.cluster import Link
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.build import Plan, build_plan
from fleetbench.plan.family import PLANNED, family
from fleetbench.plan.layers import LayerTable
from fleetbench.plan.protocol import Strategy
from fleetbench.profile import Profile, links_for, table_for
from fleetbench.result import skip
from fleetbench.stragglers import draws
from fleetbench.support import refuse_unexecuted
from fleetbench.workload import LAYERS

WORKLOAD = frozenset(
    f"workload.{name}"
    for name in (
        "model",
        "model_options",
        "data",
        "dtype",
        "batch_size",
        "steps",
        "steps_per_epoch",
        "uneven_data",
        "optimizer",
        "lr",
        "momentum",
        "weight_decay",
        "lr_decay",
        "target_loss",
        "eval_every",
        "profile",
        "layers",
    )
)
"""Fields of a workload that are executed, are part of the layer table's key, or leave the clock alone."""

CLUSTER = frozenset(f"cluster.{name}" for name in ("nodes", "trainers_per_node", "intra", "inter", "cores_per_node", "stragglers"))

RUN = frozenset(
    f"run.{name}" for name in ("seed", "device", "backend", "launcher", "port", "warmup_steps", "startup_timeout", "timeout", "environment")
)
"""A simulated run starts no process: all but the seed and the warm-up say what the layer table was measured with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What an engine executes."""

    table: LayerTable
    plan: Plan
    strategy: Strategy
    trainers_per_node: int
    intra: Link | None
    inter: Link | None
    steps: range
    """Warm-up and counted steps; the counted ones start at 1."""
    draws: tuple[tuple[int, ...], ...]
    """X in units of 2^-24, by rank and step."""

    @classmethod
    def of(cls, experiment: Experiment, profile: Profile | None = None) -> Scenario:
        """Resolve an experiment. Raises ``ConfigError`` for a field that is not simulated, or a missing profile or link."""
        _refuse(experiment)
        table = table_for(experiment, profile)
        if table.contention:
            raise ConfigError(
                "the simulator does not execute this field yet",
                "profile.tables.contention",
                repr(table.contention),
                "set contention = 0 in the profile",
            )
        cluster, run = experiment.cluster, experiment.run
        intra, inter = links_for(experiment, profile)
        plan = build_plan(experiment.strategy, table.by_readiness(), cluster.trainers)
        steps = range(1 - run.warmup_steps, experiment.workload.steps + 1)
        delays = draws(cluster.stragglers, run.seed, cluster.trainers, cluster.trainers_per_node, steps.start, len(steps))
        return cls(
            table=table,
            plan=plan,
            strategy=family(experiment.strategy, plan),
            trainers_per_node=cluster.trainers_per_node,
            intra=intra,
            inter=inter,
            steps=steps,
            draws=tuple(map(tuple, delays.tolist())),
        )


def _refuse(experiment: Experiment) -> None:
    for part, executed in (("strategy", PLANNED), ("workload", WORKLOAD), ("cluster", CLUSTER), ("run", RUN)):
        refuse_unexecuted(getattr(experiment, part), part, executed, "the simulator")


def not_realised(experiment: Experiment) -> list[dict[str, str]]:
    """Lines of the experiment that a simulated run leaves out without being wrong about time."""
    workload, cluster = experiment.workload, experiment.cluster
    found = []
    if workload.target_loss is not None:
        found.append(skip("workload.target_loss", "the simulator has no losses yet: final_loss and time_to_target_s are null"))
    if experiment.strategy.thread_num != 1 and workload.model == LAYERS:
        found.append(skip("strategy.thread_num", "declared layer times do not depend on threads"))
    if cluster.cores_per_node != type(cluster)().cores_per_node:
        found.append(skip("cluster.cores_per_node", "layer times already hold what trainers of a node share"))
    if cluster.intra is None and cluster.trainers_per_node > 1:
        found.append(skip("cluster.intra", "not declared: as the profile measured it in the training loop"))
    if experiment.run.environment:
        found.append(skip("run.environment", "no process is started"))
    return found
