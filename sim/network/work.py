"""Work of a collective algorithm: its phases of messages, their time, and the share of the bytes on each port."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import starmap

from fleetbench.plan.longest_chain import Message, Pace, around_ring, envelope, through_rounds
from sim.clock import half_up
from sim.network.links import Hop, Links, Port
from sim.network.turns import Turn, Window, taken_in_turns

BITS_NS = 8 * 10**9
"""Nanoseconds that a byte takes at 1 bit/s."""

Pair = tuple[int, int]
"""Sender and receiver of a message."""
Round = tuple[Fraction, Sequence[Pair]]
"""Share of the collective's bytes that each message of a round carries, and these messages. A rank sends and
receives at most one of them, unless all go to one rank."""
Kind = tuple[int, int | Fraction]
"""Traffic of a port, in the units of ``Work._traffic``, and the port's rate in bit/s."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of one collective that has its links to itself."""

    latency_ns: int
    transfer_ns: Fraction

    @property
    def total_ns(self) -> Fraction:
        """Time in ns of latency and transfer together."""
        return self.latency_ns + self.transfer_ns


@dataclass(frozen=True, slots=True)
class Route:
    """One collective on the cluster's links: its time alone, and the ports that it passes."""

    cost: Cost
    ports: tuple[Port, ...]
    """Ports that the collective keeps busy, each once."""
    loads: tuple[Fraction, ...]
    """Share of the transfer time for which each port is busy, at most 1. Equal loads of one ``Work`` are one
    object, which an engine identifies by ``id``."""
    turns: tuple[Turn, ...]
    """Turns of the collective on its ports. On idle ports, ``first_ns`` and the turns together take as long
    as ``cost``."""
    first_ns: int = 0
    """Time in ns from the collective's start to the arrival of its first turn."""
    window: Window | None = None


