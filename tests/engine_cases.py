"""Random experiments for the simulator's engines: whole strategies on whole clusters, small enough for an event-by-event simulation."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any
from unittest.mock import patch

import pandas as pd
from sim_cases import layered, link, profiled, with_profile

from fleetbench.cluster import Cluster, NodeOverride, Racks, Site
from fleetbench.declared import DeclaredScalars
from fleetbench.errors import ConfigError, FleetbenchError
from fleetbench.experiment import Experiment, check_strategy
from fleetbench.measurements import CollectivePoint
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import Communication, Profile
from fleetbench.quantities import BitsPerSecond, Bytes, Nanoseconds, PerStep, Steps
from fleetbench.result import RunResult
from fleetbench.stragglers import Blocks, Episode, Jitter, NodeShock, SlowNode, SlowRank, Straggler
from fleetbench.strategy import DistributedStrategy
from fleetbench.timeline import Span
from fleetbench.workload import HostWork, LossCurve, LrDecay, Workload
from sim.run import Engine, simulate

CLUSTERS = ((1, 1), (1, 3), (1, 4), (2, 1), (3, 1), (5, 1), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2))
"""Nodes and the trainers of each."""
CURVE = LossCurve(start=3.0, floor=0.4, half_life=Steps(4))
ALGORITHMS = ("ring", "gloo", "nccl-volta", "nccl-ampere", "nccl-hopper")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One experiment, and the steps whose gradients overflow."""

    experiment: Experiment
    overflows: frozenset[int] = frozenset()


def case_of(seed: int) -> Case:
    """The random experiment number ``seed``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a hierarchy over one node
        return _case(Random(seed))  # noqa: S311  # it has to be repeatable


def sharded_case_of(seed: int) -> Case:
    """The random experiment number ``seed`` with a sharded strategy, of dense gradients of one type."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _case(Random(seed), sharding)  # noqa: S311  # as above


