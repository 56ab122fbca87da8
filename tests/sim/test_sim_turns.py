"""Collectives in flight together take turns on their ports: against messages one by one, closed forms, and by hand."""

from __future__ import annotations

from fractions import Fraction
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from message_events import AllReduce, Gloo, rings
from sim_cases import carried_ns, in_ns, layered, link

from sim.arrays.event_loop import Meetings
from sim.network.algorithms import ring
from sim.network.links import Links
from sim.run import Engine, simulate

MS = 10**6
Times = list[tuple[int, int]]


def in_flight(algorithm: Any, ranks: int, sizes: list[int], apart_ns: list[int], wire: tuple[float, int], engine: Engine = "auto") -> Times:
    """Starts and ends of all-reduces of so many bytes on a communicator each, each ready so long after the one before."""
    layers = [(nbytes // 4, 0, apart) for nbytes, apart in zip(sizes, apart_ns, strict=True)][::-1]
    layers[0] = (layers[0][0], 100, layers[0][2])
    strategy = {"sync_nccl_allreduce": False, "nccl_comm_num": len(sizes)}
    experiment = layered(layers, nodes=ranks, inter=link(*wire), collective=algorithm, strategy=strategy, backend="nccl")
    found = carried_ns(simulate(experiment, engine=engine))
    return [found[f"all_reduce {number}"] for number in range(len(sizes))]


def drawn(random: Random, ranks: int, number: int) -> tuple[list[int], list[int], tuple[float, int]]:
    """Sizes, how long they are apart, and the link: 0.1 to 30 ms, 0.1 to 50 Gbit/s, 10 kB to 16 MB."""
    latency_ns, gbit_per_s = round(10 ** random.uniform(5, 7.4)), round(10 ** random.uniform(-1, 1.7), 3)
    size = 10 ** random.uniform(4, 7.2)
    alike = random.random() < 0.5
    sizes = [4 * round(size * (1 if alike else 10 ** random.uniform(-1, 0)) / 4) for _ in range(number)]
    whole_ns = 2 * (ranks - 1) * (max(sizes) / ranks * 8 / gbit_per_s + latency_ns)
    spread = random.choice([0, 0.1, 1])
    return sizes, [round(random.uniform(0, spread * whole_ns / number)) for _ in sizes], (gbit_per_s, latency_ns)


@pytest.mark.sample(3)
@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("algorithm", ["ring", "gloo"])
def test_steps_take_what_their_messages_take(algorithm: str, ranks: int, number: int) -> None:
    """Sizes and starts alike and not, latencies long and short: the last end is that of messages one by one within 3 %."""
    random = Random(f"{algorithm} {ranks} {number}")  # noqa: S311  # it has to be repeatable
    for _ in range(6):
        sizes, apart_ns, wire = drawn(random, ranks, number)
        found = in_flight(algorithm, ranks, sizes, apart_ns, wire)
        all_reduces = [AllReduce(start, nbytes) for (start, _), nbytes in zip(found, sizes, strict=True)]
        ns_per_byte = 8 / Fraction(str(wire[0]))
        if algorithm == "ring":
            expected = rings(all_reduces, ranks, wire[1], ns_per_byte)
        else:
            expected = Gloo(all_reduces, ranks, wire[1], ns_per_byte).ends()
        begin = min(start for start, _ in found)
        took_ns, expected_ns = max(end for _, end in found) - begin, max(expected) - begin
        assert took_ns == pytest.approx(float(expected_ns), rel=0.03), (sizes, apart_ns, wire)


@pytest.mark.parametrize("engine", ["reference", "vector"])
def test_one_collectives_bytes_travel_in_anothers_latency(engine: Engine) -> None:
    """Four of 5 MB among four at 1 Gbit/s and 30 ms: 24 messages of 10 ms and a latency, 270 ms, which one alone takes 240 of."""
    for number, took_ms in ((1, 240), (2, 250), (4, 270), (5, 330)):
        found = in_flight("ring", 4, [5_000_000] * number, [0] * number, (1, 30 * MS), engine)
        assert max(end for _, end in found) - 100 == took_ms * MS


@given(ranks=st.integers(2, 40), number=st.integers(1, 4), busy_ns=st.integers(1_000, 10**6), latency_ns=st.integers(0, 10**6))
def test_rings_alike_are_their_closed_form(ranks: int, number: int, busy_ns: int, latency_ns: int) -> None:
    """By messages of x ns and a ns of latency, n each: max(n (x + a) + (k - 1) x, k n x + a), also where a turn stands for several."""
    links = Links(trainers_per_node=1, intra=None, inter=link(8, latency_ns))
    route = ring("all_reduce", range(ranks), links).route(busy_ns * ranks)
    ends = Meetings([route] * number, [[index] for index in range(number)], links).carry([0] * number)[1]
    messages = 2 * (ranks - 1)
    alone_ns = messages * (busy_ns + latency_ns)
    expected = max(alone_ns + (number - 1) * busy_ns, number * messages * busy_ns + latency_ns)
    assert abs(max(ends) - expected) <= 0.01 * expected
    assert ends[0] >= alone_ns


def test_a_step_is_the_same_by_both_engines_where_nothing_is_in_step() -> None:
    """Five buckets that become ready while others travel, gloo's queues of two on two communicators: equal to the nanosecond."""
    strategy = {"sync_nccl_allreduce": False, "nccl_comm_num": 2}
    layers = [(70_000, 30_000, 40_000), (20_000, 10_000, 90_000), (90_000, 5_000, 7_000), (1_000, 0, 300), (50_000, 10, 0)]
    for collective in ("ring", "gloo", "nccl-hopper"):
        experiment = layered(layers, nodes=5, inter=link(7.3, 40_000), steps=3, strategy=strategy, collective=collective)
        exposed = [in_ns(simulate(experiment, engine=engine), "exposed_comm_s") for engine in ("reference", "vector")]
        assert exposed[0] == exposed[1]
