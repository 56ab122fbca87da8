"""Runs that are small enough to work out on paper.

Links of 8 Gbit/s carry one byte a nanosecond. Among two trainers a ring sends 2 (2 - 1) / 2 = 1
times the bytes in 2 (2 - 1) = 2 steps, so that T(S) = 2 latency + S there.
"""

from __future__ import annotations

from typing import Literal

import pytest
from sim_cases import assemble, carried_ns, in_ns, layered, link, profiled, with_profile

from fleetbench.errors import ConfigError
from fleetbench.quantities import Bytes, Nanoseconds
from fleetbench.stragglers import SlowRank
from fleetbench.workload import LayerSpec
from sim.run import simulate

# Forward order: a (1000 bytes), b (2000 bytes). Backward order: b is ready 400 + 400 = 800 ns after
# the start of the step, a at 1000 ns, which is also the end of the backward.
A_AND_B = [(250, 100, 200), (500, 300, 400)]


def test_buckets_overlap_with_backward_one_after_the_other() -> None:
    """With T = 20 + S: b travels from 800 to 2820, a waits for it and travels from 2820 to 3840."""
    result = simulate(layered(A_AND_B, inter=link(8, 10), steps=2))
    assert in_ns(result, "start_s") == [0, 3840] * 2
    assert in_ns(result, "forward_s") == [400] * 4
    assert in_ns(result, "backward_s") == [600] * 4
    assert in_ns(result, "wait_s") == [0] * 4
    assert in_ns(result, "exposed_comm_s") == [2840] * 4
    assert in_ns(result, "arrival_s") == [1000, 4840] * 2
    assert result.summary.wall_s == pytest.approx(7680e-9)
    assert result.summary.samples_per_s == pytest.approx(2 * 2 * 32 / 7680e-9)


def test_waiting_for_the_slowest_is_told_from_communication() -> None:
    """Rank 1 takes twice as long: it is ready at 1600 and 2000, and rank 0 waits from 1000 to 2000."""
    result = simulate(layered(A_AND_B, inter=link(8, 10), stragglers=(SlowRank(ranks=(1,), factor=2.0),)))
    assert in_ns(result, "arrival_s") == [1000, 2000]
    assert in_ns(result, "wait_s") == [1000, 0]
    assert in_ns(result, "exposed_comm_s") == [2640, 2640]  # b: 1600 to 3620, a: to 4640


def test_a_collective_is_rounded_once() -> None:
    """Three trainers, 0.8 ns a byte, 1000 bytes: 4/3 x 800 = 1066.67, so 1067; four rounded steps would give 1068."""
    result = simulate(layered([(250, 100, 200)], nodes=3, inter=link(10, 0)))
    assert in_ns(result, "exposed_comm_s") == [1067] * 3


@pytest.mark.parametrize(
    ("nodes", "trainers_per_node", "params", "expected_ns"),
    [
        (1, 4, 1_000, 6 * (10 + 1_000)),  # four trainers of a node: hops inside only
        (4, 1, 1_000, 6 * (1_000 + 100)),  # a trainer a node: hops between only
        (2, 2, 1_000, 3 * (1_000 + 100) + 3 * (10 + 1_000)),  # both: a chunk passes them in turn
        (2, 2, 100_000, 6 * 100_000 + 10),  # both: the ports inside are the bottleneck, and 11000 between nodes hide beside them
    ],
)
def test_a_ring_inside_and_between_nodes(nodes: int, trainers_per_node: int, params: int, expected_ns: int) -> None:
    """Chunks of ``params`` bytes; inside 1 ns a byte and 10 ns, between nodes 0.1 ns a byte and 1000 ns."""
    cluster = {"nodes": nodes, "trainers_per_node": trainers_per_node, "intra": link(8, 10), "inter": link(80, 1_000)}
    result = simulate(layered([(params, 100, 200)], **cluster))
    assert in_ns(result, "exposed_comm_s") == [expected_ns] * 4


def test_an_unknown_link_is_named() -> None:
    """Two nodes without a declared or measured link between them are refused."""
    with pytest.raises(ConfigError, match=r"cluster\.inter"):
        simulate(layered(A_AND_B))


def test_read_update_and_merge_take_their_measured_time() -> None:
    """Read 7, compute 100 + 200, one collective of 20 + 400, update 11: 738 ns, of which 7 are other.

    The gradient is ready 150 ns into the backward, so the collective runs from 257 to 677.
    """
    experiment, profile = profiled([([100], [150], 100, 200)], {"read": 7, "update": 11, "merge": 13}, inter=link(8, 10), steps=2)
    result = simulate(with_profile(experiment, profile))
    assert in_ns(result, "arrival_s") == [257, 688 + 257] * 2
    assert in_ns(result, "exposed_comm_s") == [677 - 307] * 4
    assert in_ns(result, "wait_s") == [0] * 4
    assert in_ns(result, "update_s") == [11] * 4
    assert in_ns(result, "other_s") == [7] * 4
    assert in_ns(result, "start_s") == [0, 688] * 2