def workers_case_of(seed: int) -> Case:
    """The random experiment number ``seed`` of workers of several trainers, with dense gradients of one type."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _case(Random(seed), workers)  # noqa: S311  # as above


def _case(random: Random, kind: Callable[[Random, int], dict[str, Any]] | None = None) -> Case:
    nodes, per_node = random.choice(CLUSTERS)
    own = (NodeOverride(nodes=(random.randrange(nodes),), trainers=random.randint(1, 5)),) if random.random() < 0.2 else ()
    cluster = Cluster(nodes=nodes, trainers_per_node=per_node, node_overrides=own)
    scale = random.choice([10**9, 10**11, 10**13, 10**14]) if random.random() < 0.05 else 1
    options = {**cluster_fields(random, cluster), **run_fields(random)}
    always = {} if kind is None else kind(random, cluster.trainers)
    strategy = strategy_of(random, Workload(**options["also"], model="mlp"), cluster, always)
    experiment, profile = built(random, layers(random, scale), options | {"strategy": strategy}, scale, is_dense=kind is not None)
    named = experiment if profile is None else with_profile(experiment, profile)
    return Case(experiment=named, overflows=frozenset(step for step in range(-2, 12) if random.random() < 0.3))


def sharding(random: Random, trainers: int) -> dict[str, Any]:
    """Fields of a sharded strategy."""
    pick = random.choice
    degree = pick([number for number in range(1, trainers + 1) if trainers % number == 0])
    kept = [number for number in range(2, degree + 1) if degree % number == 0]
    stage = pick([1, 2, 3, 3])
    configs = {
        "stage": stage,
        "sharding_degree": pick([degree, degree, 0]),
        "reshard_after_forward": pick([True, True, False, *kept]) if stage == 3 else True,
        "blocks": pick([[], [], ["layer0"]]),
    }
    short = {"amp": True, "amp_configs": {"dtype": "bf16"}} if random.random() < 0.3 else {}
    return {"sharding": True, "sharding_configs": configs | ({"param_dtype": "bfloat16"} if short else {}), **short}


def workers(random: Random, trainers: int) -> dict[str, Any]:
    """Fields of workers of several trainers, where their number allows it."""
    pick = random.choice
    number, period = pick([1, 1, 2]), pick([1, 2, 3])
    configs = {
        "worker_trainers": pick([each for each in range(2, trainers // 2 + 1) if trainers % each == 0] or [1]),
        "k_steps": number * period,
        "outer_momentum": 0.9,
    }
    own = pick([{"fragments": number, "overlap_steps": random.randrange(period), "mixing": pick([0.0, 0.5])}, {"begin_step": 3}])
    return {"localsgd": True, "localsgd_configs": configs | own}


def strategy_of(random: Random, workload: Workload, cluster: Cluster, always: dict[str, Any]) -> dict[str, Any]:
    """A strategy that has as many of its random parts, in random order, as go together, with some fields ``always``."""
    found = {"fuse_all_reduce_ops": True} | always if always else {}
    parts = strategy_parts(random, cluster.trainers)
    for part in random.sample(parts, len(parts)):
        if "localsgd" in always and "localsgd" in part:
            continue
        wanted = found | part | {"build_strategy": found.get("build_strategy", {}) | part.get("build_strategy", {})}
        try:
            check_strategy(DistributedStrategy.from_dict(wanted), workload, cluster)
        except ConfigError:  # does not go with those before
            continue
        found = wanted
    return found


def strategy_parts(random: Random, trainers: int) -> list[dict[str, Any]]:
    """Fields of a collective strategy, those together that need each other."""
    pick = random.choice

    def some(chance: float, **values: Any) -> dict[str, Any]:
        return values if random.random() < chance else {}

    fusion = pick(
        [
            {"fuse_all_reduce_ops": False},
            {"fuse_all_reduce_ops": True},
            {"fuse_grad_size_in_MB": pick([0.0, 0.001, 0.003]), "fuse_grad_count": pick([0, 2, 3])},
            {"fusion": "by_number", "fuse_grad_size_in_num": pick([1, 2, 8]), "last_comm_group_size_MB": pick([0.0, 0.001])},
            {"fusion": "ddp", "fuse_grad_size_in_MB": pick([0.0, 0.001, 25.0]), "first_bucket_size_in_MB": pick([0.0, 0.0005])},
            {"fusion": "merged_gradient"},
        ]
    )
    schedule = pick(
        [
            {"begin_step": pick([1, 4])},
            {"schedule": "torch", "begin_step": pick([1, 3])},
            {"schedule": "document", "warmup_epochs": pick([0, 1]), "warmup": pick(["exp", "const", "linear"])},
        ]
    )
    averaging = {
        **some(0.4, momentum=pick(["local", "reset", "average"])),
        **some(0.4, buffers="average"),
        **some(0.3, optimizer_state="average"),
    }
    outer = {"outer_lr": pick([1.0, 0.7]), "outer_momentum": pick([0.0, 0.9]), "outer_nesterov": pick([True, False])}
    number, period = pick([1, 1, 2, 3]), pick([1, 2, 3])
    rounds = {"fragments": number, "k_steps": number * period, "overlap_steps": random.randrange(period), "mixing": pick([0.0, 0.5])}
    fragments = {**outer, **rounds, "begin_step": pick([1, 1, 3])}
    workers = {"worker_trainers": pick([number for number in range(1, trainers + 1) if trainers % number == 0])}
    adaptive = {
        "variant": pick(["fleet", "paper", "document", "qsr"]),
        "init_k_steps": pick([1, 2, 4]),
        "begin_step": pick([1, 3]),
        "alpha": pick([0.01, 0.1, 0.25]),
    }
    merge = {
        "k_steps": pick([1, 2, 3]),
        "avg": pick([True, False]),
        "remainder": pick(["carry", "flush", "drop"]),
        "lr_per": pick(["micro_batch", "update"]),
        "batch_norm_per": pick(["micro_batch", "update"]),
    }
    scaling = {
        **some(0.3, dtype="bf16"),
        **some(0.5, init_loss_scaling=8.0, incr_every_n_steps=2, decr_every_n_nan_or_inf=1),
        **some(0.2, use_dynamic_loss_scaling=False),
    }
    hierarchy = {
        "hierarchical_inner_ranks": pick([0, 0, *(number for number in range(2, trainers + 1) if trainers % number == 0)]),
        "hierarchical_variant": pick(["leader", "reduce_scatter"]),
    }
    off = {"cudnn_exhaustive_search": False, "conv_workspace_size_limit": 64, "fraction_of_gpu_memory_to_use": 0.5}
    builds = (
        some(0.3, enable_backward_optimizer_op_deps=False),
        some(0.3, enable_sequential_execution=True),
        some(0.1, fuse_all_optimizer_ops=True),
        some(0.1, fuse_elewise_add_act_ops=True, compile_split=pick(["block", "bucket"])),
        some(0.1, fuse_bn_act_ops=True, fuse_relu_depthwise_conv=True),
    )
    return [
        {"fuse_all_reduce_ops": True} | fusion,
        some(0.3, localsgd=True, localsgd_configs={"k_steps": pick([1, 2, 3, 4])} | schedule | averaging | pick([{}, workers])),
        some(0.3, localsgd=True, localsgd_configs={"k_steps": pick([1, 2, 3, 4])} | schedule | outer | pick([{}, workers])),
        some(0.3, localsgd=True, localsgd_configs=fragments | pick([{}, workers])),
        some(0.3, adaptive_localsgd=True, adaptive_localsgd_configs=adaptive | pick([averaging, outer])),
        some(0.4, gradient_merge=True, gradient_merge_configs=merge),
        some(0.4, amp=True, amp_configs=scaling),
        some(0.5, use_hierarchical_allreduce=True, **hierarchy),
        some(0.4, sync_nccl_allreduce=False),
        some(0.4, nccl_comm_num=pick([2, 3])),
        some(0.25, **{pick(["fp16_allreduce", "bf16_allreduce"]): True}),
        some(0.3, find_unused_parameters=True),
        some(0.3, broadcast_buffers=False),
        *({"build_strategy": build} for build in builds if build),
        some(0.1, sync_batch_norm=True),
        some(0.15, thread_num=2),
        some(0.1, **off),
        some(0.3, fetch_every_n_steps=pick([2, 3])),
        some(0.1, recompute=True, recompute_configs={"checkpoints": ["layer0"]}),
    ]


def cluster_fields(random: Random, cluster: Cluster) -> dict[str, Any]:
    """A cluster's network, racks, sites, nodes that differ, and stragglers."""
    nodes = cluster.nodes
    pick, any_node = random.choice, random.randrange(nodes)
    collective = pick(["ring", "ring", "ring", *ALGORITHMS])
    overrides = [
        NodeOverride(
            nodes=(random.randrange(nodes),),
            inter=pick([None, link(2.5, 170), link(30)]),
            intra=pick([None, link(7), link(100, 3)]),
            slowdown=pick([1.0, 1.5, 0.7]),
        )
        for _ in range(pick([0, 0, 0, 1, 2]))
    ]
    kinds: list[Straggler] = [
        Jitter(mean=0.3),
        Jitter(distribution="exponential", mean=0.5),
        Jitter(distribution="gamma", mean=0.2, cv=0.5),
        Jitter(distribution="lognormal", mean=0.4, cv=2.0),
        SlowRank(ranks=(random.randrange(cluster.trainers),), factor=1.7),
        SlowNode(nodes=(any_node,), factor=1.3),
        NodeShock(rate=PerStep(0.4), mean=0.8),
        NodeShock(rate=PerStep(0.3), mean=0.8, scope="cluster"),
        Episode(rate=PerStep(0.2), length=Steps(3), factor=2.0),
        Blocks(values=((0.0, 0.1, 0.7),), block_steps=1) if nodes % 2 else Blocks(values=((0.0, 0.1, 0.7), (0.2, 0.0, 0.4)), block_steps=2),
    ]
    return {
        "nodes": nodes,
        "trainers_per_node": cluster.trainers_per_node,
        "intra": link(80, pick([0, 10])),
        "inter": dataclasses.replace(
            link(pick([8.0, 7.3, 3.0]), pick([0, 100])), flow_limit=pick([None, None, None, BitsPerSecond(2 * 10**9)])
        ),
        "nics_per_node": pick([1, 1, 2, 3]),
        "racks": Racks(nodes=random.randint(1, 3), oversubscription=pick([1.0, 1.7, 6.0])) if random.random() < 0.25 else None,
        "node_overrides": (*cluster.node_overrides, *overrides),
        "stragglers": tuple(random.sample(kinds, pick([0, 0, 1, 1, 2, 3]))),
        "collective": collective,
        "cores_per_node": pick([16, 16, 2]),
        "sites": () if collective.startswith("nccl-") or random.random() < 0.7 else sites(random, nodes),
    }


