"""Work: what an algorithm asks of the links for each byte of a collective, and what that takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import starmap

from fleetbench.plan.longest_chain import Message, Pace, around_ring, envelope, is_chain, through_rounds
from sim.network.links import Hop, Links, Port

BITS_NS = 8 * 10**9
"""Nanoseconds that a byte takes at 1 bit/s."""

Pair = tuple[int, int]
"""Sender and receiver of a message."""
Round = tuple[Fraction, Sequence[Pair]]
"""Messages of so much of the collective's bytes each, at most one from a rank and one to it, or all to one rank."""
Kind = tuple[int, int | Fraction]
"""What passes a port, counted, and its rate in bit/s."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one collective takes on links of its own."""

    latency_ns: int
    transfer_ns: Fraction


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """What a transfer that has its ports for itself brings through them; one object for all transfers of a kind."""

    loads: tuple[Fraction, ...]
    """Of each of its ports, the part it takes, at most 1."""
    bits_per_s: Fraction
    """Through the port where that is most."""
    fills: bool
    """It takes all of each."""


@dataclass(frozen=True, slots=True)
class Route:
    """One collective on the cluster's links: what it takes alone, and what of them."""

    cost: Cost
    ports: tuple[Port, ...]
    """The ports that it keeps busy, each once."""
    flow: Flow


