"""Hierarchies: closed forms of both variants, and who shares which link.

Inside a node 1 ns a byte and 10 ns a message, between nodes 10 ns a byte and 100 ns a message. Two
nodes of three trainers; a bucket of 1200 bytes, ready with the end of a compute of 300 ns.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_cases import carried_ns, in_ns, layered, link, profiled, with_profile

from fleetbench.plan.layers import LayerTable
from fleetbench.stragglers import SlowRank
from sim.run import simulate

NODES: dict[str, Any] = {"nodes": 2, "trainers_per_node": 3, "intra": link(8, 10), "inter": link(0.8, 100)}
LEADER = {"use_hierarchical_allreduce": True}
SCATTER = LEADER | {"hierarchical_variant": "reduce_scatter"}
FREE = {"nccl_comm_num": 2, "sync_nccl_allreduce": False}


def test_leaders_by_hand() -> None:
    """Reduce 2 x 10 + 1200, all-reduce between two leaders 2 x 100 + 12000, broadcast 2 x 10 + 1200: 14640 in all."""
    result = simulate(layered([(300, 100, 200)], strategy=LEADER, **NODES))
    assert in_ns(result, "exposed_comm_s") == [14_640] * 6
    assert in_ns(result, "arrival_s") == [300] * 6
    chain = {"reduce 0": (300, 1_520), "all_reduce 0": (1_520, 13_720), "broadcast 0": (13_720, 14_940)}
    followers = {name: times for name, times in chain.items() if name != "all_reduce 0"}
    for rank in range(6):
        assert carried_ns(result, rank) == (chain if rank % 3 == 0 else followers)


def test_reduce_scatter_by_hand() -> None:
    """Reduce-scatter and all-gather 2 x (10 + 400) each; between them three rings of 400 bytes share a node's link.

    Their messages of 2000 ns follow each other, two of each ring: 6 x 2000 and one latency, and 2000 less for each that comes before.
    """
    result = simulate(layered([(300, 100, 200)], strategy=SCATTER, **NODES))
    assert in_ns(result, "exposed_comm_s") == [820 + 12_100 + 820] * 6
    for rank in range(6):
        assert carried_ns(result, rank) == {
            "reduce_scatter 0": (300, 1_120),
            "all_reduce 0": (1_120, 9_220 + 2_000 * (rank % 3)),
            "all_gather 0": (13_220, 14_040),
        }


@settings(max_examples=15, deadline=None)
@given(inner=st.integers(2, 4), nodes=st.integers(2, 5), elements=st.integers(1, 15_000))
def test_both_variants_are_their_closed_forms(inner: int, nodes: int, elements: int) -> None:
    """With g trainers on each of N nodes and S bytes, beside latencies: leader 2 S / B_i, reduce-scatter 2 (g-1)/g S / B_i.

    Both then cross nodes with 2 (N-1)/N S / B_o. Messages of several rings hide all latencies between nodes but the last.
    A size of 180 makes every message whole.
    """
    size = 4 * 180 * elements
    cluster = {"nodes": nodes, "trainers_per_node": inner, "intra": link(8, 10), "inter": link(0.8, 100)}
    between, latencies = 2 * (nodes - 1) * size * 10 // nodes, {"leader": 2 * (nodes - 1) * 100, "reduce_scatter": 100}
    inside = {"leader": 2 * ((inner - 1) * 10 + size), "reduce_scatter": 2 * (inner - 1) * (10 + size // inner)}
    for variant, inside_ns in inside.items():
        strategy = LEADER | {"hierarchical_variant": variant}
        result = simulate(layered([(180 * elements, 100, 200)], strategy=strategy, **cluster))
        assert in_ns(result, "exposed_comm_s") == [inside_ns + between + latencies[variant]] * (inner * nodes)


def test_bytes_of_a_hierarchy() -> None:
    """Leader: 2/3 of 1200 inside, twice, and 1200 more between nodes for leaders; reduce-scatter: the same inside, and 400."""
    sent = simulate(layered([(300, 100, 200)], strategy=LEADER, **NODES)).steps["bytes_sent"]
    assert list(sent) == [2_800, 1_600, 1_600] * 2
    assert set(simulate(layered([(300, 100, 200)], strategy=SCATTER, **NODES)).steps["bytes_sent"]) == {2_000}


def test_a_node_does_not_wait_for_another_nodes_trainers() -> None:
    """Rank 4 takes twice as long: node 0 reduces at 300, node 1 at 600, and the leaders meet after both."""
    result = simulate(layered([(300, 100, 200)], strategy=LEADER, stragglers=(SlowRank(ranks=(4,), factor=2.0),), **NODES))
    assert carried_ns(result, 1)["reduce 0"] == (300, 1_520)
    assert carried_ns(result, 5)["reduce 0"] == (600, 1_820)
    assert carried_ns(result, 0)["all_reduce 0"] == carried_ns(result, 3)["all_reduce 0"] == (1_820, 14_020)
    assert carried_ns(result, 1)["broadcast 0"] == (14_020, 15_240)
    assert in_ns(result, "wait_s") == [300, 300, 300, 300, 0, 300]


def test_ranks_of_two_nodes_never_meet_inside() -> None:
    """Rank 1 takes three times as long, so node 1 reduces at 300 and node 0, though two of it wait by then, at 900."""
    result = simulate(layered([(300, 100, 200)], strategy=LEADER, stragglers=(SlowRank(ranks=(1,), factor=3.0),), **NODES))
    assert carried_ns(result, 3)["reduce 0"] == (300, 1_520)
    assert carried_ns(result, 0)["reduce 0"] == (900, 2_120)


def test_communicators_share_links_inside_and_between() -> None:
    """Two buckets ready together on two communicators: reduces share the node in 8 turns of 150 ns each, one after the other.

    The second one's last turn ends 150 ns after the first one's. Then four messages of 6000 ns follow each other between leaders,
    from 2570 on, and the last broadcast has the node to itself.
    """
    result = simulate(layered([(300, 100, 0), (300, 0, 200)], strategy=LEADER | FREE, **NODES))
    assert carried_ns(result)["reduce 0"] == (300, 300 + 15 * 150 + 20)
    assert carried_ns(result)["reduce 1"] == (300, 300 + 16 * 150 + 20)
    assert carried_ns(result)["all_reduce 0"] == (2_570, 2_570 + 3 * 6_000 + 100)
    assert carried_ns(result)["all_reduce 1"] == (2_720, 2_570 + 4 * 6_000 + 100)
    assert in_ns(result, "exposed_comm_s") == [2_570 + 24_100 + 1_220 - 300] * 6


def test_what_is_inside_does_not_share_with_what_is_between() -> None:
    """The second bucket is ready at 1520, as the first one's leaders start.

    It reduces alone until 2740. Messages between leaders take 6000 ns: the first one's until 7520, the second one's
    until 13520, and so on until 25520. The broadcasts follow without sharing.
    """
    result = simulate(layered([(300, 100, 1_220), (300, 0, 200)], strategy=LEADER | FREE, **NODES))
    assert carried_ns(result) == {
        "reduce 0": (300, 1_520),
        "all_reduce 0": (1_520, 19_620),
        "broadcast 0": (19_620, 20_840),
        "reduce 1": (1_520, 2_740),
        "all_reduce 1": (2_740, 25_620),
        "broadcast 1": (25_620, 26_840),
    }


def test_one_bucket_in_flight_over_a_hierarchy() -> None:
    """With ``sync_nccl_allreduce`` the second bucket's reduce waits for the first one's broadcast: twice 14640."""
    result = simulate(layered([(300, 100, 0), (300, 0, 200)], strategy=LEADER, **NODES))
    assert in_ns(result, "exposed_comm_s") == [2 * 14_640] * 6


def test_local_sgd_averages_over_a_hierarchy() -> None:
    """K = 2 meets at steps 1, 3 and at the end; each time update 10, then 14640, then merge 5."""
    strategy = LEADER | {"localsgd": True, "localsgd_configs": {"k_steps": 2}}
    experiment, profile = profiled([([300], [200], 100, 200)], {"update": 10, "merge": 5}, strategy=strategy, steps=4, **NODES)
    result = simulate(with_profile(experiment, profile))
    met, alone = 300 + 10 + 14_640 + 5, 310
    assert in_ns(result, "start_s") == [0, met, met + alone, 2 * met + alone] * 6
    assert in_ns(result, "exposed_comm_s") == [14_640, 0, 14_640, 14_640] * 6


@pytest.mark.parametrize("trainers", [2, 3, 4])
def test_sparse_rows_are_gathered(trainers: int) -> None:
    """A sparse gradient of 100 bytes goes to the P - 1 others: (P - 1) x (10 + 100), after a dense one's ring."""
    experiment, profile = profiled([([25, 300], [150, 200], 100, 200)], {}, nodes=trainers, inter=link(8, 10))
    rows, dense = profile.tables[0].layers[0].gradients
    layer = dataclasses.replace(profile.tables[0].layers[0], gradients=(dataclasses.replace(rows, sparse=True), dense))
    table: LayerTable = dataclasses.replace(profile.tables[0], layers=(layer,))
    result = simulate(with_profile(experiment, dataclasses.replace(profile, tables=(table,))))
    took = (trainers - 1) * 110
    assert carried_ns(result)["all_gather 0"] == (250, 250 + took)
    assert result.summary.bytes_sent_per_trainer == (trainers - 1) * 100 + 2 * (trainers - 1) * 1_200 // trainers