def sites(random: Random, nodes: int) -> tuple[Site, ...]:
    """Sites of a random number of nodes, with links that differ by direction, and some that lose packets."""
    bounds = [0, *sorted(random.sample(range(1, nodes), random.randrange(nodes))), nodes]
    links = [link(2.2, 900), link(9, 40), dataclasses.replace(link(4, 300), loss=random.choice([0.0001, 0.02]))]
    return tuple(Site(nodes=end - begin, up=random.choice(links), down=random.choice([None, *links])) for begin, end in pairwise(bounds))


def run_fields(random: Random) -> dict[str, Any]:
    """Steps, epochs, what is declared of losses and learning rates, and where it runs."""
    pick = random.choice
    declared = {
        "loss_curve": pick([CURVE, CURVE, LossCurve(start=0.5, floor=0.7, half_life=Steps(1.5)), None]),
        "steps_per_epoch": pick([1, 2, 3, 3, 5, 5, 7, None]),
        "optimizer": pick(["momentum", "momentum", "sgd", "adam", "adagrad"]),
        "lr_decay": tuple(LrDecay(step=step, factor=0.5) for step in random.sample(range(1, 9), pick([0, 1, 2]))),
        "uneven_data": pick(["cut", "pad"]),
        "dtype": pick(["float32", "float32", "float64"]),
    }
    return {
        "also": declared,
        "steps": random.randint(1, 11),
        "warmup_steps": random.randint(0, 2),
        "seed": random.randint(0, 3),
        "backend": pick(["gloo", "nccl"]),
    }


