"""Work: what an algorithm asks of the links for each byte of a collective, and what that takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from sim.links import Hop, Links, Port

BITS_NS = 8 * 10**9
"""Nanoseconds that a byte takes at 1 bit/s."""

Message = tuple[int, int, Fraction]
"""Sender, receiver, and how much of the collective's S bytes it carries, as a multiple of S."""
Round = tuple[int, Sequence[Message]]
"""So many times in a row, messages that start together and are all waited for."""


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


@dataclass(frozen=True, slots=True)
class Pace:
    """How one message of a phase goes: a latency, and nanoseconds for each byte of the collective."""

    latency_ns: int
    ns_per_byte: Fraction


class Work:
    """The phases of an algorithm, one behind the other, and the traffic that they bring to every port.

    A phase takes as long as its slowest message. Where messages of a round meet on a port, each of
    them takes as long as all together.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._phases: list[tuple[Pace, ...]] = []
        self._shares: dict[Port, Fraction] = {}
        self._rates: dict[Port, Fraction] = {}
        self._flows: dict[Fraction | None, tuple[tuple[Port, ...], Flow]] = {}

    def rounds(self, rounds: Iterable[Round]) -> Work:
        """Add rounds of messages."""
        for times, messages in rounds:
            hops = [(self._links.hop(sender, receiver), share) for sender, receiver, share in messages]
            shares = _shares(hops)
            busy = {port: share * BITS_NS / self._rate(port) for port, share in shares.items()}
            paces = dict.fromkeys(Pace(times * hop.latency_ns, times * max(busy[port] for port in hop.ports)) for hop, _ in hops)
            self._add(tuple(paces), shares, times)
        return self

    def pipeline(self, latency_ns: int, messages: Sequence[Message]) -> Work:
        """Add messages in chunks so small that all are under way at once, behind so much latency."""
        hops = [(self._links.hop(sender, receiver), share) for sender, receiver, share in messages]
        shares = _shares(hops)
        slowest = max((share * BITS_NS / self._rate(port) for port, share in shares.items()), default=Fraction(0))
        self._add((Pace(latency_ns, slowest),), shares, 1)
        return self

    def traffic(self, shares: Mapping[Port, Fraction]) -> Work:
        """Add what passes ports, of the collective's bytes, whatever time it takes."""
        for port in shares:
            self._rate(port)
        self._add((), shares, 1)
        return self

    @property
    def paces(self) -> tuple[Pace, ...]:
        """Of the first phase: how its messages go, each way once."""
        return self._phases[0]

    @property
    def bits_per_s(self) -> Fraction:
        """The most that all bytes of a collective pass the ports with."""
        return min(self._rates[port] / share for port, share in self._shares.items())

    def route(self, nbytes: int) -> Route:
        """What a collective of ``nbytes`` takes."""
        latency_ns, transfer_ns = 0, Fraction(0)
        for paces in self._phases:
            slowest = max(paces, key=lambda pace: pace.latency_ns + nbytes * pace.ns_per_byte)
            latency_ns += slowest.latency_ns
            transfer_ns += nbytes * slowest.ns_per_byte
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
        kinds = {port: (share, self._rates[port]) for port, share in self._shares.items()}
        if scale is None:
            loads = dict.fromkeys(kinds.values(), Fraction(1))
            bits_per_s = max(self._rates.values(), default=Fraction(1))
        else:
            loads = {(share, rate): min(Fraction(1), scale * share / rate) for share, rate in set(kinds.values())}
            bits_per_s = scale * max((share for share, _ in loads), default=Fraction(0))
        return tuple(kinds), Flow(tuple(loads[kind] for kind in kinds.values()), bits_per_s, all(load == 1 for load in loads.values()))

    def _add(self, paces: tuple[Pace, ...], shares: Mapping[Port, Fraction], times: int) -> None:
        if paces:
            self._phases.append(paces)
        for port, share in shares.items():
            self._shares[port] = self._shares.get(port, Fraction(0)) + times * share

    def _rate(self, port: Port) -> Fraction:
        if port not in self._rates:
            self._rates[port] = self._links.bits_per_s(port)
        return self._rates[port]


def _shares(hops: Iterable[tuple[Hop, Fraction]]) -> dict[Port, Fraction]:
    """What passes each port, of the collective's bytes."""
    found: dict[Port, Fraction] = {}
    for hop, share in hops:
        for port in hop.ports:
            found[port] = found.get(port, Fraction(0)) + share
    return found
