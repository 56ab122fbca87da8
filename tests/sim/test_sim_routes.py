"""Routes: who carries collectives out, what is worked out once, and what was measured."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_cases import carried_ns, layered, link, profiled, with_profile

from fleetbench.cluster import CollectiveAlgorithm
from fleetbench.cluster import Measured as Declared
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.measurements import CollectivePoint
from fleetbench.plan.operations import Operation
from fleetbench.profile import Communication
from fleetbench.quantities import Bytes, Nanoseconds
from sim.network.links import Hop, Links
from sim.network.measured import Measured, Times
from sim.network.routes import Routes
from sim.run import simulate

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


@pytest.mark.parametrize("collective", EVERY)
def test_the_file_says_who_carries_collectives_out(collective: CollectiveAlgorithm) -> None:
    """``cluster.collective`` reaches the run: its bucket takes what its route says."""
    cluster = {"nodes": 2, "trainers_per_node": 4, "intra": link(800, 100), "inter": link(80, 1_000), "collective": collective}
    result = simulate(layered([(300_000, 100, 200)], **cluster))
    links = Links(trainers_per_node=4, intra=link(800, 100), inter=link(80, 1_000), collective=collective)
    cost = Routes(links).of(reduce_of(1_200_000), tuple(range(8))).cost
    start, end = carried_ns(result)["all_reduce 0"]
    assert abs(end - start - cost.latency_ns - cost.transfer_ns) <= Fraction(1, 2)


def test_rows_are_not_looked_up_among_measured_gathers() -> None:
    """What was measured are equal parts of a whole; each rank's own rows go around the ring, measured or not."""
    points = tuple(CollectivePoint(nbytes=Bytes(nbytes), took=Nanoseconds(nbytes)) for nbytes in (1_000, 10**6))
    gathers = Declared(kind="all_gather", trainers=4, points=points)
    known = Links(trainers_per_node=4, intra=link(80, 10), inter=None, collective="measured", declared=(gathers,))
    ring = dataclasses.replace(known, collective="ring", declared=())
    rows = Operation(id=0, kind="all_gather", payload="rows", nbytes=10**6)
    assert Routes(known).of(rows, (0, 1, 2, 3)).cost == Routes(ring).of(rows, (0, 1, 2, 3)).cost
    whole = dataclasses.replace(rows, payload="gradient")
    assert Routes(known).of(whole, (0, 1, 2, 3)).cost.total_ns == 10**6


def test_a_measured_all_reduce_by_hand() -> None:
    """On the points' lines: 5000 at 1000 bytes, 5250 at 1500, 8700 at 6000; below, the first; beyond, 0.8 ns a byte on."""
    found = times(POINTS)
    assert [found.ns(size) for size in (1_000, 1_500, 2_000, 6_000, 10_000, 20_000)] == [5_000, 5_250, 5_500, 8_700, 11_900, 19_900]
    assert found.ns(0) == found.ns(10) == 5_000
    assert times((*POINTS, *_points((9_999, 11_950)))).ns(20_000) == 19_900
    cost = Measured("all_reduce", POINTS, (0, 1), Links(trainers_per_node=1, intra=None, inter=link(8, 10))).route(6_000).cost
    assert (cost.latency_ns, cost.transfer_ns) == (20, 8_680)


@given(st.integers(0, 50_000), st.integers(0, 50_000))
def test_a_measured_all_reduce_does_not_fall(small: int, large: int) -> None:
    """Rising points make a rising line."""
    found = times(POINTS)
    small, large = sorted((small, large))
    assert found.ns(small) <= found.ns(large)


def test_a_run_takes_what_its_profile_measured() -> None:
    """A bucket of 1500 bytes takes 5250 ns; with other numbers of trainers, or without points, the profile is refused with a hint."""
    experiment, profile = profiled([([375], [200], 100, 200)], {}, inter=link(8, 10), collective="measured")
    communication = Communication(backend="gloo", trainers=2, link=link(8, 10), between="nodes", points=POINTS)
    profile = dataclasses.replace(profile, communication=communication)
    start, end = carried_ns(simulate(with_profile(experiment, profile)))["all_reduce 0"]
    assert end - start == 5_250
    for wrong in (dataclasses.replace(communication, trainers=3), dataclasses.replace(communication, points=POINTS[:1]), None):
        with pytest.raises(ConfigError, match=r"(?s)cluster\.collective.*HINT"):
            simulate(with_profile(experiment, dataclasses.replace(profile, communication=wrong)))


def test_points_of_a_cluster_go_before_those_of_its_profile() -> None:
    """The same 5250 ns without a profile of collectives; among other trainers than were measured it is refused."""
    text = [{"nbytes": f"{point.nbytes} B", "took": f"{point.took} ns"} for point in POINTS]

    def experiment(nodes: int, trainers: int, collective: str = "measured") -> Experiment:
        layers = [{"name": "block", "params": 375, "forward": "100 ns", "backward": "200 ns"}]
        cluster = {"nodes": nodes, "collective": collective, "inter": {"bandwidth": "8 Gbit/s", "latency": "10 ns"}}
        cluster["measured"] = {"trainers": trainers, "points": text}
        return Experiment.from_dict(
            {
                "schema": 1,
                "name": "points",
                "workload": {"model": "layers", "layers": layers, "steps": 1},
                "cluster": cluster,
                "run": {"warmup_steps": 0},
            }
        )

    start, end = carried_ns(simulate(experiment(2, 2)))["all_reduce 0"]
    assert end - start == 5_250
    with pytest.raises(ConfigError, match=r"(?s)among 3 trainers.*3 sizes among 2.*HINT"):
        simulate(experiment(3, 2))
    with pytest.raises(ConfigError, match=r"(?s)is for measured and nccl- collectives.*HINT"):
        experiment(2, 2, "ring")
