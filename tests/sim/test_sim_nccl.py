"""NCCL's cost model: its choices and times against its formulas, worked out by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_cases import carried_ns, in_ns, layered, link

from fleetbench.cluster import Racks
from fleetbench.plan.operations import Collective
from sim.network.links import Links
from sim.network.nccl import GENERATIONS, Nccl
from sim.run import simulate

GB = 8
"""Gbit/s."""
NODE = Links(trainers_per_node=8, intra=link(300 * GB), inter=link(25 * GB), nics_per_node=8)


def ampere(kind: Collective, ranks: int, links: Links = NODE, *, rows: bool = False) -> Nccl:
    """On A100 nodes of 8, with 300 GB/s each way to NVLink and an interface of 25 GB/s each."""
    return Nccl(GENERATIONS["nccl-ampere"], kind, range(ranks), links, rows=rows)


def test_a_large_all_reduce_of_a_node_by_hand() -> None:
    """1 GiB among 8: Simple ring, 8.4 + 14 x 3.4 us and 2 x 7/8 of the bytes at 300 GB/s."""
    choice = ampere("all_reduce", 8).choice(2**30)
    assert (choice.method, choice.protocol) == ("ring", "Simple")
    assert choice.latency_ns == 8_400 + 14 * 3_400
    assert choice.total_ns(2**30) == 56_000 + Fraction(2 * 7 * 2**30, 8 * 300)


def test_a_small_all_reduce_of_a_node_by_hand() -> None:
    """1 KiB among 8: the LL ring's 6.6 + 14 x 0.6 us at 87.7 GB/s of the bus against the LL tree's 6.8 + 14 x 0.6."""
    found = ampere("all_reduce", 8)
    choice = found.choice(1_024)
    assert (choice.method, choice.protocol, choice.latency_ns) == ("ring", "LL", 15_000)
    assert choice.gbps == Fraction("87.7") * Fraction(8, 14)
    tree = next(other for other in found.choices(1_024) if (other.method, other.protocol) == ("tree", "LL"))
    assert tree.latency_ns == 6_800 + 14 * 600
    assert tree.gbps == Fraction(300) * Fraction("0.92") / Fraction("3.8") * Fraction("0.9") / 2


def test_many_nodes_take_a_tree_for_what_is_small_and_a_ring_for_what_is_large() -> None:
    """64 nodes of 8: a ring of 1022 steps is for large buffers only; the LL tree takes 6.8 + 2 (7 x 0.6 + 6 x 5) us."""
    found = ampere("all_reduce", 512)
    small = found.choice(4_096)
    assert (small.method, small.protocol) == ("tree", "LL")
    assert small.latency_ns == 6_800 + 2 * (7 * 600 + 6 * 5_000)
    large = found.choice(16 * 2**30)
    assert (large.method, large.protocol) == ("ring", "Simple")
    assert large.latency_ns == round((8_400 + (1_022 - 126) * 3_400 + 126 * 14_000) * 1.4)
    assert large.gbps == 200 * Fraction(512, 1_022)


def test_simple_between_nodes_pays_for_posting_and_twice_for_the_network() -> None:
    """Two nodes of one V100 at 5 us between them: in a ring of 2 steps both cross; 8.4 + 2 (14 + 10) us, 1.9 times where it is large."""
    links = Links(trainers_per_node=1, intra=None, inter=link(12 * GB, 5_000))
    ring = [choice for choice in Nccl(GENERATIONS["nccl-volta"], "all_reduce", range(2), links).choices(2**20) if choice.method == "ring"]
    assert [choice.latency_ns for choice in ring] == [6_600 + 2 * 7_700, 14_000 + 2 * 9_000, round((8_400 + 2 * 24_000) * 1.9)]
    assert [choice.gbps for choice in ring] == [6, 12 * Fraction("0.92"), 12]
    one = Nccl(GENERATIONS["nccl-volta"], "all_reduce", range(4), Links(trainers_per_node=2, intra=link(100 * GB), inter=link(12 * GB)))
    assert one.choices(1)[0].latency_ns == 6_600 + (6 - 2) * 1_000 + 2 * 2_700


def test_other_collectives_are_rings() -> None:
    """Reduce-scatter of S: (P - 1) / P of it; rows of S from each: (P - 1) S; a broadcast S, with one hop of latency."""
    scatter, rows, broadcast = ampere("reduce_scatter", 8), ampere("all_gather", 8, rows=True), ampere("broadcast", 8)
    size = 2**30
    assert scatter.route(size).cost.transfer_ns == Fraction(7 * size, 8 * 300)
    assert rows.route(size).cost.transfer_ns == Fraction(7 * size, 300)
    assert (broadcast.route(size).cost.latency_ns, broadcast.route(size).cost.transfer_ns) == (8_400 + 3_400, Fraction(size, 300))
    assert scatter.route(size).cost.latency_ns == 8_400 + 7 * 3_400


@given(st.sampled_from(sorted(GENERATIONS)), st.sampled_from([2, 4, 8, 16, 24, 64, 512]), st.integers(0, 2**34))
def test_what_is_taken_is_the_shortest(generation: str, ranks: int, nbytes: int) -> None:
    """The route costs what the best choice does, all six are considered, and no port takes more than it carries."""
    found = Nccl(GENERATIONS[generation], "all_reduce", range(ranks), NODE)
    route = found.route(nbytes)
    assert len(found.choices(nbytes)) == 6
    assert route.cost.latency_ns + route.cost.transfer_ns == min(choice.total_ns(nbytes) for choice in found.choices(nbytes))
    assert all(0 < load <= 1 for load in route.loads)


@pytest.mark.parametrize(("generation", "gbps"), [("nccl-volta", 20), ("nccl-ampere", 20), ("nccl-hopper", Fraction("36.7"))])
def test_ll128_has_its_generations_bandwidth_a_channel(generation: str, gbps: Fraction) -> None:
    """An interface of 48 GB/s is one channel: LL128 carries 0.92 of it, but no more than 20 GB/s before Hopper and 36.7 there."""
    links = Links(trainers_per_node=1, intra=None, inter=link(48 * GB))
    ring = Nccl(GENERATIONS[generation], "all_reduce", range(4), links).choices(2**20)[1]
    assert ring.gbps == min(48 * Fraction("0.92"), Fraction(gbps)) * Fraction(4, 6)


def test_ll_fills_the_wire_with_flags() -> None:
    """Half of what LL sends is flags: its ring carries half the link's bytes a second, and leaves nothing of the link."""
    found = Nccl(GENERATIONS["nccl-volta"], "all_reduce", range(2), Links(trainers_per_node=2, intra=link(25 * GB), inter=None))
    choice = found.choice(1_000)
    assert (choice.method, choice.protocol, choice.gbps) == ("ring", "LL", Fraction(25, 2))
    assert set(found.route(1_000).loads) == {Fraction(1)}


