"""Algorithms: closed forms, and message-by-message runs that move real numbers over ports of their own."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_cases import link

from fleetbench.plan.longest_chain import Pace, around_ring, envelope
from sim.network.algorithms import ring
from sim.network.gloo import gloo
from sim.network.links import Links

SIZES = st.integers(0, 10**8)
LATENCIES = st.integers(0, 10**6)


class Wire:
    """Ranks that send one message after the other and receive one after the other, at 1 ns a byte, each ``latency_ns`` late."""

    def __init__(self, ranks: int, latency_ns: int) -> None:
        self.latency_ns = latency_ns
        self.out_free = [Fraction(0)] * ranks
        self.in_free = [Fraction(0)] * ranks

    def send(self, sender: int, receiver: int, nbytes: Fraction, ready_ns: Fraction) -> Fraction:
        """When a message that may set out at ``ready_ns`` has arrived."""
        start = max(ready_ns, self.out_free[sender], self.in_free[receiver])
        self.out_free[sender] = self.in_free[receiver] = start + nbytes
        return start + nbytes + self.latency_ns


def summed(ranks: int) -> int:
    """What every rank must hold in the end: rank r gives 10^r."""
    return sum(10**rank for rank in range(ranks))


def run_ring(ranks: int, nbytes: int, wire: Wire) -> Fraction:
    """Patarasuk and Yuan's ring: a rank passes on the chunk that it just got, added up, then whole."""
    data = [[10**rank] * ranks for rank in range(ranks)]
    ready = [Fraction(0)] * ranks
    for step in range(2 * (ranks - 1)):
        sent = [((rank - step) % ranks, data[rank][(rank - step) % ranks]) for rank in range(ranks)]
        arrivals = [wire.send(rank, (rank + 1) % ranks, Fraction(nbytes, ranks), ready[rank]) for rank in range(ranks)]
        for rank, (chunk, value) in enumerate(sent):
            own = data[(rank + 1) % ranks]
            own[chunk] = own[chunk] + value if step < ranks - 1 else value
        ready = [max(ready[rank], arrivals[rank - 1]) for rank in range(ranks)]
    assert all(chunk == summed(ranks) for own in data for chunk in own)
    return max(ready)


@pytest.mark.parametrize("ranks", [2, 3, 6, 8, 17])
@pytest.mark.parametrize(("nbytes", "latency_ns"), [(1, 1_000), (48_000, 700), (10**7, 3)])
def test_an_all_reduce_takes_what_its_messages_take(ranks: int, nbytes: int, latency_ns: int) -> None:
    """Message by message, with a sum that comes out right, the last rank has everything when the route says."""
    found = ring("all_reduce", range(ranks), Links(trainers_per_node=1, intra=None, inter=link(8, latency_ns))).route(nbytes)
    assert run_ring(ranks, nbytes, Wire(ranks, latency_ns)) == found.cost.total_ns
    sent = sum(load * found.cost.transfer_ns for port, load in zip(found.ports, found.loads, strict=True) if port[2] == "out")
    assert sent == 2 * (ranks - 1) * nbytes


@given(st.integers(2, 40), SIZES, LATENCIES)
def test_a_broadcast_of_gloo_is_its_closed_form(ranks: int, nbytes: int, latency_ns: int) -> None:
    """A binomial tree of whole buffers: ceil(log2 P) (alpha + S)."""
    links = Links(trainers_per_node=1, intra=None, inter=link(8, latency_ns))
    assert gloo("broadcast", range(ranks), links).route(nbytes).cost.total_ns == ceil(log2(ranks)) * (latency_ns + nbytes)


def run_chains(rounds: list[list[tuple[int, int, int, Fraction]]], ranks: int, *, waits: bool = False) -> Fraction:
    """When all is over: messages of sender, receiver, latency and time on the port, round by round.

    A rank sends when its port is free and what it received in rounds before has come, or, where it ``waits``, when both
    ends are done with all messages before.
    """
    free, came = [Fraction(0)] * ranks, [Fraction(0)] * ranks
    for messages in rounds:
        arrivals = []
        for sender, receiver, latency_ns, port_ns in messages:
            begin_ns = max(free[sender], came[sender], came[receiver] if waits else 0)
            free[sender] = begin_ns + port_ns
            arrivals += [(end, begin_ns + port_ns + latency_ns) for end in ((sender, receiver) if waits else (receiver,))]
        for end, at_ns in arrivals:
            came[end] = max(came[end], at_ns)
    return max(came)


HOPS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 400)), min_size=2, max_size=9)


@given(HOPS, st.sampled_from([0, 1, 10**3, 10**5, 10**7, 123_456_789]), st.booleans())
def test_a_ring_of_any_hops_takes_what_its_messages_take(hops: list[tuple[int, int]], nbytes: int, both: bool) -> None:
    """Hops of any latency and bandwidth: message by message, each waiting for its port and for what it passes on."""
    ranks = len(hops)
    steps = (2 if both else 1) * (ranks - 1)
    times = [(latency_ns, Fraction(nbytes * 8, ranks * rate)) for latency_ns, rate in hops]
    expected = run_chains([[(rank, (rank + 1) % ranks, *times[rank]) for rank in range(ranks)]] * steps, ranks)
    paces = [Pace(latency_ns, Fraction(8, ranks * rate)) for latency_ns, rate in hops]
    assert max(pace.at(1, nbytes) for pace in envelope(around_ring(steps, paces))) == expected


@given(st.integers(1, 4), st.integers(2, 6), SIZES, LATENCIES)
def test_a_tree_over_unequal_hops_takes_what_its_messages_take(per_node: int, nodes: int, nbytes: int, latency_ns: int) -> None:
    """Fast links inside nodes, slow ones between: a broadcast by hand-made rounds."""
    links = Links(trainers_per_node=per_node, nics_per_node=per_node, intra=link(80, latency_ns // 2), inter=link(8, latency_ns))
    ranks = per_node * nodes

    def message(sender: int, receiver: int) -> tuple[int, int, int, Fraction]:
        inside = sender // per_node == receiver // per_node
        return sender, receiver, latency_ns // 2 if inside else latency_ns, Fraction(nbytes, 10 if inside else 1)

    steps = [2**power for power in reversed(range(20)) if 2**power < ranks]
    rounds = [[message(at, at + step) for at in range(0, ranks, 2 * step) if at + step < ranks] for step in steps]
    assert gloo("broadcast", range(ranks), links).route(nbytes).cost.total_ns == run_chains(rounds, ranks, waits=True)


def test_latencies_of_a_ring_add_up_and_only_its_slowest_port_counts() -> None:
    """2 nodes of 2, 1 us inside and 10 us between: a chunk of no size passes 1 + 10 + 1 + 10 + 1 + 10 us at most, not 6 x 10."""
    links = Links(trainers_per_node=2, intra=link(80, 1_000), inter=link(8, 10_000))
    assert ring("all_reduce", range(4), links).route(0).cost.total_ns == 3 * 11_000
    # 40 MB: the port between nodes is busy for 6 x 10 ms; what is not hidden is one message's latency
    assert ring("all_reduce", range(4), links).route(40_000_000).cost.total_ns == 6 * 10_000_000 + 10_000
