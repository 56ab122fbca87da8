"""gloo's collectives: a ring all-reduce in segments of which two are in flight, and trees that pass whole buffers.

After ``gloo/allreduce.cc``, ``broadcast.cc``, ``reduce.cc`` and ``transport/tcp/pair.cc`` (github.com/pytorch/gloo). Among
P ranks S bytes are cut into n = roundUp(max(ceil(S / 1 MiB), 2 P), P) segments. A phase, of which there are two, sends
N = n - n / P of them one after the other. A segment leaves when its receiver has said that it waits for it, which
it does when it is done with the segment before the last. So with b = S / (n B) for a segment on the wire, alpha for a
message and c for what a host copies and sums, a phase takes the longest of

- 2 alpha + N b + c: the wire never rests;
- N / 2 (2 alpha + b + c) + max(b, c), for an even N: every pair of segments waits a round trip for the one before it;
- 2 alpha + b + N c: the host never rests.

A broadcast goes down a binomial tree, ceil(log2 P) (alpha + S / B); a reduce is a ring reduce-scatter
whose P parts the root gathers. Reduce-scatter and all-gather are rings.
"""

from fractions import Fraction

from fleetbench.plan.longest_chain import Pace
from fleetbench.plan.operations import Collective
from fleetbench.quantities import MIB
from sim.network.algorithms import Ranks, ring, tree
from sim.network.links import Links
from sim.network.work import Cost, Route, Work


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
        round_trip_ns = 2 * hop.latency_ns + wire_ns + host_ns
        pairs, last = divmod(sends, 2)
        phase_ns = max(
            2 * hop.latency_ns + sends * wire_ns + host_ns,
            (pairs + last) * round_trip_ns + (0 if last else max(wire_ns, host_ns)),
            2 * hop.latency_ns + wire_ns + sends * host_ns,
        )
        latency_ns = int(2 * (phase_ns - sends * wire_ns))
        return Cost(latency_ns, 2 * phase_ns - latency_ns)


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