@dataclass(frozen=True, slots=True)
class Layers:
    """A model's layers: sizes of gradients with when they are ready, forward and backward; ns."""

    rows: tuple[tuple[list[int], list[int], int, int], ...]
    is_declared: bool


def layers(random: Random, scale: int) -> Layers:
    """One to four layers of one or two gradients."""
    took = [(random.randint(1, 900) * scale, random.randint(0, 1500) * scale) for _ in range(random.randint(1, 4))]
    backward = max(sum(own for _, own in took), 1)
    elements = random.choice([10**9, 10**12]) if random.random() < 0.03 else 1
    rows = []
    for forward, own in took:
        numels = [random.randint(0 if random.random() < 0.05 else 1, 900) * elements for _ in range(random.randint(1, 2))]
        rows.append((numels, [random.randint(0, backward) for _ in numels], forward, own))
    return Layers(tuple(rows), random.random() < 0.2)


def built(random: Random, model: Layers, options: dict[str, Any], scale: int, *, is_dense: bool) -> tuple[Experiment, Profile | None]:
    """The experiment, with a declared table of layers or a profile; ``is_dense``: no gradient is sparse, and all are of one type."""
    pick = random.choice
    if model.is_declared:
        host = HostWork(
            read=Nanoseconds(pick([0, 13])),
            load=Nanoseconds(pick([0, 700 * scale])),
            loaders=pick([0, 0, 1, 2]),
            prefetch=pick([1, 2]),
            fetch=Nanoseconds(pick([0, 31])),
        )
        also = options["also"] | {"host": pick([None, host]), "loss_curve": options["also"]["loss_curve"] or CURVE}
        return layered([(sum(row[0]), row[2], row[3]) for row in model.rows], **options | {"also": also}), None
    table = {
        "update": pick([0, 100, 731]) * scale,
        "local_update": pick([None, 55]),
        "read": pick([0, 13]),
        "merge": pick([0, 57]),
        "pack": pick([0, 90]),
        "host_per_collective": pick([0, 7]),
        "buffers_nbytes": pick([0, 40]),
        "load": pick([0, 0, random.randint(1, 3000)]),
        "loaders": pick([0] * 6 + [1, 2]),
        "prefetch": pick([1, 2]),
        "fetch": pick([0, 0, 31]),
        "contention": pick([0.0] * 6 + [0.25, 0.4]),
        "collective_contention": pick([0.0] * 6 + [0.3, 1.0]),
    }
    if table["contention"] or table["collective_contention"]:
        table["loaders"] = pick([0] * 19 + [1])  # the vector engine leaves both together to the reference
    measured = random.random() < 0.15
    if measured:
        options = options | {"inter": None, "collective": pick(["measured", "ring", "gloo"]), "sites": ()}
    experiment, profile = profiled(model.rows, table, **options)
    sparse = frozenset(index for index in range(len(model.rows)) if random.random() < 0.15)
    changed = profile if is_dense else dataclasses.replace(profile, tables=tuple(with_kinds(random, own, sparse) for own in profile.tables))
    if measured:
        changed = dataclasses.replace(changed, communication=communication(random, experiment.cluster.trainers))
    return experiment, changed


