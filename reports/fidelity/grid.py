"""The grid, fixed before anything is measured: workloads, strategies, environments, and which strategies calibrate.

Three factors of three levels each: where trainers are, how fast links are, what makes trainers late. Of the 27
combinations the Latin square ``straggler = (place + rate) mod 3`` keeps nine, in which every level of one factor meets
every level of another once. They fall into three classes of three, in each of which every level occurs once; the first
two classes are measured. No environment was chosen, or left out, for what it shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fleetbench.cluster import Cluster, Link, NodeOverride
from fleetbench.experiment import Experiment, Run
from fleetbench.quantities import BitsPerSecond, Nanoseconds, Steps
from fleetbench.stragglers import Jitter, SlowNode, SlowRank, Straggler
from fleetbench.strategy import AdaptiveLocalSGDConfigs, DistributedStrategy, GradientMergeConfigs, LocalSGDConfigs
from fleetbench.workload import LAYERS, LayerSpec, LossCurve, Workload

WARMUP = 8
"""Steps before step 1: a multiple of the merged micro-batches, so that an accumulation starts with step 1."""
ROUND = 8
"""A leg's steps are a multiple of it, and at least twice as many."""
MBIT = 10**6
RUNS = Path("runs")
"""Where a calibrated ceiling of the machine is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How thoroughly it is measured."""

    leg_s: float = 4.0
    """About how long the counted steps of a leg last."""
    calibration_s: float = 4.0
    """What a leg of a calibration may take."""
    patience_s: float = 600.0
    """How long to wait for a quiet machine; what is measured after that is void by itself."""
    needs_quiet: bool = True
    """Off, void measurements count."""


QUICK = Effort(leg_s=0.5, calibration_s=0.5, patience_s=5.0, needs_quiet=False)
"""For figures that mean nothing."""

