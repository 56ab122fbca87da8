"""Routes: who carries collectives out, what is worked out once, and what was measured."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import pytest
from sim_cases import link

from fleetbench.cluster import CollectiveAlgorithm
from fleetbench.measurements import CollectivePoint
from fleetbench.plan.operations import Operation
from fleetbench.quantities import Bytes, Nanoseconds
from sim.network.links import Hop, Links
from sim.network.measured import Measured, Times
from sim.network.routes import Routes

EVERY: tuple[CollectiveAlgorithm, ...] = (
    "ring",
    "gloo",
    "nccl-volta",
    "nccl-ampere",
    "nccl-hopper",
)


def _points(*sizes: tuple[int, int]) -> tuple[CollectivePoint, ...]:
    return tuple(CollectivePoint(nbytes=Bytes(size), took=Nanoseconds(took)) for size, took in sizes)


POINTS = _points((1_000, 5_000), (2_000, 5_500), (10_000, 11_900))


def times(points: tuple[CollectivePoint, ...]) -> Times:
    """Their times by size."""
    return Times((point.nbytes, point.took) for point in points)


class Counted(Links):
    """Links that count the hops they were asked for."""

    asked = 0

    def hop(self, sender: int, receiver: int) -> Hop:
        """See ``Links``."""
        type(self).asked += 1
        return Links.hop(self, sender, receiver)


def reduce_of(nbytes: int, **options: Any) -> Operation:
    """An all-reduce of gradients."""
    return Operation(id=0, kind="all_reduce", payload="gradient", nbytes=nbytes, **options)


def test_a_ring_of_ten_thousand_is_worked_out_once_and_each_hop_once() -> None:
    """A hop for each rank however many sizes are asked for: nothing of it grows with the square of the ranks."""
    ranks = tuple(range(10_000))
    links = Counted(trainers_per_node=8, intra=link(2_400), inter=link(200), nics_per_node=8)
    routes = Routes(links)
    Counted.asked = 0
    found = [routes.of(reduce_of(size), ranks) for size in range(1, 100)]
    assert Counted.asked == len(ranks)
    assert len(found[0].ports) == 2 * (10_000 - 1_250) + 2 * 1_250
    assert all(route.loads is found[0].loads for route in found)
    assert routes.of(reduce_of(7), ranks) is found[6]


@pytest.mark.parametrize("collective", EVERY)
def test_every_kind_of_collective_has_a_way(collective: str) -> None:
    """Whoever carries them out: each kind takes time, a larger one more, and loads no port beyond what it carries."""
    links = Links(trainers_per_node=2, intra=link(80, 10), inter=link(8, 100), collective=collective)
    for kind in ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather"):
        for ranks in (tuple(range(6)), (0, 1), (0, 2, 4)):
            operation = Operation(id=0, kind=kind, payload="gradient", nbytes=10**6)  # type: ignore[arg-type]  # one of the kinds
            small, large = (Routes(links).of(dataclasses.replace(operation, nbytes=size), ranks) for size in (10**6, 10**8))
            assert 0 < small.cost.latency_ns + small.cost.transfer_ns < large.cost.latency_ns + large.cost.transfer_ns
            assert all(0 < load <= 1 for load in large.loads)
            assert max(large.loads) > Fraction(1, 20)
            assert len(large.ports) == len(set(large.ports)) == len(large.loads)
    rows = Operation(id=0, kind="all_gather", payload="rows", nbytes=10**6)
    whole = Operation(id=0, kind="all_gather", payload="gradient", nbytes=10**6)
    ranks = (0, 1, 2, 3)
    assert Routes(links).of(rows, ranks).cost.transfer_ns > Routes(links).of(whole, ranks).cost.transfer_ns


def test_a_measured_all_reduce_by_hand() -> None:
    """On the points' lines: 5000 at 1000 bytes, 5250 at 1500, 8700 at 6000; below, the first; beyond, 0.8 ns a byte on."""
    found = times(POINTS)
    assert [found.ns(size) for size in (1_000, 1_500, 2_000, 6_000, 10_000, 20_000)] == [5_000, 5_250, 5_500, 8_700, 11_900, 19_900]
    assert found.ns(0) == found.ns(10) == 5_000
    assert times((*POINTS, *_points((9_999, 11_950)))).ns(20_000) == 19_900
    cost = Measured("all_reduce", POINTS, (0, 1), Links(trainers_per_node=1, intra=None, inter=link(8, 10))).route(6_000).cost
    assert (cost.latency_ns, cost.transfer_ns) == (20, 8_680)
