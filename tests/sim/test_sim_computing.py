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


def test_what_several_steps_share_is_added_instead() -> None:
    """Merging 2 steps: both add their gradients up in 90 ns; the second takes them from there in 90, and packs nothing."""
    result = run({"pack": 90}, steps=2, inter=link(8, 10), strategy={"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}})
    backward = in_ns(result, "backward_s")
    assert backward[:2] == [690, 780]


def test_local_steps_pack_nothing() -> None:
    """Deltas are packed with the merge, which the table counts by itself; a local update has a time of its own."""
    strategy = {"localsgd": True, "localsgd_configs": {"k_steps": 2}}
    result = run({"pack": 90, "update": 50, "local_update": 70, "merge": 30}, steps=4, inter=link(8, 10), strategy=strategy)
    assert in_ns(result, "backward_s") == [600] * 8
    assert set(in_ns(result, "update_s")) == {70, 100}
    without = run({"pack": 90, "update": 50, "merge": 30}, steps=4, inter=link(8, 10), strategy=strategy)
    assert set(in_ns(without, "update_s")) == {50, 80}


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


def test_three_share_what_two_had() -> None:
    """Only two were measured, at 6 of 8 Gbit/s each: messages of three of 1000 bytes take 333 ns of the link, and 15 ns of latency."""
    layers = [([250], [400], 300, 400), ([250, 250], [400, 400], 100, 200)]
    strategy = {"nccl_comm_num": 3, "sync_nccl_allreduce": False}
    result = run({}, layers, (link(6, 10),), inter=link(8, 10), strategy=strategy)
    assert [end - start for start, end in sorted(carried_ns(result).values())] == [333 * turn + 15 for turn in (4, 5, 6)]