class Work:
    """Phases of an algorithm, one after the other, and their traffic on every port.

    A phase takes as long as its longest chain of messages. If several messages of a round pass the same port,
    each of them takes as long as all of them together. Ports with the same rate and the same traffic are of
    one kind, and fractions are computed once per kind, because even a ring of ten thousand ranks has few
    kinds.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._phases: list[tuple[tuple[Pace, ...], int]] = []
        """Phases: the candidates for the longest chain, and the number of messages one after the other; 0 if
        all are under way at once."""
        self.hops: tuple[Pace, ...] = ()
        """Distinct paces of a ring's messages; empty for other algorithms."""
        self._traffic: dict[Port, int] = {}
        """Share of the collective's bytes that passes each port, in units of 1 / ``_unit``."""
        self._unit = 1
        self._rates: dict[Port, int | Fraction] = {}
        self._loads: dict[Fraction | None, tuple[tuple[Port, ...], tuple[Fraction, ...]]] = {}

    def rounds(self, rounds: Iterable[Round]) -> Work:
        """Add rounds of messages. Each rank waits for its own messages only. Some rank must take part in every round."""
        paced = [self._paced(share, pairs) for share, pairs in rounds]
        if all(len({pace for _, _, pace in messages}) == 1 for messages in paced):
            self._phases += [((messages[0][2],), 1) for messages in paced]
        else:
            self._phases.append((envelope(through_rounds(paced)), len(paced)))
        return self

    def around(self, steps: int, share: Fraction, ring: Sequence[Pair]) -> Work:
        """Add a ring whose ranks each send ``steps`` messages with ``share`` of the collective's bytes.

        Ranks pass on what they receive. The ring takes as long as its longest chain of messages; see
        ``longest_chain``.
        """
        hops = [pace for _, _, pace in self._paced(share, ring, times=steps)]
        self.hops = tuple(dict.fromkeys(hops))
        alike = (Pace(steps * hops[0].latency_ns, steps * hops[0].ns_per_byte),)
        self._phases.append((alike if len(self.hops) == 1 else envelope(around_ring(steps, hops)), steps))
        return self

    def pipeline(self, latency_ns: int, share: Fraction, pairs: Sequence[Pair]) -> Work:
        """Add messages in chunks so small that all are under way at once, after a latency of ``latency_ns``."""
        self._phases.append(((Pace(latency_ns, max(pace.ns_per_byte for _, _, pace in self._paced(share, pairs))),), 0))
        return self

    def traffic(self, counts: Mapping[Port, int], share: Fraction) -> Work:
        """Add traffic that takes no time of its own: on each port, ``counts`` times ``share`` of the bytes."""
        self._rates |= {port: self._links.bits_per_s(port) for port in counts}
        self._add(counts, share)
        return self

    @property
    def bits_per_s(self) -> Fraction:
        """Highest rate, in bit/s, at which all bytes of a collective can pass the ports."""
        return min(Fraction(rate) * self._unit / traffic for traffic, rate in set(self._kinds().values()))

    def route(self, nbytes: int) -> Route:
        """Return the time and ports of a collective of ``nbytes``."""
        latency_ns, transfer_ns = 0, Fraction(0)
        turns: list[Turn] = []
        for paces, messages in self._phases:
            longest = max(paces, key=lambda pace: pace.at(1, nbytes))
            latency_ns += longest.latency_ns
            before_ns, transfer_ns = half_up(transfer_ns), transfer_ns + nbytes * longest.ns_per_byte
            turns += taken_in_turns(longest.latency_ns, half_up(transfer_ns) - before_ns, messages)
        return self.routed(Cost(latency_ns, transfer_ns), nbytes, turns)

    def routed(self, cost: Cost, nbytes: int | Fraction, turns: Iterable[Turn]) -> Route:
        """Return the route of a collective of ``nbytes`` with this traffic and the given ``cost`` and ``turns``."""
        scale = nbytes * BITS_NS / cost.transfer_ns if cost.transfer_ns else None
        if scale not in self._loads:
            kinds = self._kinds()
            whole = {kind: Fraction(self._unit) * kind[1] for kind in set(kinds.values())}
            of_kind = {kind: min(Fraction(1), (scale or whole[kind]) * kind[0] / whole[kind]) for kind in whole}
            self._loads[scale] = (tuple(kinds), tuple([of_kind[kind] for kind in kinds.values()]))
        return Route(cost, *self._loads[scale], tuple(turns))

    def _kinds(self) -> dict[Port, Kind]:
        return {port: (traffic, self._rates[port]) for port, traffic in self._traffic.items()}

    def _paced(self, share: Fraction, pairs: Sequence[Pair], times: int = 1) -> list[Message]:
        """Return the messages of a round, each with its pace.

        Their bytes count as traffic, ``times`` times.
        """
        hops = [self._links.hop(sender, receiver) for sender, receiver in pairs]
        counts = Counter(port for hop in hops for port in _passed(hop))
        self._rates |= dict(hop.connection for hop in hops if hop.connection is not None)
        self._rates |= {port: self._links.bits_per_s(port) for port in counts if port not in self._rates}
        self._add(counts, times * share)
        ways = [(hop.latency_ns, tuple([(counts[port], self._rates[port]) for port in _passed(hop)])) for hop in hops]
        paces = {way: Pace(way[0], share * max(starmap(_busy, way[1]))) for way in dict.fromkeys(ways)}
        return [(sender, receiver, paces[way]) for (sender, receiver), way in zip(pairs, ways, strict=True)]

    def _add(self, counts: Mapping[Port, int], share: Fraction) -> None:
        """Count ``share`` of the collective's bytes on each port, as often as ``counts`` says."""
        unit = math.lcm(self._unit, share.denominator)
        if unit != self._unit:
            scale = unit // self._unit
            self._traffic = {port: traffic * scale for port, traffic in self._traffic.items()}
            self._unit = unit
        part = int(share * unit)
        for port, count in counts.items():
            self._traffic[port] = self._traffic.get(port, 0) + count * part


def _passed(hop: Hop) -> tuple[Port, ...]:
    """Return a hop's ports, and its connection if that is limited."""
    return hop.ports if hop.connection is None else (*hop.ports, hop.connection[0])


def _busy(count: int, rate: int | Fraction) -> Fraction:
    """Return the time in ns for which ``count`` bytes keep a port of ``rate`` bit/s busy."""
    return Fraction(count * BITS_NS) / rate
