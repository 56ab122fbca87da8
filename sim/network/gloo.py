"""gloo's collectives: a ring all-reduce with two segments in flight, and trees that pass whole buffers.

The model follows ``gloo/allreduce.cc``, ``broadcast.cc``, ``reduce.cc`` and ``transport/tcp/pair.cc``
(github.com/pytorch/gloo). An all-reduce of S bytes among P ranks has n = roundUp(max(ceil(S / 1 MiB), 2 P),
P) segments. In each of its two phases, a rank sends n - n / P segments, one after the other. A segment leaves
once its receiver has announced, in a message of a few bytes, that it has processed the segment before the
previous one. The announcement queues behind the data that the receiver itself is sending to its other
neighbour, of which at most about a millisecond lies in a device's queue (Linux, "TCP small queues").

With b = S / (n B) for a segment on the wire, alpha for a message's latency, and c for the time in which a
host copies and sums a segment, a phase takes at least

- 2 alpha + (n - n / P) b + c: the wire is never idle;
- a round trip, 2 alpha + b + c, for every two segments, and more if a segment on its way delays an
  announcement;
- 2 alpha + b + (n - n / P) c: the host is never idle.

A broadcast goes down a binomial tree, ceil(log2 P) (alpha + S / B). A reduce is a ring reduce-scatter whose P
parts the root gathers. An all-gather is a ring. gloo has no reduce-scatter for torch: ``ProcessGroupGloo``
does an all-reduce of a copy, and keeps a part.
"""

import math
from fractions import Fraction

from fleetbench.plan.longest_chain import Pace
from fleetbench.plan.operations import Collective
from fleetbench.quantities import MIB
from sim.clock import half_up
from sim.network.algorithms import Ranks, binomial, ring
from sim.network.links import Links
from sim.network.turns import Turn, Window, taken_in_turns
from sim.network.work import Cost, Route, Work

QUEUE_NS = 1_171_875
"""Time in ns to send the data that one connection leaves in a device's queue at most: 1 / 1024 s at 1.2 times
its rate (linux/net/ipv4/tcp_output.c, ``tcp_small_queue_check``; the rate is
``net.ipv4.tcp_pacing_ca_ratio``). In slow start, and if two packets are longer, it is up to twice as much;
queues that let other connections pass hold less."""
MOST_RANKS, MOST_SENDS = 16, 256
"""Largest number of ranks, and of segments that each sends per phase, for which every segment has its own turn."""


def num_segments(nbytes: int, ranks: int) -> int:
    """Return the number of segments of an all-reduce of ``nbytes`` among ``ranks`` ranks."""
    wanted = max(-(-nbytes // MIB), 2 * ranks)
    return -(-wanted // ranks) * ranks


class SegmentedRing:
    """gloo's ring all-reduce over ``ranks`` in their order."""

    def __init__(self, ranks: Ranks, links: Links) -> None:
        self._size = len(ranks)
        self._ring = ring("all_reduce", ranks, links)
        self._host_ns_per_byte = links.host_ns_per_byte
        self._queue_ns = QUEUE_NS if len({links.node(rank) for rank in ranks}) > 1 else 0

    def route(self, nbytes: int) -> Route:
        """Return the time and ports of an all-reduce of ``nbytes``.

        Each hop has two segments in flight, so the slowest hop decides the time.
        """
        plain = self._ring.route(nbytes)
        hops = [(self._cost(hop, nbytes), hop) for hop in self._ring.hops]
        cost, hop = max(hops, key=lambda found: found[0].latency_ns + found[0].transfer_ns)
        segments, transfer_ns = num_segments(nbytes, self._size), half_up(cost.transfer_ns)
        sends = segments * (self._size - 1) // self._size
        wire_ns = transfer_ns // (2 * sends)
        window = Window(hop.latency_ns, int(nbytes * self._host_ns_per_byte / segments), self._queue_ns)
        left_ns, done_ns = _phase(sends, wire_ns, window)
        last_ns = cost.latency_ns + transfer_ns - done_ns - left_ns
        if not wire_ns or last_ns < 0 or self._size > MOST_RANKS or sends > MOST_SENDS:
            return Route(cost, plain.ports, plain.loads, taken_in_turns(cost.latency_ns, transfer_ns, 2 * sends))
        others = [Turn(wire_ns, wire_ns, 0)] * (sends - 1)
        between, last = (Turn(wire_ns, wire_ns, then_ns) for then_ns in (done_ns - left_ns + hop.latency_ns, last_ns))
        return Route(cost, plain.ports, plain.loads, (*others, between, *others, last), hop.latency_ns, window)

    def _cost(self, hop: Pace, nbytes: int) -> Cost:
        segments = num_segments(nbytes, self._size)
        sends = segments * (self._size - 1) // self._size
        wire_ns = nbytes * self._size * hop.ns_per_byte / segments  # ``hop.ns_per_byte`` is the time of 1 / P byte
        host_ns = nbytes * self._host_ns_per_byte / segments
        unit = math.lcm(wire_ns.denominator, Fraction(host_ns).denominator)  # integers are many times faster than fractions
        wire, host, latency, queue = (round(unit * ns) for ns in (wire_ns, host_ns, hop.latency_ns, self._queue_ns))
        phase_ns = Fraction(_phase(sends, wire, Window(latency, host, queue))[1], unit)
        latency_ns = int(2 * (phase_ns - sends * wire_ns))
        return Cost(latency_ns, 2 * phase_ns - latency_ns)


def _phase(sends: int, wire: int, window: Window) -> tuple[int, int]:
    """Return when the last of ``sends`` segments has left, and when its receiver has processed it.

    All ranks begin at 0, and all times have the same unit. Times depend only on differences between earlier
    ones. Once these recur, times repeat with an offset, so whole cycles are skipped.
    """
    arrives, left, done, sent = window.latency_ns, 0, 0, 0
    seen: dict[tuple[int, int], tuple[int, int]] = {}
    while sent < sends:
        left = arrives + wire
        told, done = window.next(arrives, left, done)
        arrives, sent = max(left, told), sent + 1
        state = arrives - left, done - left
        if state in seen:
            before, was = seen[state]
            cycles = (sends - sent) // (sent - before)
            later = cycles * (left - was)
            arrives, left, done, sent = arrives + later, left + later, done + later, sent + cycles * (sent - before)
        seen[state] = sent, left
    return left, done


def gloo(kind: Collective, ranks: Ranks, links: Links, *, rows: bool = False) -> Work | SegmentedRing:
    """Return the model of a collective as gloo carries it out."""
    if kind in ("all_reduce", "reduce_scatter"):
        return SegmentedRing(ranks, links)
    if kind == "broadcast":
        return Work(links).rounds(binomial(ranks))
    if kind == "reduce":
        to_root = [(rank, ranks[0]) for rank in ranks[1:]]
        return ring("reduce_scatter", ranks, links).rounds([(Fraction(1, len(ranks)), to_root)])
    return ring(kind, ranks, links, rows=rows)
