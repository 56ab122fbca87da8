"""Random experiments for the simulator's engines, small enough to be simulated event by event."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd
from hypothesis import strategies as st
from sim_cases import link, profiled

from fleetbench.cluster import Cluster
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment, check_strategy
from fleetbench.profile import Profile
from fleetbench.quantities import PerStep, Steps
from fleetbench.result import RunResult
from fleetbench.stragglers import Empirical, Episode, Jitter, NodeShock, SlowNode, SlowRank, Straggler
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import LossCurve, LrDecay, Workload
from sim.run import simulate

Case = tuple[Experiment, Profile]
CURVE = LossCurve(start=3.0, floor=0.7, half_life=4.0)

EXCHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"fuse_all_reduce_ops": True, "fuse_grad_size_in_MB": 0.001},
    {"bf16_allreduce": True},
    {"find_unused_parameters": True},
    {"build_strategy": {"enable_backward_optimizer_op_deps": False}},
    {"build_strategy": {"enable_sequential_execution": True}},
    {"use_hierarchical_allreduce": True},
)
FREE: tuple[dict[str, Any], ...] = (
    {"sync_nccl_allreduce": False},
    {"sync_nccl_allreduce": False, "nccl_comm_num": 2},
    {"sync_nccl_allreduce": False, "nccl_comm_num": 2, "bf16_allreduce": True},
    {"sync_nccl_allreduce": False, "build_strategy": {"enable_backward_optimizer_op_deps": False}},
    {"use_hierarchical_allreduce": True, "hierarchical_variant": "reduce_scatter"},
    {"use_hierarchical_allreduce": True, "sync_nccl_allreduce": False, "nccl_comm_num": 2},
)
CADENCES: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"amp": True},
    {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
    {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 3, "remainder": "flush", "batch_norm_per": "update"}},
    {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "remainder": "drop"}, "amp": True},
    {"localsgd": True, "localsgd_configs": {"k_steps": 3}},
    {"localsgd": True, "localsgd_configs": {"schedule": "document", "k_steps": 4, "warmup_epochs": 1}},
    {"localsgd": True, "localsgd_configs": {"schedule": "torch", "k_steps": 2, "begin_step": 3}},
    {"localsgd": True, "localsgd_configs": {"k_steps": 2, "momentum": "average", "buffers": "average"}},
    {"localsgd": True, "amp": True, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
    *(
        {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"variant": variant, "init_k_steps": 2}}
        for variant in ("fleet", "paper", "document", "qsr")
    ),
)
"""What can be combined with any exchange that updates all parameters at once."""


def stragglers(nodes: int, trainers: int) -> st.SearchStrategy[tuple[Straggler, ...]]:
    """None, one or two kinds of delay."""
    kinds: list[st.SearchStrategy[Straggler]] = [
        st.just(Jitter(mean=0.3)),
        st.just(Jitter(distribution="exponential", mean=0.5)),
        st.builds(lambda rank: SlowRank(ranks=(rank,), factor=1.7), st.integers(0, trainers - 1)),
        st.builds(lambda node: SlowNode(nodes=(node,), factor=1.3), st.integers(0, nodes - 1)),
        st.just(NodeShock(rate=PerStep(0.4), mean=0.8)),
        st.just(Episode(rate=PerStep(0.2), length=Steps(3), factor=2.0)),
        st.just(Empirical(values=(0.0, 0.1, 0.7))),
    ]
    return st.lists(st.one_of(kinds), max_size=2).map(tuple)


@st.composite
def cases(draw: st.DrawFn, *, free: bool = False, slows: bool = False, loads: bool = True) -> Case:
    """A random experiment; ``free``: several collectives in flight; ``slows``: compute and collectives slow each other."""
    nodes, per_node = draw(st.sampled_from([(2, 1), (3, 1), (2, 2), (2, 3), (4, 2), (1, 3), (1, 1)]))
    exchange = draw(st.sampled_from(FREE if free else (*EXCHANGES, *FREE) if slows else EXCHANGES))
    cadence = draw(st.sampled_from(CADENCES))
    if nodes == 1 or per_node == 1:
        exchange = {key: value for key, value in exchange.items() if "hierarch" not in key}
    try:
        strategy = DistributedStrategy.from_dict(exchange | cadence)
        check_strategy(
            strategy, Workload(model="mlp", optimizer="momentum", loss_curve=CURVE), Cluster(nodes=nodes, trainers_per_node=per_node)
        )
    except ConfigError:  # these two do not go together
        cadence = {}
    layers = draw(
        st.lists(
            st.tuples(st.lists(st.integers(1, 900), min_size=1, max_size=2), st.integers(1, 900), st.integers(0, 1500)),
            min_size=1,
            max_size=4,
        )
    )
    backward = sum(layer[2] for layer in layers)
    table = {
        "update": draw(st.sampled_from([0, 100, 731])),
        "read": draw(st.sampled_from([0, 13])),
        "merge": draw(st.sampled_from([0, 57])),
        "pack": draw(st.sampled_from([0, 90])),
        "host_per_collective": draw(st.sampled_from([0, 7])),
        "buffers_nbytes": 40,
    }
    if loads and draw(st.integers(0, 3)) == 0:
        table |= {"load": draw(st.integers(1, 3000)), "loaders": draw(st.integers(0, 2))}
    if draw(st.integers(0, 3)) == 0:
        table |= {"fetch": 31}
    if slows:
        table |= {"contention": draw(st.sampled_from([0.0, 0.25, 0.4])), "collective_contention": draw(st.sampled_from([0.0, 0.3, 1.0]))}
    experiment, profile = profiled(
        [(numels, [draw(st.integers(0, max(backward, 1))) for _ in numels], forward, took) for numels, forward, took in layers],
        table,
        nodes=nodes,
        trainers_per_node=per_node,
        intra=link(80, draw(st.sampled_from([0, 10]))),
        inter=link(draw(st.sampled_from([8.0, 7.3, 3.0])), draw(st.sampled_from([0, 100]))),
        stragglers=draw(stragglers(nodes, nodes * per_node)),
        strategy=exchange | cadence | {"fetch_every_n_steps": draw(st.sampled_from([1, 3]))},
        backend=draw(st.sampled_from(["gloo", "nccl"])),
        also={
            "loss_curve": CURVE,
            "steps_per_epoch": draw(st.sampled_from([3, 5])),
            "optimizer": "momentum",
            "lr_decay": (LrDecay(step=6, factor=0.5),),
        },
        steps=draw(st.integers(1, 11)),
        warmup_steps=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 3)),
    )
    return experiment, profile


def agree(case: Case) -> RunResult:
    """The vector engine's run, after it was found equal to the reference engine's: steps, figures, and timeline where there is one."""
    experiment, profile = case
    reference = simulate(experiment, profile=profile, engine="reference")
    vector = simulate(experiment, profile=profile, engine="vector")
    pd.testing.assert_frame_equal(vector.steps, reference.steps, check_exact=True)
    changes = {"engine": None, "run_id": "", "skipped": ()}
    assert dataclasses.replace(vector.summary, **changes) == dataclasses.replace(reference.summary, **changes)
    if vector.summary.engine == "vector":
        order = lambda span: (span.rank, span.stream, span.start_ns, span.name, span.duration_ns)  # noqa: E731  # a key, twice
        assert sorted(vector.spans, key=order) == sorted(reference.spans, key=order)
    lean = simulate(experiment, profile=profile, engine="vector", timeline=False, table=False)
    assert lean.steps.empty
    for name in ("wall_s", "compute_s", "wait_s", "exposed_comm_s", "update_s", "other_s", "samples_per_s"):
        found, expected = getattr(lean.summary, name), getattr(reference.summary, name)
        assert abs(found - expected) <= 1e-9 * max(abs(expected), 1e-9) + 1e-15, name
    assert (lean.summary.num_syncs, lean.summary.local_steps) == (reference.summary.num_syncs, reference.summary.local_steps)
    assert lean.summary.bytes_sent_per_trainer == reference.summary.bytes_sent_per_trainer
    for name, value in reference.summary.step_s.items():
        assert abs(lean.summary.step_s[name] - value) <= 1e-12 + 1e-9 * value
    return vector
