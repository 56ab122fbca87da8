"""Algorithms: what a collective costs on links of its own, and which of them it takes.

Among P ranks, for S bytes, a latency of alpha a message and B bytes/s, by the slowest hop:

- ring all-reduce: 2 (P - 1) (alpha + S / (P B));
- ring reduce-scatter and ring all-gather, its halves: (P - 1) (alpha + S / (P B)) each;
- all-gather of rows, where every rank gives S bytes: (P - 1) (alpha + S / B);
- reduce and broadcast: (P - 1) alpha + S / B. The buffer passes along the ring in chunks so small
  that all hops work at once, as in NCCL's ring kernels (``src/device/broadcast.h``, ``reduce.h``).
  gloo does not pipeline: its broadcast hands whole buffers down a binomial tree, ceil(log2 P)
  (alpha + S / B), and its reduce is a ring reduce-scatter whose parts the root gathers. Beyond two
  ranks both take longer there than here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from fleetbench.cluster import Link
from fleetbench.plan.operations import Collective, Payload

BITS_NS = 8 * 10**9
"""Nanoseconds that a byte takes at 1 bit/s."""

Port = tuple[str, int, str]
"""One direction of a link: ``intra`` and a rank, or ``inter`` and a node; then ``out`` or ``in``."""
LATENCY = " latency"
"""Behind a port's name: the port as collectives pass it in their latency, when they need nothing of what it carries."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one collective takes on links of its own."""

    latency_ns: int
    transfer_ns: Fraction


@dataclass(frozen=True, slots=True)
class Hop:
    """From one rank to the next."""

    link: Link
    ports: tuple[Port, Port]


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of a cluster: a trainer has one inside its node, and a node one to the others."""

    trainers_per_node: int
    intra: Link | None
    inter: Link | None
    measured: Link | None = None
    """What one collective alone was measured to see."""
    in_flight: tuple[Link, ...] = ()
    """What each of two, three, ... in flight was; more of them share what the last ones had."""
    measured_name: str = "intra"
    """Which of the two links that was."""

    def capacity(self, port: Port, num_transfers: int) -> Fraction:
        """What a port carries when so many transfers use it, as a multiple of what one alone gets.

        A link carries 1, its latency all at once, where nothing else was measured.
        """
        name = port[0].removesuffix(LATENCY)
        is_latency = name != port[0]
        if num_transfers < 2 or self.measured is None or not self.in_flight or name != self.measured_name:
            return Fraction(num_transfers if is_latency else 1)
        known = min(num_transfers, len(self.in_flight) + 1)
        seen = self.in_flight[known - 2]
        if is_latency:
            return Fraction(num_transfers) if seen.latency == 0 else known * Fraction(self.measured.latency, seen.latency)
        return known * Fraction(seen.bandwidth, self.measured.bandwidth)

    def hop(self, sender: int, receiver: int) -> Hop:
        """The way from one rank to another."""
        nodes = (sender // self.trainers_per_node, receiver // self.trainers_per_node)
        inside = nodes[0] == nodes[1]
        link = self.intra if inside else self.inter
        assert link is not None, "a collective crosses a link that nobody declared or measured"
        ends = (sender, receiver) if inside else nodes
        name = "intra" if inside else "inter"
        return Hop(link, ((name, ends[0], "out"), (name, ends[1], "in")))


class Ring:
    """The ring over ``ranks`` in their order, of which the first is the root."""

    def __init__(self, ranks: Sequence[int], links: Links) -> None:
        following = (*ranks[1:], *ranks[:1])
        self._size = len(ranks)
        self._hops = tuple(links.hop(sender, receiver) for sender, receiver in zip(ranks, following, strict=True))

    def ports(self, kind: Collective) -> tuple[Port, ...]:
        """The ports that a collective keeps busy, each once."""
        return tuple(dict.fromkeys(port for hop in self._used(kind) for port in hop.ports))

    def cost(self, kind: Collective, nbytes: int, payload: Payload | None = None) -> Cost:
        """The cost of a collective of ``nbytes``; see the module for the formulas."""
        messages, sent = _traffic(kind, self._size, nbytes, payload)
        links = dict.fromkeys(hop.link for hop in self._used(kind))
        costs = [Cost(messages * link.latency, sent * BITS_NS / link.bandwidth) for link in links]
        return max(costs, key=lambda cost: cost.latency_ns + cost.transfer_ns)

    def _used(self, kind: Collective) -> tuple[Hop, ...]:
        if kind == "reduce":  # ends at the root: from the second rank on
            return self._hops[1:]
        return self._hops[:-1] if kind == "broadcast" else self._hops


def _traffic(kind: Collective, ranks: int, nbytes: int, payload: Payload | None) -> tuple[int, Fraction]:
    """Messages one behind the other, and bytes over each hop."""
    steps = ranks - 1
    if kind == "all_reduce":
        return 2 * steps, Fraction(2 * steps * nbytes, ranks)
    if kind in ("reduce", "broadcast"):
        return steps, Fraction(nbytes)
    assert kind in ("reduce_scatter", "all_gather"), f"no algorithm for {kind}"
    return steps, Fraction(steps * nbytes, 1 if payload == "rows" else ranks)
