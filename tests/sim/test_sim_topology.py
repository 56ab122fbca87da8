"""Interfaces, racks and nodes that are different: who shares what, worked out by hand.

A bucket of 1200 bytes is ready with the end of a compute of 300 ns; at 8 Gbit/s a byte takes 1 ns.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import pytest
from sim_cases import carried_ns, in_ns, layered, link

from fleetbench.cluster import Link, NodeOverride, Racks, Site
from fleetbench.errors import ConfigError
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.result import RunResult
from fleetbench.stragglers import SlowRank
from sim.run import simulate

ONE = [(300, 100, 200)]
TWO = [(300, 0, 0), (300, 100, 200)]
FREE = {"nccl_comm_num": 2, "sync_nccl_allreduce": False}
SCATTER = {"use_hierarchical_allreduce": True, "hierarchical_variant": "reduce_scatter"}


def run(layers: Any = ONE, **options: Any) -> RunResult:
    """A run of such layers; see ``sim_cases``."""
    return simulate(layered(layers, **options))


@pytest.mark.parametrize(("nics", "took"), [(1, [8_100, 10_100, 12_100]), (2, [6_100, 4_200, 8_100]), (3, [4_200] * 3), (4, [4_200] * 3)])
def test_rails_carry_the_rings_of_their_local_ranks(nics: int, took: list[int]) -> None:
    """Three rings between 2 nodes, two messages of 2000 ns each, take turns on one interface; of two interfaces, 0 and 2 share one."""
    cluster = {"nodes": 2, "trainers_per_node": 3, "intra": link(8, 10), "inter": link(0.8, 100), "nics_per_node": nics}
    result = run(strategy=SCATTER, **cluster)
    for rank in range(6):
        start, end = carried_ns(result, rank)["all_reduce 0"]
        assert end - start == took[rank % 3]


@pytest.mark.parametrize(("oversubscription", "slower"), [(1.0, 1), (2.0, 1), (4.0, 2), (5.0, Fraction(5, 2))])
def test_a_ring_over_racks_has_the_uplink_at_most(oversubscription: float, slower: Fraction) -> None:
    """Two racks of two nodes: the uplink carries 16 Gbit/s over the oversubscription, and one ring needs 8: 2 x 3/4 x 1200 bytes."""
    result = run(nodes=4, inter=link(8), racks=Racks(nodes=2, oversubscription=oversubscription))
    assert in_ns(result, "exposed_comm_s") == [1_800 * slower] * 4


def lossy(gbit_per_s: float, latency_ns: int, loss: float) -> Link:
    """A link that loses packets."""
    return dataclasses.replace(link(gbit_per_s, latency_ns), loss=loss)


@pytest.mark.parametrize(("down_ns", "took"), [(50, 2 * 1_200 + 140), (800, 1_200 + 600 + 140 + 1_010)])
def test_links_between_sites_differ_by_direction(down_ns: int, took: int) -> None:
    """Two sites of a node: 600 bytes at 2 ns a byte and 140 ns of latency one way, at 1 ns a byte and more latency back.

    Rank 0 sends two messages one after the other; or the second waits for rank 1's first, which has waited for rank 0's first.
    """
    sites = (Site(nodes=1, up=link(4, 100), down=link(8, down_ns)), Site(nodes=1, up=link(16, 200), down=link(8, 30)))
    result = run(inter=link(8, 10), sites=sites)
    assert in_ns(result, "exposed_comm_s") == [took] * 2


def test_lost_packets_limit_a_connection() -> None:
    """A share of 0.015 lost, a round trip of 14,480 ns: sqrt(3/2) / sqrt(0.015) = 10 segments of 1448 bytes in it, 1 ns a byte.

    So a ring goes at 1 ns a byte on a link of a tenth, and two communicators, which have a connection each, at 1 ns a byte each.
    """
    wide = lossy(80, 7_240, 0.015)
    sites = (Site(nodes=1, up=wide, down=link(80)), Site(nodes=1, up=wide, down=link(80)))
    result = run(inter=link(80), sites=sites)
    assert in_ns(result, "exposed_comm_s") == [1_200 + 2 * 7_240] * 2
    both = run(TWO, inter=link(80), sites=sites, strategy=FREE)
    assert {end - start for start, end in carried_ns(both).values()} == {1_200 + 2 * 7_240}


@pytest.mark.parametrize(
    ("cluster", "match"),
    [
        ({"nodes": 3, "sites": (Site(nodes=1, up=link(1), count=2),)}, r"sites.*3 nodes.*2 nodes"),
        ({"sites": (Site(nodes=1, up=link(1), count=2),), "collective": "nccl-hopper"}, r"collective.*whole collectives"),
        ({"sites": (Site(nodes=1, up=link(1), count=2),), "collective": "measured"}, r"collective.*whole collectives"),
    ],
)
def test_sites_that_do_not_fit_are_refused(cluster: dict[str, Any], match: str) -> None:
    """With both numbers, or the reason."""
    with pytest.raises(ConfigError, match=match):
        run(inter=link(8), **cluster)


@pytest.mark.parametrize("change", [{"latency": 0}, {"framing": "roce"}, {"mtu": 9000}, {"loss": 0.2}])
def test_losses_without_a_tcp_window_are_refused(change: dict[str, Any]) -> None:
    """Loss counts by round trip, for packets of TCP of the usual size, and while windows count more than timeouts."""
    with pytest.raises(ConfigError, match="loss"):
        Link(**{"bandwidth": BitsPerSecond(10**9), "latency": Nanoseconds(1_000), "loss": 0.01} | change)


def test_the_last_override_that_says_a_thing_counts() -> None:
    """A node named twice has the later link and the later slowdown, and keeps what the later one leaves open."""
    both, link_of_1 = NodeOverride(nodes=(0, 1), inter=link(4), slowdown=3.0), NodeOverride(nodes=(1,), inter=link(2))
    result = run(nodes=2, inter=link(8), node_overrides=(both, link_of_1, NodeOverride(nodes=(0,), slowdown=2.0)))
    assert in_ns(result, "forward_s") == [200, 300]
    assert carried_ns(result)["all_reduce 0"] == (900, 900 + 4 * 1_200)


def test_a_slow_node_computes_slowly_beside_its_stragglers() -> None:
    """Half as long again on node 1, where rank 1 takes twice as long besides: 3 x 300; a node may be fast, too."""
    result = run(inter=link(8), node_overrides=(NodeOverride(nodes=(1,), slowdown=1.5),), stragglers=(SlowRank(ranks=(1,), factor=2.0),))
    assert in_ns(result, "arrival_s") == [300, 900]
    fast = run(inter=link(8), node_overrides=(NodeOverride(nodes=(0,), slowdown=0.5),))
    assert in_ns(fast, "arrival_s") == [150, 300]
    assert in_ns(fast, "wait_s") == [150, 0]


def took(result: RunResult, rank: int) -> int:
    """A rank's all-reduce."""
    start, end = carried_ns(result, rank)["all_reduce 0"]
    return end - start
