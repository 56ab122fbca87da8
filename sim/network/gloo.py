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
whose P parts the root gathers. Reduce-scatter and all-gather are rings.
"""

import math
from fractions import Fraction

from fleetbench.plan.longest_chain import Pace
from fleetbench.plan.operations import Collective
from fleetbench.quantities import MIB
from sim.network.algorithms import Ranks, ring, tree
from sim.network.links import Links
from sim.network.work import Cost, Route, Work

QUEUE_NS = 1_171_875
"""So much of its own data a connection leaves in a device's queue: 1 / 1024 s at 1.2 times its rate (linux/net/ipv4/tcp_output.c,
``tcp_small_queue_check``; the rate is ``net.ipv4.tcp_pacing_ca_ratio``). In slow start, and where two packets are longer, it is up
to twice as much; queues that let other connections pass have less."""


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
        """What an all-reduce of ``nbytes`` takes. Each hop has its two segments in flight, so that the slowest hop decides."""
        plain = self._ring.route(nbytes)
        longest = max((self._cost(hop, nbytes) for hop in self._ring.hops), key=lambda cost: cost.latency_ns + cost.transfer_ns)
        return Route(longest, plain.ports, plain.flow)

    def _cost(self, hop: Pace, nbytes: int) -> Cost:
        segments = num_segments(nbytes, self._size)
        sends = segments * (self._size - 1) // self._size
        wire_ns = nbytes * self._size * hop.ns_per_byte / segments  # a hop's pace is of a P-th of the bytes
        host_ns = nbytes * self._host_ns_per_byte / segments
        unit = math.lcm(wire_ns.denominator, Fraction(host_ns).denominator)  # whole numbers are many times faster
        times = (round(unit * ns) for ns in (wire_ns, host_ns, hop.latency_ns, self._queue_ns))
        phase_ns = Fraction(_phase(sends, *times), unit)
        latency_ns = int(2 * (phase_ns - sends * wire_ns))
        return Cost(latency_ns, 2 * phase_ns - latency_ns)


def _phase(sends: int, wire: int, host: int, latency: int, queue: int) -> int:
    """When the last of so many segments is done with, where all ranks begin at 0; times are of one unit.

    ``queue`` is the most that may lie before a message in its host's device.
    """
    told, left, done = [latency, latency], [latency + wire, latency + 2 * wire], 0
    for segment in range(sends):
        done = max(done, left[segment] + latency) + host
        on_its_way = left[segment + 1] - done if told[segment + 1] <= done else 0
        told.append(done + min(max(on_its_way, 0), queue) + latency)
        left.append(max(left[segment + 1], told[segment + 2]) + wire)
    return done


def gloo(kind: Collective, ranks: Ranks, links: Links, *, rows: bool = False) -> Work | SegmentedRing:
    """How gloo carries a collective out."""
    if kind == "all_reduce":
        return SegmentedRing(ranks, links)
    if kind == "broadcast":
        return tree(kind, ranks, links)
    if kind == "reduce":
        to_root = [(rank, ranks[0]) for rank in ranks[1:]]
        return ring("reduce_scatter", ranks, links).rounds([(Fraction(1, len(ranks)), to_root)])
    return ring(kind, ranks, links, rows=rows)
