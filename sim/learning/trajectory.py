"""Trajectory: the results of virtual trainers as the simulator reads them, and their key.

The results depend on the updates and their order, not on the clock. From the cluster, the key contains only
the numbers of trainers, servers, and ranks per node of the hierarchy; from the strategy, only what changes an
update. Experiments that differ in bandwidths, stragglers or fusion share one trajectory, unless this reorders
updates on parameter servers.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fleetbench.cluster import Cluster
from fleetbench.config import encode
from fleetbench.declared import learning_rate
from fleetbench.digests import digest_of, json_digest
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment, Run
from fleetbench.fields import named
from fleetbench.plan.servers.rules import SERVED
from fleetbench.store import versions
from fleetbench.support import WORKLOAD, refuse_unexecuted
from fleetbench.target import Crossing, crossing
from fleetbench.workload import LAYERS, Workload
from sim.servers.actor import Order

WHO = "virtual trainers"
"""Name of the source of the losses, in summaries."""

CLOCK = named("plan clock")
"""Names of the strategy's fields that change when something happens but, except for rounding, not what is learnt."""
LEARNT = named("virtual")
"""Names of the strategy's fields that virtual trainers execute. An error names a changed field that is in
neither set."""
_UNLEARNT = ("profile", "layers", "host", "loss_curve", "target_loss")
"""Workload fields that do not affect what is learnt."""


def learnt_from(experiment: Experiment) -> Experiment:
    """Return the experiment with only the settings that affect what virtual trainers learn.

    Raises ``ConfigError`` for settings that they do not execute.
    """
    workload, cluster, strategy = experiment.workload, experiment.cluster, experiment.strategy
    who = "the simulator's training by virtual trainers"
    if workload.model == LAYERS:
        hint = "choose a registry model such as digits_mlp, or declare workload.loss_curve and leave --loss out"
        raise ConfigError("a table of layers has no parameters to train", "workload.model", repr(LAYERS), hint)
    hint = "leave it at its default, or leave --loss out"
    refuse_unexecuted(strategy, "strategy", SERVED if strategy.mode == "ps" else LEARNT | CLOCK, who, hint)
    if strategy.sharding and strategy.is_local:
        raise ConfigError(f"{who} knows no sharded workers", "strategy.sharding", "true", hint)
    kept = strategy.without(*CLOCK)
    refuse_unexecuted(workload, "workload", WORKLOAD | {"workload.loss_curve"}, who, hint)
    inner = kept.hierarchical_inner_ranks or cluster.trainers_per_node if kept.use_hierarchical_allreduce else cluster.trainers
    defaults = Workload()
    return Experiment(
        name="learnt",
        workload=dataclasses.replace(workload, **{name: getattr(defaults, name) for name in _UNLEARNT}),
        cluster=Cluster(nodes=cluster.trainers // inner, trainers_per_node=inner, servers=cluster.servers),
        strategy=kept.replace(hierarchical_inner_ranks=0),
        run=Run(seed=experiment.run.seed, warmup_steps=experiment.run.warmup_steps),
    )


def key_of(experiment: Experiment, order: Order | None = None) -> str:
    """Return 16 hexadecimal digits over all that a trajectory depends on, including data and torch's version.

    ``order``: the acts of a job with parameter servers, whose order depends on the clock. Of an ``imagenet:``
    folder only the path counts, not the contents.
    """
    canonical = learnt_from(experiment)
    kind, _, path = canonical.workload.data.partition(":")
    data = encode(canonical)
    if kind == "text":
        data["workload"]["data"] = digest_of(Path(path), "the experiment names this file")
    data |= {"torch": versions().get("torch"), "order": None if order is None else order.digest()}
    return json_digest(data)[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Results of one training run.

    The simulator also reads scalars from it, so that the strategy observes the same values again.
    """

    key: str
    workload: Workload
    first_step: int
    """Step of the first row of ``losses``, below 1 with a warm-up; each row is one step."""
    losses: npt.NDArray[np.float64]
    """Loss of every trainer's batch, ``(steps, trainers)``."""
    observed: Mapping[str, Mapping[int, float]]
    """Scalars that the strategy observed, by name and step: ``loss``, the mean over trainers, ``found_inf``,
    or ``lr``."""
    held_out: tuple[tuple[int, float], ...]
    """Step and loss of every evaluation, at the mean of all trainers' parameters."""
    final_loss: float
    """Held-out loss after the last averaging."""
    local_steps: tuple[int | None, ...]
    """Number of updates in the round that each step ended; ``None`` for a step that ended no round."""
    steps_per_epoch: int
    way: str
    """Method of computing gradients: ``loop`` or ``graph``, on a GPU followed by ``on cuda``."""
    num_bytes: int
    """Largest memory that the training run was expected to take, in bytes."""
    seconds: float

    def scalar(self, name: str, rank: int, step: int) -> float:  # noqa: ARG002  # observed alike by all ranks
        """See ``fleetbench.declared.DeclaredScalars.scalar``."""
        return learning_rate(self.workload, step) if name == "lr" else self.observed[name][step]

    def declared_loss(self, step: int) -> float:
        """Return the trainers' mean loss at a step."""
        return float(self.losses[step - self.first_step].mean())

    def crossing(self, target: float | None) -> Crossing | None:
        """Return the point at which the held-out loss reaches ``target``; ``None`` if it does not."""
        return crossing(self.held_out, target)


Learn = Callable[[Experiment], Trajectory]
"""Function that returns the trajectory of an experiment, which several simulations may share."""