class Work:
    """The phases of an algorithm, one after the other, and the traffic that they bring to every port.

    A phase takes as long as its longest chain of messages. Where messages of a round meet on a port, each of
    them takes as long as all together. Ports of a rate with the same traffic are of one kind, and
    fractions are worked out once a kind: a ring of ten thousand ranks has few.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._phases: list[tuple[Pace, ...]] = []
        self.hops: tuple[Pace, ...] = ()
        """Of a ring: how its messages go, each way once."""
        self._traffic: dict[Port, int] = {}
        """Of the collective's bytes, what passes each port, in units of 1 / ``_unit``."""
        self._unit = 1
        self._rates: dict[Port, int | Fraction] = {}
        self._flows: dict[Fraction | None, tuple[tuple[Port, ...], Flow]] = {}

    def rounds(self, rounds: Iterable[Round]) -> Work:
        """Add rounds of messages, in which each rank waits for its own messages only."""
        paced = [self._paced(share, pairs) for share, pairs in rounds if pairs]
        if all(len({pace for _, _, pace in messages}) == 1 for messages in paced) and is_chain(paced):
            self._phases += [(messages[0][2],) for messages in paced]
        else:
            self._phases.append(envelope(through_rounds(paced)))
        return self

    def around(self, steps: int, share: Fraction, ring: Sequence[Pair]) -> Work:
        """Add a ring whose ranks each send ``steps`` messages of so much of the collective's bytes, and pass on what they receive.

        It takes its longest chain of messages; see ``longest_chain``.
        """
        hops = [pace for _, _, pace in self._paced(share, ring, times=steps)]
        self.hops = tuple(dict.fromkeys(hops))
        if len(self.hops) == 1:
            self._phases.append((Pace(steps * hops[0].latency_ns, steps * hops[0].ns_per_byte),))
        else:
            self._phases.append(envelope(around_ring(steps, hops)))
        return self

    def pipeline(self, latency_ns: int, share: Fraction, pairs: Sequence[Pair]) -> Work:
        """Add messages in chunks so small that all are under way at once, after so much latency."""
        hops = [self._links.hop(sender, receiver) for sender, receiver in pairs]
        uses = self._uses(hops)
        self._phases.append((Pace(latency_ns, share * max(starmap(_busy, set(uses.values())))),))
        self._add({port: count for port, (count, _) in uses.items()}, share)
        return self

    def traffic(self, counts: Mapping[Port, int], share: Fraction) -> Work:
        """Add what passes ports, so many times a share of the collective's bytes, whatever time it takes."""
        self._rates |= {port: self._links.bits_per_s(port) for port in counts}
        self._add(counts, share)
        return self

    @property
    def bits_per_s(self) -> Fraction:
        """The most that all bytes of a collective pass the ports with."""
        return min(Fraction(rate) * self._unit / traffic for traffic, rate in set(self._kinds().values()))

    def route(self, nbytes: int) -> Route:
        """What a collective of ``nbytes`` takes."""
        latency_ns, transfer_ns = 0, Fraction(0)
        for paces in self._phases:
            longest = max(paces, key=lambda pace: pace.at(1, nbytes))
            latency_ns += longest.latency_ns
            transfer_ns += nbytes * longest.ns_per_byte
        return self.routed(Cost(latency_ns, transfer_ns), nbytes)

    def routed(self, cost: Cost, nbytes: int | Fraction) -> Route:
        """The same traffic, of ``nbytes``, where it takes ``cost``."""
        scale = nbytes * BITS_NS / cost.transfer_ns if cost.transfer_ns else None
        if scale not in self._flows:
            self._flows[scale] = self._flow(scale)
        ports, flow = self._flows[scale]
        return Route(cost, ports, flow)

    def _flow(self, scale: Fraction | None) -> tuple[tuple[Port, ...], Flow]:
        """The ports, and what a transfer takes of them that brings ``scale`` bit/s through one that carries all its bytes once."""
        kinds = self._kinds()
        if scale is None:
            bits_per_s, loads = Fraction(max(self._rates.values(), default=1)), dict.fromkeys(kinds.values(), Fraction(1))
        else:
            brought = {kind: scale * kind[0] / self._unit for kind in set(kinds.values())}
            bits_per_s = max(brought.values(), default=Fraction(0))
            loads = {kind: min(Fraction(1), bits / kind[1]) for kind, bits in brought.items()}
        return tuple(kinds), Flow(tuple([loads[kind] for kind in kinds.values()]), bits_per_s, all(load == 1 for load in loads.values()))

    def _kinds(self) -> dict[Port, Kind]:
        return {port: (traffic, self._rates[port]) for port, traffic in self._traffic.items()}

    def _paced(self, share: Fraction, pairs: Sequence[Pair], times: int = 1) -> list[Message]:
        """Messages of a round that happens so many times, each with its pace; their bytes count as traffic."""
        hops = [self._links.hop(sender, receiver) for sender, receiver in pairs]
        uses = self._uses(hops)
        self._add({port: count for port, (count, _) in uses.items()}, times * share)
        ways = [(hop.latency_ns, tuple(uses[port] for port in _passed(hop))) for hop in hops]
        paces = {way: Pace(way[0], share * max(starmap(_busy, way[1]))) for way in dict.fromkeys(ways)}
        return [(sender, receiver, paces[way]) for (sender, receiver), way in zip(pairs, ways, strict=True)]

    def _uses(self, hops: Iterable[Hop]) -> dict[Port, Kind]:
        """How many of the hops pass each port, and its rate."""
        counts: dict[Port, int] = {}
        for hop in hops:
            if hop.connection is not None:
                self._rates[hop.connection[0]] = hop.connection[1]
            for port in _passed(hop):
                counts[port] = counts.get(port, 0) + 1
        for port in counts:
            if port not in self._rates:
                self._rates[port] = self._links.bits_per_s(port)
        return {port: (count, self._rates[port]) for port, count in counts.items()}

    def _add(self, counts: Mapping[Port, int], share: Fraction) -> None:
        """So many times a share of the collective's bytes on each port."""
        unit = math.lcm(self._unit, share.denominator)
        if unit != self._unit:
            scale = unit // self._unit
            self._traffic = {port: traffic * scale for port, traffic in self._traffic.items()}
            self._unit = unit
        part = int(share * unit)
        for port, count in counts.items():
            self._traffic[port] = self._traffic.get(port, 0) + count * part


def _passed(hop: Hop) -> tuple[Port, ...]:
    """A hop's ports, and its connection where that is limited."""
    return hop.ports if hop.connection is None else (*hop.ports, hop.connection[0])


def _busy(count: int, rate: int | Fraction) -> Fraction:
    """Nanoseconds that a port is busy with so many bytes."""
    return Fraction(count * BITS_NS) / rate
