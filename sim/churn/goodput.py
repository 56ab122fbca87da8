"""Goodput: useful samples of a job on nodes that leave and come back, over the seconds and money spent.

A step with n nodes takes as long as in the simulation of the experiment with n nodes. A node's batch stays, so
that fewer nodes have a smaller global batch. Samples count as equal, whatever K and the global batch are.
"""

import dataclasses
import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fleetbench import units
from fleetbench.churn import LONGEST, Churn
from fleetbench.config import Config
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment, HierarchySwitchedOff
from fleetbench.plan.combination import OUTSIDE, Combination
from fleetbench.plan.rounds import Constant
from fleetbench.plan.sharding import degree_of
from fleetbench.quantities import hours_or_days
from sim.churn.availability import Availability, availability
from sim.churn.intervals import daly
from sim.churn.job import CAUSES, Job, Kind, Policy
from sim.many.objective import StepTime
from sim.many.pool import naming
from sim.many.seeds import Interval

SEEDS = 8
"""Number of simulations with different draws. A trace has one."""
CONFIDENCE = 0.90
KINDS: tuple[Kind, ...] = ("synchronous", "elastic")
PER_SAMPLES = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput(Config):
    """Result of one strategy under one policy; means over seeds."""

    policy: Kind
    rejoin: str
    interval_s: float
    """Seconds of training between two checkpoints."""
    local_steps: int
    """Number of steps per round, K."""
    samples_per_s: float
    """Useful samples per second of the simulated time."""
    interval: tuple[float, ...]
    """Ends of the 90 % interval of the mean ``samples_per_s``; both equal it with a trace."""
    by_seed: tuple[float, ...]
    """``samples_per_s`` with each seed."""
    share: float
    """Useful samples per paid second of a trainer, as a share of those of an undisturbed trainer."""
    spent: dict[str, float]
    """Share of the paid time by cause; ``sim.churn.job.CAUSES``."""
    samples: float
    """Useful samples of one simulation."""
    wall_s: float
    """Simulated seconds."""
    paid_trainer_s: float
    """Seconds that are paid for, summed over trainers: those of every node that is there, whatever it does."""
    price: float | None
    """Price of a million useful samples; None without ``tune.price_per_trainer_hour``."""

    @property
    def idle(self) -> str:
        """Shares of the paid time that bring no sample, the largest first, in words."""
        causes = sorted((share, cause) for cause, share in self.spent.items() if cause != "useful" and share >= 0.0005)
        return ", ".join(f"{cause.replace('_', ' ')} {units.percent(share)}" for share, cause in reversed(causes)) or "nothing"

    @property
    def every(self) -> str:
        """Interval between two checkpoints, in words."""
        return units.seconds(self.interval_s) if self.interval_s < 3600 else hours_or_days(self.interval_s / 3600)


