"""What a measured table adds beside the layers: copying gradients, transfers that compute slows, several in flight; by hand.

b (2000 bytes) is ready at 800, a (1000 bytes) with the end of the compute of 1000 ns, as in
``test_sim_by_hand``; among two trainers T(S) = 2 latency + S at 1 ns a byte.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from sim_cases import carried_ns, in_ns, link, profiled, with_profile

from fleetbench.cluster import Link
from fleetbench.profile import Communication
from fleetbench.result import RunResult
from sim.run import simulate

A_AND_B = [([250], [600], 100, 200), ([500], [400], 300, 400)]


def run(table: dict[str, Any], layers: Any = A_AND_B, in_flight: tuple[Link, ...] = (), **options: Any) -> RunResult:
    """A simulated run with such a table, and such gains of several in flight."""
    experiment, profile = profiled(layers, table, **options)
    if in_flight:
        communication = Communication(backend="gloo", trainers=2, link=link(8, 10), between="nodes", in_flight=in_flight)
        profile = dataclasses.replace(profile, communication=communication)
    return simulate(with_profile(experiment, profile))


def test_a_bucket_is_packed_before_it_sets_out() -> None:
    """90 ns for all 3000 bytes: b takes 60 of them and leaves at 860, a 30 and is there at 1090."""
    result = run({"pack": 90}, inter=link(8, 10))
    assert carried_ns(result) == {"all_reduce 0": (860, 2_880), "all_reduce 1": (2_880, 3_900)}
    assert in_ns(result, "backward_s") == [600 + 90, 600 + 90]
    assert {span.name: span.duration_ns for span in result.spans if span.rank == 0 and span.name.startswith("start")} == {
        "start 0": 60,
        "start 1": 30,
    }


def test_a_transfer_slows_while_its_rank_computes() -> None:
    """Half as fast: of b's 20 + 2000 ns 100 are done when compute ends, at 1000, and the rest by 2920; a follows."""
    result = run({"collective_contention": 1.0}, inter=link(8, 10))
    assert in_ns(result, "backward_s") == [600, 600]
    assert carried_ns(result) == {"all_reduce 0": (800, 2_920), "all_reduce 1": (2_920, 3_940)}


def test_both_slow_each_other() -> None:
    """Compute at half speed, collectives at half speed: of b's 2020 ns 200 are done when compute ends, at 1200."""
    result = run({"collective_contention": 1.0, "contention": 1.0}, inter=link(8, 10))
    assert in_ns(result, "backward_s") == [800, 800]
    assert carried_ns(result)["all_reduce 0"] == (800, 1_200 + 2_020 - 200)


FREE = {"sync_nccl_allreduce": False}
TWO = {"nccl_comm_num": 2, **FREE}
TOGETHER = [([250], [400], 300, 400), ([250], [400], 100, 200)]


@pytest.mark.parametrize(
    ("in_flight", "took"),
    [
        ((), (1_510, 2_010)),  # messages of 500 ns, in turn, and a latency of 10
        ((link(4, 10),), (1_510, 2_010)),
        ((link(6.4, 10),), (1_020, 1_262)),  # 313 ns of the link each, and no less than 500 of their own
        ((link(8, 10),), (1_020, 1_020)),
        ((link(2, 15),), (3_015, 4_015)),  # 1000 ns of the link each
    ],
)
@pytest.mark.parametrize("strategy", [TWO, FREE], ids=["on two communicators", "on one"])
def test_two_in_flight_see_what_was_measured(in_flight: tuple[Link, ...], took: tuple[int, int], strategy: dict[str, Any]) -> None:
    """Two buckets of 1000 bytes, ready together, on communicators of their own or on one: two messages each."""
    result = run({}, TOGETHER, in_flight, inter=link(8, 10), strategy=strategy)
    assert sorted(carried_ns(result).values()) == [(800, 800 + each) for each in took]
