"""gloo's collectives: a ring all-reduce in segments of which two are in flight, and trees that pass whole buffers.

After ``gloo/allreduce.cc``, ``broadcast.cc`` and ``reduce.cc`` (github.com/pytorch/gloo). Among P ranks S bytes
are cut into n = roundUp(max(ceil(S / 1 MiB), 2 P), P) segments. A phase, of which there are two, sends
N = n - n / P of them one after the other, and no segment sets out before the last but one has
arrived. With b = S / (n B) for a segment on the wire, a phase of an even N takes

- N b + alpha where alpha <= b: the wire never rests;
- N / 2 (alpha + b) + b where it is longer: every pair of segments waits for the one before it.

A broadcast goes down a binomial tree, ceil(log2 P) (alpha + S / B); a reduce is a ring reduce-scatter
whose P parts the root gathers. Reduce-scatter and all-gather are rings.
"""

from __future__ import annotations

from fractions import Fraction

from fleetbench.plan.operations import Collective
from fleetbench.quantities import MIB
from sim.network.algorithms import Ranks, ring, tree
from sim.network.links import Links
from sim.network.work import Cost, Pace, Route, Work


def num_segments(nbytes: int, ranks: int) -> int:
    """Segments of an all-reduce."""
    wanted = max(-(-nbytes // MIB), 2 * ranks)
    return -(-wanted // ranks) * ranks


class SegmentedRing:
    """gloo's ring all-reduce over ``ranks`` in their order."""

    def __init__(self, ranks: Ranks, links: Links) -> None:
        self._size = len(ranks)
        self._ring = ring("all_reduce", ranks, links)
        self._hops = self._ring.paces

    def route(self, nbytes: int) -> Route:
        """What an all-reduce of ``nbytes`` takes, by the slowest hop."""
        plain = self._ring.route(nbytes)
        return Route(max((self._cost(hop, nbytes) for hop in self._hops), key=_total), plain.ports, plain.flow)

    def _cost(self, hop: Pace, nbytes: int) -> Cost:
        steps = 2 * (self._size - 1)
        alpha_ns = hop.latency_ns // steps
        transfer_ns = nbytes * hop.ns_per_byte
        sends = num_segments(nbytes, self._size) * (self._size - 1) // self._size
        segment_ns = transfer_ns / (2 * sends)
        if alpha_ns <= segment_ns:
            return Cost(2 * alpha_ns, transfer_ns)
        pairs, last = divmod(sends, 2)
        phase_ns = (pairs + last) * (alpha_ns + segment_ns) + (0 if last else segment_ns)
        latency_ns = int(2 * phase_ns - transfer_ns)
        return Cost(latency_ns, 2 * phase_ns - latency_ns)


def gloo(kind: Collective, ranks: Ranks, links: Links, *, rows: bool = False) -> Work | SegmentedRing:
    """How gloo carries a collective out."""
    if kind == "all_reduce":
        return SegmentedRing(ranks, links)
    if kind == "broadcast":
        return tree(kind, ranks, links)
    if kind == "reduce":
        to_root = [(rank, ranks[0]) for rank in ranks[1:]]
        return ring("reduce_scatter", ranks, links).rounds([(1, Fraction(1, len(ranks)), to_root)])
    return ring(kind, ranks, links, rows=rows)


def _total(cost: Cost) -> Fraction:
    return cost.latency_ns + cost.transfer_ns