@dataclass(slots=True)
class RoundTimes:
    """Time of a round by number of nodes, from simulations of the experiment with so many nodes.

    Up to 7 nodes, every number is simulated; above, the numbers with three significant binary digits and the
    cluster's own, and others are interpolated.
    """

    experiment: Experiment
    steps: int = field(init=False)
    """Number of steps per round."""
    _known: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for an experiment whose rounds vary, or whose nodes differ in size."""
        strategy, cluster = self.experiment.strategy, self.experiment.cluster
        combination = Combination.of(strategy)
        if strategy.mode == "ps" or not isinstance(combination.rounds, Constant):
            hint = "use collectives with a fixed K, or leave cluster.churn out"
            raise ConfigError("is simulated for collective training with rounds of one length only", "cluster.churn", strategy.mode, hint)
        cluster.require_even("nodes that leave and come back have as many trainers each")
        self.steps = combination.steps_per_round

    def __call__(self, nodes: int) -> int:
        """Return the time of a round in ns. Raises what the simulation of so many nodes raises."""
        if nodes not in self._known:
            unit = 1 << max(0, nodes.bit_length() - 3)
            low, high = nodes // unit * unit, min(-(-nodes // unit) * unit, self.experiment.cluster.nodes)
            if nodes in (low, high):
                self._known[nodes] = self._simulated(nodes)
            else:
                self._known[nodes] = round(self(low) + (self(high) - self(low)) * (nodes - low) / (high - low))
        return self._known[nodes]

    def _simulated(self, nodes: int) -> int:
        workload = self.experiment.workload
        longer = dataclasses.replace(workload, steps=max(workload.steps, OUTSIDE + self.steps))
        with naming(f"with {nodes} of {self.experiment.cluster.nodes} nodes"):
            step_s = StepTime(with_nodes(self.experiment.replace(workload=longer), nodes))(self.experiment.strategy)
        return max(1, round(step_s * self.steps * 1e9))

    @property
    def samples(self) -> int:
        """Number of samples of a node in a round."""
        return self.steps * self.experiment.workload.batch_size * self.experiment.cluster.trainers_per_node


def with_nodes(experiment: Experiment, nodes: int) -> Experiment:
    """Return the experiment with its first ``nodes`` nodes, and without churn."""
    cluster = experiment.cluster
    most = {"nodes": nodes, "ranks": nodes * cluster.trainers_per_node}

    def kept(entries: Sequence[Any]) -> tuple[Any, ...]:
        """Return overrides or stragglers without the nodes and ranks that are missing."""
        found = []
        for entry in entries:
            left = {name: tuple(n for n in getattr(entry, name) if n < least) for name, least in most.items() if hasattr(entry, name)}
            found += [dataclasses.replace(entry, **left)] if all(left.values()) else []
        return tuple(found)

    overrides, stragglers = kept(cluster.node_overrides), kept(cluster.stragglers)
    fewer = dataclasses.replace(cluster, nodes=nodes, churn=None, node_overrides=overrides, stragglers=stragglers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HierarchySwitchedOff)
        return experiment.replace(cluster=fewer)


def availabilities(experiment: Experiment) -> list[Availability]:
    """Return the nodes that are there, with each seed; one for a trace. Raises ``ConfigError`` without churn."""
    churn, first = experiment.cluster.churn, experiment.run.seed
    if churn is None:
        raise ConfigError("is missing", "cluster.churn", hint='for example cluster.churn = { mean_up = "6 h", ... }')
    return [availability(churn, experiment.cluster.nodes, seed) for seed in range(first, first + (1 if churn.trace else SEEDS))]


def failures(churn: Churn, available: Sequence[Availability], kind: Kind, rejoin: str) -> tuple[int, float]:
    """Return the number of failures that the policy does not survive, and the mean time between them in ns.

    Without a failure, the mean time is the simulated time: what was not seen may happen once.
    """
    is_elastic = kind == "elastic"
    join_ns = churn.join_ns if is_elastic else 0 if rejoin == "checkpoint" else LONGEST
    number = sum(one.failures(of_all=is_elastic, join_ns=join_ns, least_nodes=churn.least_nodes) for one in available)
    return number, sum(one.end_ns for one in available) / max(1, number)


def survives_loss(experiment: Experiment) -> bool:
    """Whether the trainers that remain after the loss of a node have the whole state: it is not sharded over nodes."""
    strategy, cluster = experiment.strategy, experiment.cluster
    return not strategy.sharding or cluster.trainers_per_node % degree_of(strategy.sharding_configs, cluster.trainers) == 0


def goodput(times: RoundTimes, available: Sequence[Availability], policy: Policy) -> Goodput:
    """Return the goodput of the experiment of ``times`` under a policy. Raises as ``RoundTimes`` does."""
    experiment = times.experiment
    churn, cluster, price = experiment.cluster.churn, experiment.cluster, experiment.tune.price_per_trainer_hour
    assert churn is not None
    jobs = [Job(churn, one, times, policy) for one in available]
    for job in jobs:
        job.run()
    wall_s = statistics.fmean(one.end_ns for one in available) / 1e9
    spent = {cause: statistics.fmean(job.spent_ns[cause] for job in jobs) / 1e9 for cause in CAUSES}
    paid_s = math.fsum(spent.values()) * cluster.trainers_per_node
    by_seed = tuple(job.useful_rounds * times.samples / (job.available.end_ns / 1e9) for job in jobs)
    samples = statistics.fmean(job.useful_rounds for job in jobs) * times.samples
    over_seeds = Interval.of(by_seed, CONFIDENCE)
    undisturbed = times.samples * 1e9 / times(cluster.nodes) / cluster.trainers_per_node
    return Goodput(
        policy=policy.kind,
        rejoin=policy.rejoin,
        interval_s=policy.interval_ns / 1e9,
        local_steps=times.steps,
        samples_per_s=over_seeds.mean,
        interval=(over_seeds.low, over_seeds.high),
        by_seed=by_seed,
        share=samples / paid_s / undisturbed if paid_s else 0.0,
        spent={cause: seconds * cluster.trainers_per_node / paid_s if paid_s else 0.0 for cause, seconds in spent.items()},
        samples=samples,
        wall_s=wall_s,
        paid_trainer_s=paid_s,
        price=price * paid_s / 3600 / samples * PER_SAMPLES if price is not None and samples else None,
    )


def goodputs(experiment: Experiment) -> list[Goodput]:
    """Return the goodput of the experiment's strategy under each policy that it allows, at the declared interval.

    Raises ``ConfigError`` for what cannot be simulated.
    """
    available, times, churn = availabilities(experiment), RoundTimes(experiment), experiment.cluster.churn
    assert churn is not None
    found = []
    for kind in KINDS if survives_loss(experiment) else KINDS[:1]:
        by_daly = daly(churn.checkpoint_time, failures(churn, available, kind, churn.rejoin)[1])
        interval_ns = by_daly if churn.checkpoint_interval is None else int(churn.checkpoint_interval)
        found.append(goodput(times, available, Policy(kind=kind, interval_ns=interval_ns, rejoin=churn.rejoin)))
    return found