def with_kinds(random: Random, table: LayerTable, sparse: frozenset[int]) -> LayerTable:
    """Some layers' gradients sparse, some of other types."""
    found = []
    for index, layer in enumerate(table.layers):
        dtype = random.choice(["float32", "float32", "float32", "float16", "float64"])
        gradients = [
            dataclasses.replace(
                gradient,
                dtype=dtype,
                sparse=index in sparse,
                touched=random.choice([0, gradient.numel // 2]) if index in sparse else 0,
            )
            for gradient in layer.gradients
        ]
        found.append(dataclasses.replace(layer, gradients=tuple(gradients)))
    return dataclasses.replace(table, layers=tuple(found))


def communication(random: Random, trainers: int) -> Communication:
    """A link between nodes as one collective sees it, and each of several in flight."""
    points = tuple(CollectivePoint(nbytes=Bytes(size), took=Nanoseconds(100 + size)) for size in (10, 1000, 9000))
    return Communication(
        backend="gloo",
        trainers=trainers,
        between="nodes",
        link=link(8, 20),
        points=random.choice([(), points]),
        in_flight=random.choice([(), (link(6, 30),), (link(5, 20), link(3.3, 50))]),
    )


class Overflowing(DeclaredScalars):
    """Declared scalars, but for the steps whose gradients overflow."""

    steps: frozenset[int] = frozenset()

    def scalar(self, name: str, rank: int, step: int) -> float:
        """See ``Source``."""
        return float(step in self.steps) if name == "found_inf" else super().scalar(name, rank, step)


@contextmanager
def overflowing(steps: frozenset[int]) -> Iterator[None]:
    """Simulations find gradients that overflow in these steps."""
    with patch.object(Overflowing, "steps", steps), patch("sim.scenario.DeclaredScalars", Overflowing), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rules of adaptive steps that keep K
        yield


def outcome(case: Case, engine: Engine, **wanted: Any) -> RunResult | FleetbenchError:
    """The run, or the error that refuses it."""
    with overflowing(case.overflows):
        try:
            return simulate(case.experiment, engine=engine, **wanted)
        except FleetbenchError as error:
            return error


def agree(case: Case) -> str:
    """How the vector engine executed a case, once its steps, figures and timeline, or its refusal, are equal to the reference engine's."""
    reference, vector = outcome(case, "reference"), outcome(case, "vector")
    lean = outcome(case, "vector", timeline=False, table=False)
    if isinstance(reference, FleetbenchError):
        for found in (vector, lean):
            assert isinstance(found, FleetbenchError), f"the reference engine refuses it: {reference}"
            assert (type(found), str(found)) == (type(reference), str(reference))
        return "refused"
    for found in (vector, lean):
        if isinstance(found, FleetbenchError):
            raise found
    assert isinstance(vector, RunResult)
    assert isinstance(lean, RunResult)
    pd.testing.assert_frame_equal(vector.steps, reference.steps, check_exact=True)
    changes = {"engine": None, "run_id": "", "skipped": ()}
    assert dataclasses.replace(vector.summary, **changes) == dataclasses.replace(reference.summary, **changes)
    if vector.summary.engine == "vector":
        assert in_order(vector.spans) == in_order(reference.spans)
    close_to(lean, reference)
    return str(vector.summary.engine)


def in_order(spans: Sequence[Span]) -> list[Span]:
    """Spans in one order, whoever kept them."""
    return sorted(spans, key=lambda span: (span.rank, span.stream, span.start_ns, span.name, span.duration_ns))


def close_to(lean: RunResult, reference: RunResult) -> None:
    """A run without a table has the reference's figures, means and quantiles to a rounding of floats."""
    assert lean.steps.empty
    for name in ("compute_s", "wait_s", "exposed_comm_s", "update_s", "other_s"):
        found, expected = getattr(lean.summary, name), getattr(reference.summary, name)
        assert abs(found - expected) <= 1e-9 * max(abs(expected), reference.summary.wall_s) + 1e-15, name
    for name in ("wall_s", "samples_per_s", "num_syncs", "local_steps", "bytes_sent_per_trainer"):
        assert getattr(lean.summary, name) == getattr(reference.summary, name), name
    for name, value in reference.summary.step_s.items():
        assert abs(lean.summary.step_s[name] - value) <= 1e-12 + 1e-9 * value
