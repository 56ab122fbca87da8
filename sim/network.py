"""Network: what a collective costs on the cluster's links, alone and beside others.

A ring all-reduce of S bytes among P ranks takes 2 (P - 1) steps. In each, every rank sends S / P
bytes to the next, and the step is as long as its slowest hop: latency + (S / P) / bandwidth. In
all that is 2 (P - 1) latency + 2 ((P - 1) / P) S / bandwidth of that hop.

Collectives that are in flight together share the bandwidth equally, as processor sharing does: a
collective spends its latency first, which nothing slows, and then its transfer, at 1 / n of the
bandwidth while n transfers are under way.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from simpy import Event

from fleetbench.cluster import Link
from sim.clock import Clock, half_up

BITS_NS = 8 * 10**9
"""Nanoseconds that a byte takes at 1 bit/s."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one collective takes on links of its own."""

    latency_ns: int
    transfer_ns: Fraction


class Ring:
    """The ring over ``ranks`` in their order; hops stay inside a node or cross to another."""

    def __init__(self, ranks: tuple[int, ...], trainers_per_node: int, intra: Link | None, inter: Link | None) -> None:
        nodes = [rank // trainers_per_node for rank in ranks]
        neighbours = zip(nodes, nodes[1:] + nodes[:1], strict=True)
        self.size = len(ranks)
        self.hops = {inter if here != there else intra for here, there in neighbours}

    def all_reduce(self, nbytes: int) -> Cost:
        """The cost of an all-reduce of ``nbytes``, by its slowest hop."""
        steps = 2 * (self.size - 1)
        costs = []
        for link in self.hops:
            assert link is not None, "the ring crosses a link that nobody declared or measured"
            costs.append(Cost(steps * link.latency, Fraction(steps * nbytes * BITS_NS, self.size * link.bandwidth)))
        return max(costs, key=lambda cost: cost.latency_ns + cost.transfer_ns)


class SharedBandwidth:
    """Transfers that share a bandwidth equally.

    A transfer is under way from ``transfer`` until its event triggers. Whenever one starts or ends,
    the progress of all is integrated exactly; the time of the next end is rounded once.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._remaining_ns: dict[Event, Fraction] = {}
        self._since_ns = 0
        self._next_end: Event | None = None

    def transfer(self, alone_ns: Fraction) -> Event:
        """Start a transfer that would take ``alone_ns`` with all of the bandwidth; the event is its end."""
        self._integrate()
        end = self._clock.event()
        self._remaining_ns[end] = alone_ns
        self._schedule_next_end()
        return end

    def _integrate(self) -> None:
        elapsed_ns = self._clock.now - self._since_ns
        self._since_ns = self._clock.now
        if elapsed_ns and self._remaining_ns:
            progress_ns = Fraction(elapsed_ns, len(self._remaining_ns))
            self._remaining_ns = {end: remaining - progress_ns for end, remaining in self._remaining_ns.items()}

    def _schedule_next_end(self) -> None:
        if not self._remaining_ns:
            return
        first = min(self._remaining_ns, key=self._remaining_ns.__getitem__)
        delay_ns = half_up(self._remaining_ns[first] * len(self._remaining_ns))
        self._next_end = self._clock.timeout(max(delay_ns, 0))  # below 0 where the end before this one was rounded up past it
        self._next_end.callbacks.append(partial(self._end, first))

    def _end(self, end: Event, timeout: Event) -> None:
        if timeout is not self._next_end:  # a transfer that started since moved this end
            return
        self._integrate()
        del self._remaining_ns[end]
        end.succeed()
        self._schedule_next_end()


class Network:
    """The cluster's links, as collectives see them.

    All collectives lay their rings over the same links, so all that are in flight share them.
    """

    def __init__(self, clock: Clock, trainers_per_node: int, intra: Link | None, inter: Link | None) -> None:
        self._clock = clock
        self._links = (trainers_per_node, intra, inter)
        self._bandwidth = SharedBandwidth(clock)
        self._costs: dict[tuple[tuple[int, ...], int], Cost] = {}

    def all_reduce(self, ranks: tuple[int, ...], nbytes: int) -> Generator[Event, object, None]:
        """Carry out an all-reduce of ``nbytes`` among ``ranks``."""
        cost = self._costs.get((ranks, nbytes))
        if cost is None:
            cost = self._costs[ranks, nbytes] = Ring(ranks, *self._links).all_reduce(nbytes)
        yield self._clock.timeout(cost.latency_ns)
        yield self._bandwidth.transfer(cost.transfer_ns)