def test_rings_take_all_interfaces_and_pass_uplinks_once() -> None:
    """Four nodes of 8 A100 in 2 racks oversubscribed 4 times: 8 x 25 GB/s a node, 2 x 200 / 4 = 100 an uplink, which 100 of it fill."""
    links = Links(
        trainers_per_node=8,
        intra=link(300 * GB),
        inter=link(25 * GB),
        nics_per_node=8,
        nodes=4,
        racks=Racks(nodes=2, oversubscription=4.0),
    )
    route = ampere("all_reduce", 32, links).route(2**32)
    loads = dict(zip(route.ports, route.loads, strict=True))
    assert loads["rack", 0, "out"] == loads["rack", 1, "in"] == 1
    assert {load for port, load in loads.items() if port[0] == "inter"} == {Fraction(1, 2)}
    assert len([port for port in loads if port[0] == "inter"]) == 2 * 4 * 8
    assert {load for port, load in loads.items() if port[0] == "intra"} == {Fraction(1, 3)}


def test_a_run_takes_nccls_time() -> None:
    """Two V100 of one node exchange 1 MB: the simulator takes the model's choice, and two communicators at once share the link."""
    layers = [(250_000, 100, 200)]
    cluster = {"nodes": 1, "trainers_per_node": 2, "intra": link(25 * GB), "collective": "nccl-volta"}
    links = Links(trainers_per_node=2, intra=link(25 * GB), inter=None)
    cost = Nccl(GENERATIONS["nccl-volta"], "all_reduce", range(2), links).route(1_000_000).cost
    alone = cost.latency_ns + round(cost.transfer_ns)
    assert in_ns(simulate(layered(layers, **cluster)), "exposed_comm_s") == [alone] * 2
    free = {"nccl_comm_num": 2, "sync_nccl_allreduce": False}
    both = carried_ns(simulate(layered([(250_000, 0, 0), *layers], strategy=free, **cluster)))
    assert max(end - start for start, end in both.values()) > alone * 1.5