def test_communicators_share_the_bandwidth() -> None:
    """Two in flight, T = 20 + S alone.

    b starts at 800, its first message of 1000 ns is on the wire until 1800 and back at 1810. a is ready at 1000 and
    has the wire from 1800 to 2300, b until 3300, and a until 3800: the link was busy throughout, for 3000 bytes.
    """
    several = {"nccl_comm_num": 2, "sync_nccl_allreduce": False}
    result = simulate(layered(A_AND_B, inter=link(8, 10), strategy=several))
    spans = {(span.stream, span.name): (span.start_ns, span.start_ns + span.duration_ns) for span in result.spans if span.rank == 0}
    assert spans["communication 0", "all_reduce 0"] == (800, 3310)
    assert spans["communication 1", "all_reduce 1"] == (1000, 3810)
    assert in_ns(result, "exposed_comm_s") == [2810, 2810]


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        # Messages of 500 ns, in turn: 0, 1, 0 until 1800. Bucket 2 starts there, behind 1, which is back since 1300.
        ("nccl", [(300, 1_800), (400, 2_300), (1_800, 3_300)]),
        # 0, 1, 2, 0, 1, 2.
        ("gloo", [(300, 2_300), (400, 2_800), (500, 3_300)]),
    ],
)
def test_communicators_carry_as_many_as_they_can(backend: Literal["gloo", "nccl"], expected: list[tuple[int, int]]) -> None:
    """Buckets 0 and 2 share communicator 0: 1000 bytes each, no latency, ready at 300, 400 and 500. NCCL carries one, gloo two."""
    several = {"nccl_comm_num": 2, "sync_nccl_allreduce": False}
    layers = [(250, 0, 100), (250, 0, 100), (250, 200, 100)]
    result = simulate(layered(layers, inter=link(8, 0), strategy=several, backend=backend))
    assert carried_ns(result) == {f"all_reduce {bucket}": times for bucket, times in enumerate(expected)}


def test_spans_say_what_a_trainer_did() -> None:
    """The first case of this file as a timeline; ``timeline=False`` keeps none."""
    experiment = layered(A_AND_B, inter=link(8, 10))
    spans = [(s.stream, s.name, s.start_ns, s.duration_ns) for s in simulate(experiment).spans if s.rank == 1]
    assert sorted(spans) == [
        ("communication", "all_reduce 0", 800, 2020),
        ("communication", "all_reduce 1", 2820, 1020),
        ("compute", "backward", 400, 600),
        ("compute", "forward", 0, 400),
        ("compute", "wait", 1000, 2840),
    ]
    assert simulate(experiment, timeline=False).spans == ()


@pytest.mark.parametrize("engine", ["reference", "vector"])
def test_until_the_last_has_started_an_exchange_of_an_earlier_step_it_is_waited_for(engine: Literal["reference", "vector"]) -> None:
    """Rank 1 takes 900 ns a step and rank 0 300; a round of two steps is exchanged beside its second one: from 900 to 1920.

    Rank 0 waits for it from 600 on, until 900 for rank 1; rank 1 from 1800 on, for communication alone.
    """
    rounds = {"k_steps": 2, "overlap_steps": 1, "outer_lr": 0.7}
    strategy = {"localsgd": True, "localsgd_configs": rounds}
    slow = (SlowRank(ranks=(1,), factor=3.0),)
    result = simulate(layered([(250, 100, 200)], inter=link(8, 10), stragglers=slow, strategy=strategy, steps=4), engine=engine)
    assert in_ns(result, "start_s") == [0, 300, 1_920, 2_220, 0, 900, 1_920, 2_820]
    assert in_ns(result, "wait_s") == [0, 300, 0, 300, 0, 0, 0, 0]
    assert in_ns(result, "exposed_comm_s") == [0, 1_020, 0, 1_020, 0, 120, 0, 120]
    summary = result.summary
    parts = (summary.compute_s, summary.wait_s, summary.exposed_comm_s, summary.update_s, summary.other_s)
    assert sum(parts) == pytest.approx(summary.step_s["mean"], rel=1e-12)


@pytest.mark.parametrize("engine", ["reference", "vector"])
def test_buffers_are_broadcast_behind_each_exchange(engine: Literal["reference", "vector"]) -> None:
    """40 bytes from rank 0 to rank 1 in 10 + 40 ns, behind the bucket of 1000 bytes that ends both ranks' steps.

    Rank 1 takes 600 ns a step and rank 0 300, which waits for it. Merging two steps, every second one has a broadcast.
    """
    slow = (SlowRank(ranks=(1,), factor=2.0),)
    specs = (LayerSpec(name="layer", params=250, buffers=Bytes(40), forward=Nanoseconds(100), backward=Nanoseconds(200)),)
    workload = {"model": "layers", "layers": specs}
    result = simulate(assemble(workload, inter=link(8, 10), stragglers=slow, steps=2), engine=engine)
    assert in_ns(result, "start_s") == [0, 1_670] * 2
    assert in_ns(result, "forward_s") == [100, 100, 200, 200]
    assert in_ns(result, "wait_s") == [300, 300, 0, 0]
    assert in_ns(result, "exposed_comm_s") == [50 + 1_020] * 4
    assert in_ns(result, "other_s") == [0] * 4
    assert set(result.steps["bytes_sent"]) == {20 + 1_000}
    merges = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    merged = simulate(assemble(workload, inter=link(8, 10), steps=4, strategy=merges), engine=engine)
    assert in_ns(merged, "exposed_comm_s")[:4] == [0, 1_070] * 2
    local = {"localsgd": True, "localsgd_configs": {"k_steps": 2}}
    alone = simulate(assemble(workload, inter=link(8, 10), steps=3, strategy=local), engine=engine)
    assert in_ns(alone, "exposed_comm_s")[:3] == [1_020, 0, 1_020]
    own = simulate(assemble(workload, inter=link(8, 10), steps=2, strategy={"broadcast_buffers": False}), engine=engine)
    assert in_ns(own, "exposed_comm_s")[:2] == [1_020] * 2