def test_a_smaller_wire_type_carries_half() -> None:
    """FP16 on the wire: 600 bytes of a bucket of 1200, so T = 20 + 600 among two."""
    result = simulate(layered([(300, 100, 200)], inter=link(8, 10), strategy={"fp16_allreduce": True}))
    assert in_ns(result, "exposed_comm_s") == [620, 620]
    assert result.summary.bytes_sent_per_trainer == 600


def test_unused_parameters_cost_a_small_all_reduce() -> None:
    """Two gradients, so two flags after the buckets: T = 20 + 2, and 2 bytes more on the wire."""
    layers = [(250, 100, 200), (500, 300, 400)]
    plain = simulate(layered(layers, inter=link(8, 10)))
    asked = simulate(layered(layers, inter=link(8, 10), strategy={"find_unused_parameters": True}))
    assert in_ns(asked, "exposed_comm_s") == [ns + 22 for ns in in_ns(plain, "exposed_comm_s") if ns is not None]
    assert asked.summary.bytes_sent_per_trainer == plain.summary.bytes_sent_per_trainer + 2
    static = simulate(layered(layers, inter=link(8, 10), strategy={"static_graph": True}))
    assert in_ns(static, "exposed_comm_s") == in_ns(plain, "exposed_comm_s")  # the first backward of a training is no step's
    assert carried_ns(asked)["all_reduce unused"] == (3_840, 3_862)
