"""gloo's collectives: its segments sent one by one, with sums that come out right."""

from __future__ import annotations

from fractions import Fraction

import pytest
from sim_cases import in_ns, layered, link

from fleetbench.plan.operations import Collective
from sim.network.gloo import gloo, num_segments
from sim.network.links import Links
from sim.run import simulate

MIB = 2**20


def took(kind: Collective, ranks: int, nbytes: int, latency_ns: int, host_ns_per_byte: Fraction = Fraction(0)) -> Fraction:
    """Among nodes of one trainer, at 1 ns a byte."""
    links = Links(trainers_per_node=1, intra=None, inter=link(8, latency_ns), host_ns_per_byte=host_ns_per_byte)
    cost = gloo(kind, range(ranks), links).route(nbytes).cost
    return cost.latency_ns + cost.transfer_ns


def run(ranks: int, nbytes: int, latency_ns: int | list[int], host_ns_per_byte: Fraction = Fraction(0), per_node: int = 1) -> Fraction:
    """Every rank's loop, segment by segment: issue a send and a receive, after those before the last have ended.

    A receive is told to the sender, and only then its segment leaves. Between nodes, what is told waits until what lies in the node's
    device has left, 1.17 ms at most, and arrives a latency later: the node's last rank sends there. A rank's sends
    follow each other on its wire at 1 ns a byte, and arrive a latency later, that of the rank's hop to the next. What came is
    copied and summed, one segment after the other.
    """
    hops_ns = latency_ns if isinstance(latency_ns, list) else [latency_ns] * ranks
    segments = num_segments(nbytes, ranks)
    per_rank = segments // ranks
    size = Fraction(nbytes, segments)
    data = [[10**rank] * segments for rank in range(ranks)]
    ready = [Fraction(0)] * ranks
    wire_free = [Fraction(0)] * ranks
    for phase in ("reduce", "gather"):
        issued: list[list[Fraction]] = [[] for _ in range(ranks)]
        begun: list[list[Fraction]] = [[] for _ in range(ranks)]
        sent: list[list[Fraction]] = [[] for _ in range(ranks)]
        done: list[list[Fraction]] = [[] for _ in range(ranks)]
        for turn in range(segments - per_rank):
            moving = []
            for rank in range(ranks):
                before = [sent[rank][turn - 2], done[rank][turn - 2]] if turn >= 2 else []
                issued[rank].append(max([ready[rank], *before, *issued[rank][-1:]]))
                chunk = (rank + (phase == "gather") - turn // per_rank) % ranks
                segment = chunk * per_rank + turn % per_rank
                moving.append((rank, segment, data[rank][segment]))
            for rank, segment, value in moving:
                receiver = (rank + 1) % ranks
                asks_ns = issued[receiver][turn]
                queued_ns = Fraction(0)
                if rank // per_node != receiver // per_node:
                    last = receiver // per_node * per_node + per_node - 1
                    device = zip(begun[last][:turn], sent[last][:turn], strict=True)
                    queued_ns = max([queued_ns, *(left - asks_ns for joined, left in device if joined <= asks_ns)])
                waited_for_ns = asks_ns + min(queued_ns, 1_171_875) + hops_ns[rank]
                begun[rank].append(max(issued[rank][-1], waited_for_ns))
                wire_free[rank] = max(wire_free[rank], begun[rank][-1]) + size
                sent[rank].append(wire_free[rank])
                came_ns = wire_free[rank] + hops_ns[rank]
                done[receiver].append(max([came_ns, *done[receiver][-1:]]) + size * host_ns_per_byte)
                own = data[receiver]
                own[segment] = own[segment] + value if phase == "reduce" else value
        ready = [max(sent[rank][-1], done[rank][-1]) for rank in range(ranks)]
    assert {segment for own in data for segment in own} == {sum(10**rank for rank in range(ranks))}
    return max(ready)


@pytest.mark.sample(31)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("nbytes", [1_000, 5 * MIB, 40 * MIB, 100 * MIB + 7])
@pytest.mark.parametrize("latency_ns", [0, 50, 40_000, 2_000_000, 30_000_000])
@pytest.mark.parametrize("host_ns_per_byte", [Fraction(0), Fraction(1, 3), Fraction(5, 4), Fraction(7)])
def test_an_all_reduce_takes_what_its_segments_take(ranks: int, nbytes: int, latency_ns: int, host_ns_per_byte: Fraction) -> None:
    """Segment by segment, two in flight, the last rank has the whole sum when the route says, short latencies and long."""
    assert took("all_reduce", ranks, nbytes, latency_ns, host_ns_per_byte) == run(ranks, nbytes, latency_ns, host_ns_per_byte)


def test_segments_by_hand() -> None:
    """At least two a rank, at most 1 MiB each, and as many for every rank: 8 for 4 ranks and 5 MiB, 12 for 10 MiB."""
    assert [num_segments(size * MIB, 4) for size in (0, 5, 8, 10, 64)] == [8, 8, 8, 12, 64]
    assert num_segments(8 * MIB + 1, 4) == 12


def test_a_run_takes_gloos_time() -> None:
    """Four nodes, 8 segments of 50 bytes and 100 ns: two phases of 3 (200 + 50) + 50 ns, where the plain ring takes 6 (100 + 100)."""
    layers, cluster = [(100, 100, 200)], {"nodes": 4, "inter": link(8, 100)}
    assert in_ns(simulate(layered(layers, collective="gloo", **cluster)), "exposed_comm_s") == [1_600] * 4
    assert in_ns(simulate(layered(layers, **cluster)), "exposed_comm_s") == [1_200] * 4
