"""gloo's collectives: a ring all-reduce in segments of which two are in flight, and trees that pass whole buffers.

After ``gloo/allreduce.cc``, ``broadcast.cc``, ``reduce.cc`` and ``transport/tcp/pair.cc`` (github.com/pytorch/gloo). Among
P ranks S bytes are cut into n = roundUp(max(ceil(S / 1 MiB), 2 P), P) segments. A phase, of which there are two, sends
n - n / P of them one after the other. A segment leaves when its receiver has told that it waits for it, which it does when it is
done with the segment before the last. What it tells is a message of a few bytes to the other neighbour, behind what
it sends itself at that moment: about a millisecond of data lies in a device's queue at most (Linux, "TCP small queues").

With b = S / (n B) for a segment on the wire, alpha for a message and c for what a host copies and sums, a phase takes at least

- 2 alpha + (n - n / P) b + c: the wire never rests;
- a round trip, 2 alpha + b + c, for every two segments, and more where a segment that is on its way delays what is told;
- 2 alpha + b + (n - n / P) c: the host never rests.

A broadcast goes down a binomial tree, ceil(log2 P) (alpha + S / B); a reduce is a ring reduce-scatter
whose P parts the root gathers. An all-gather is a ring. gloo has no reduce-scatter for torch: ``ProcessGroupGloo`` does an all-reduce
of a copy, and keeps a part.
"""

import math
from fractions import Fraction

from fleetbench.plan.longest_chain import Pace
from fleetbench.plan.operations import Collective
from fleetbench.quantities import MIB
from sim.clock import half_up
from sim.network.algorithms import Ranks, ring, tree
from sim.network.links import Links
from sim.network.turns import Turn, Window, taken_in_turns
from sim.network.work import Cost, Route, Work

QUEUE_NS = 1_171_875
"""So much of its own data a connection leaves in a device's queue: 1 / 1024 s at 1.2 times its rate (linux/net/ipv4/tcp_output.c,
``tcp_small_queue_check``; the rate is ``net.ipv4.tcp_pacing_ca_ratio``). In slow start, and where two packets are longer, it is up
to twice as much; queues that let other connections pass have less."""
MOST_RANKS, MOST_SENDS = 16, 256
"""Ranks, and segments that each sends in a phase, beyond which a segment has no turn of its own beside other collectives."""


def num_segments(nbytes: int, ranks: int) -> int:
    """Segments of an all-reduce."""
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
        """Time and ports of an all-reduce of ``nbytes``. Each hop has two segments in flight, so that the slowest hop decides."""
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
        wire_ns = nbytes * self._size * hop.ns_per_byte / segments  # a hop's pace is of a P-th of the bytes
        host_ns = nbytes * self._host_ns_per_byte / segments
        unit = math.lcm(wire_ns.denominator, Fraction(host_ns).denominator)  # whole numbers are many times faster
        wire, host, latency, queue = (round(unit * ns) for ns in (wire_ns, host_ns, hop.latency_ns, self._queue_ns))
        phase_ns = Fraction(_phase(sends, wire, Window(latency, host, queue))[1], unit)
        latency_ns = int(2 * (phase_ns - sends * wire_ns))
        return Cost(latency_ns, 2 * phase_ns - latency_ns)


def _phase(sends: int, wire: int, window: Window) -> tuple[int, int]:
    """When the last of so many segments has left, and is done with, where all ranks begin at 0; times are of one unit.

    What follows depends on differences of times alone: once they come again, so does all that lies between, later by the same time.
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
    """How gloo carries a collective out."""
    if kind in ("all_reduce", "reduce_scatter"):
        return SegmentedRing(ranks, links)
    if kind == "broadcast":
        return tree(kind, ranks, links)
    if kind == "reduce":
        to_root = [(rank, ranks[0]) for rank in ranks[1:]]
        return ring("reduce_scatter", ranks, links).rounds([(Fraction(1, len(ranks)), to_root)])
    return ring(kind, ranks, links, rows=rows)
