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
from sim.run import simulate

NODES: dict[str, Any] = {"nodes": 2, "trainers_per_node": 3, "intra": link(8, 10), "inter": link(0.8, 100)}
LEADER = {"use_hierarchical_allreduce": True}
SCATTER = LEADER | {"hierarchical_variant": "reduce_scatter"}


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