Strategies = Mapping[str, DistributedStrategy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where trainers are, and how fast a node's link is."""

    nodes: int
    per_node: int
    rate_mbit: int

    @property
    def name(self) -> str:
        """For files and tables."""
        return f"{self.nodes}x{self.per_node}@{self.rate_mbit}"

    @property
    def trainers(self) -> int:
        """The world size."""
        return self.nodes * self.per_node

    @property
    def link(self) -> Link | None:
        """As the testbed is told to build it; none for one node."""
        return Link(bandwidth=BitsPerSecond(self.rate_mbit * MBIT)) if self.nodes > 1 else None


INSIDE = Place(nodes=1, per_node=2, rate_mbit=0)
"""Two trainers of one node, from which the way inside a node is calibrated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """One launch: every strategy runs in it, in turns."""

    name: str
    place: Place
    strategies: Strategies
    workload: Workload
    stragglers: tuple[Straggler, ...] = ()
    seed: int = 0
    slow_link: tuple[int, int] | None = None
    """A node whose link is slower than the others', and its Mbit/s."""
    steps: int | None = None
    """Counted steps of a leg; by default so many that it lasts as long as it should."""

    @property
    def calibrated_at(self) -> Place:
        """The place whose calibration predicts this one: with the slowest link everywhere, which is what holds a ring up."""
        return self.place if self.slow_link is None else dataclasses.replace(self.place, rate_mbit=self.slow_link[1])

    def experiment(self, strategy: DistributedStrategy, steps: int) -> Experiment:
        """What runs for real."""
        overrides: tuple[NodeOverride, ...] = ()
        if self.slow_link is not None:
            node, rate = self.slow_link
            overrides = (NodeOverride(nodes=(node,), inter=Link(bandwidth=BitsPerSecond(rate * MBIT))),)
        return Experiment(
            name="fidelity",
            workload=dataclasses.replace(self.workload, steps=steps),
            cluster=Cluster(
                nodes=self.place.nodes,
                trainers_per_node=self.place.per_node,
                inter=self.place.link,
                node_overrides=overrides,
                stragglers=self.stragglers,
            ),
            strategy=strategy,
            run=Run(seed=self.seed, device="emulated", launcher="testbed", warmup_steps=WARMUP),
        )


def _workload(layers: tuple[tuple[str, int, float, float, int], ...]) -> Workload:
    """Layers in forward order: name, parameters, forward and backward in ms, how many."""
    return Workload(
        model=LAYERS,
        layers=tuple(
            LayerSpec(name=name, params=params, forward=_ms(forward), backward=_ms(backward), repeat=repeat)
            for name, params, forward, backward, repeat in layers
        ),
        loss_curve=LossCurve(start=2.3, floor=0.2, half_life=Steps(6.0)),
    )


def _ms(value: float) -> Nanoseconds:
    return Nanoseconds(round(value * 1e6))


NETWORK = _workload(
    (
        ("stem", 2_000, 4.0, 8.0, 1),
        ("conv1", 4_000, 4.0, 8.0, 1),
        ("conv2", 6_000, 4.0, 8.0, 1),
        ("conv3", 9_000, 3.5, 7.0, 1),
        ("conv4", 12_000, 3.5, 7.0, 1),
        ("conv5", 15_000, 3.0, 6.0, 1),
        ("conv6", 18_000, 3.0, 6.0, 1),
        ("conv7", 22_000, 2.5, 5.0, 1),
        ("conv8", 26_000, 2.5, 5.0, 1),
        ("conv9", 30_000, 2.0, 4.0, 1),
        ("conv10", 32_000, 2.0, 4.0, 1),
        ("dense", 60_000, 1.0, 2.0, 1),
        ("head", 14_000, 1.0, 2.0, 1),
    )
)
"""1.0 MB of gradients, 36 ms forward and 72 ms backward: early layers compute, late ones hold the parameters."""
MANY = _workload((("block", 14_000, 1.0, 2.0, 40),))
"""40 layers of 56 kB, 2.2 MB of gradients, 40 ms forward and 80 ms backward."""


def _sync(mib: float, **changes: object) -> DistributedStrategy:
    return DistributedStrategy(fuse_grad_size_in_MB=mib, **changes)  # type: ignore[arg-type]  # fields by name


def _local(steps: int) -> DistributedStrategy:
    return DistributedStrategy(localsgd=True, localsgd_configs=LocalSGDConfigs(k_steps=steps))


def _in_flight(mib: float, communicators: int) -> DistributedStrategy:
    return _sync(mib, nccl_comm_num=communicators, sync_nccl_allreduce=False)


FLAT: Strategies = {
    "sync, one bucket": _sync(0.0),
    "sync, 0.5 MiB": _sync(0.5),
    "sync, 0.25 MiB": _sync(0.25),
    "sync, 0.125 MiB": _sync(0.125),
    "local, K = 1": _local(1),
    "local, K = 2": _local(2),
    "local, K = 4": _local(4),
    "local, K = 8": _local(8),
    "adaptive, K0 = 4": DistributedStrategy(
        adaptive_localsgd=True, adaptive_localsgd_configs=AdaptiveLocalSGDConfigs(init_k_steps=4, variant="paper")
    ),
    "merge, k = 4": _sync(0.25, gradient_merge=True, gradient_merge_configs=GradientMergeConfigs(k_steps=4)),
    "1 communicator, free": _in_flight(0.125, 1),
    "2 communicators": _in_flight(0.125, 2),
}
HIERARCHICAL: Strategies = {
    "hierarchical, leader": _sync(0.25, use_hierarchical_allreduce=True),
    "hierarchical, reduce-scatter": _sync(0.25, use_hierarchical_allreduce=True, hierarchical_variant="reduce_scatter"),
}
CALIBRATING = frozenset({"sync, one bucket", "local, K = 2"})
"""The link is fitted to runs of these two without stragglers; their cells count in no figure, wherever they stand."""

SHAPES = ((2, 1), (4, 1), (2, 2))
"""Nodes, and trainers of each."""
RATES_MBIT = (50, 100, 200)
LATE = ("jitter", "slow rank", "slow node")
CLASSES = (1, 2, 0)
"""(rate - place) mod 3 of the three classes, in the order in which they are measured."""
DEFAULT_CLASSES = 2


def stragglers_of(late: str, place: Place) -> tuple[Straggler, ...]:
    """The last rank is the slow one; the slow node is the first, with the leader of all."""
    if late == "jitter":
        return (Jitter(distribution="lognormal", mean=0.2, cv=1.0),)
    if late == "slow rank":
        return (SlowRank(ranks=(place.trainers - 1,), factor=1.5),)
    return (SlowNode(nodes=(0,), factor=1.5),)


def environments(classes: int = DEFAULT_CLASSES) -> tuple[Environment, ...]:
    """The first classes of the Latin square."""
    found = []
    for shift in CLASSES[:classes]:
        for index, (nodes, per_node) in enumerate(SHAPES):
            rate = (index + shift) % 3
            place = Place(nodes=nodes, per_node=per_node, rate_mbit=RATES_MBIT[rate])
            late = LATE[(index + rate) % 3]
            found.append(
                Environment(
                    name=f"{place.name}, {late}",
                    place=place,
                    strategies={**FLAT, **HIERARCHICAL} if per_node > 1 else FLAT,
                    workload=NETWORK,
                    stragglers=stragglers_of(late, place),
                    seed=3 * index + rate,
                )
            )
    return tuple(found)


def regimes() -> tuple[Environment, ...]:
    """Where the model may break, looked for on purpose. Nothing here enters the grid's figures."""
    fast = Place(nodes=4, per_node=1, rate_mbit=200)
    return (
        Environment(
            name="64 kB buckets",
            place=fast,
            workload=MANY,
            strategies={
                "sync, 40 buckets": _sync(0.05),
                "sync, 20 buckets": _sync(0.0625),
                "local, K = 4, 40 buckets": DistributedStrategy(
                    localsgd=True, localsgd_configs=LocalSGDConfigs(k_steps=4), fuse_all_reduce_ops=False
                ),
            },
        ),
        Environment(
            name="many in flight, incast",
            place=fast,
            workload=MANY,
            strategies={
                "4 communicators": _in_flight(0.125, 4),
                "8 communicators": _in_flight(0.0625, 8),
                "one leader of four hosts": _sync(0.25, use_hierarchical_allreduce=True, hierarchical_inner_ranks=4),
                "leaders of two pairs of hosts": _sync(0.25, use_hierarchical_allreduce=True, hierarchical_inner_ranks=2),
            },
        ),
        Environment(
            name="one link a quarter as fast",
            place=fast,
            workload=NETWORK,
            slow_link=(3, 50),
            strategies={name: FLAT[name] for name in ("sync, 0.25 MiB", "local, K = 4", "2 communicators")},
        ),
        Environment(
            name="a rank 10 times slower",
            place=fast,
            workload=NETWORK,
            stragglers=(SlowRank(ranks=(3,), factor=10.0),),
            steps=8,
            strategies={name: FLAT[name] for name in ("sync, 0.25 MiB", "local, K = 4")},
        ),
        Environment(
            name="K close to the run's length",
            place=fast,
            workload=NETWORK,
            stragglers=stragglers_of("jitter", fast),
            steps=20,
            strategies={f"local, K = {steps}": _local(steps) for steps in (16, 19, 64)},
        ),
    )


def num_steps(step_s: float, leg_s: float) -> int:
    """Counted steps of a leg whose step is predicted to take so long."""
    return ROUND * max(2, round(leg_s / step_s / ROUND))
