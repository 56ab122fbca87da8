"""All-reduces in flight together, message by message on every rank: what the simulator's model of shared links is compared with.

Every rank has one wire to its right neighbour, which carries messages one after the other, as they join it. A message arrives
a latency after its last byte has left. Nothing here is of the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from heapq import heappop, heappush

MIB = 2**20
QUEUE_NS = 1_171_875
"""Own data that a message waits for in a device: 1 / 1024 s at 1.2 times the rate."""


@dataclass(frozen=True, slots=True)
class AllReduce:
    """When all ranks start it, and its bytes."""

    start_ns: int
    nbytes: int


def rings(all_reduces: Sequence[AllReduce], ranks: int, latency_ns: int, ns_per_byte: Fraction) -> list[Fraction]:
    """Ends of rings: each rank sends 2 (P - 1) messages of a P-th, each when the one before has come from the left."""
    free = [Fraction(0)] * ranks
    ends = [Fraction(0)] * len(all_reduces)
    events: list[tuple[Fraction, int, int, int]] = []
    for number, own in enumerate(all_reduces):
        for rank in range(ranks):
            heappush(events, (Fraction(own.start_ns), number, rank, 0))
    while events:
        now, number, rank, message = heappop(events)
        free[rank] = max(free[rank], now) + all_reduces[number].nbytes * ns_per_byte / ranks
        comes = free[rank] + latency_ns
        ends[number] = max(ends[number], comes)
        if message + 1 < 2 * (ranks - 1):
            heappush(events, (comes, number, (rank + 1) % ranks, message + 1))
    return ends


@dataclass(slots=True)
class _Phase:
    """One rank in one phase of gloo's all-reduce: when its segments have joined the wire, have left it, and were done with."""

    told: set[int] = field(default_factory=set)
    joined: dict[int, Fraction] = field(default_factory=dict)
    left: dict[int, Fraction] = field(default_factory=dict)
    done: dict[int, Fraction] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)


_LEFT, _TOLD, _CAME = range(3)


class Gloo:
    """gloo's ring all-reduces: segments of at most 1 MiB, of which a rank has two in flight, each sent when its receiver waits for it.

    A rank receives the segment after next, and tells its left neighbour, when it has sent and received one. What it tells waits for
    its own data of this all-reduce in its device. Its connection has one segment on the wire at a time.
    """

    def __init__(self, all_reduces: Sequence[AllReduce], ranks: int, latency_ns: int, ns_per_byte: Fraction) -> None:
        self._ranks, self._latency_ns = ranks, latency_ns
        segments = [max(-(-own.nbytes // MIB), 2 * ranks) for own in all_reduces]
        segments = [-(-number // ranks) * ranks for number in segments]
        self._sends = [number - number // ranks for number in segments]
        self._wire_ns = [own.nbytes * ns_per_byte / number for own, number in zip(all_reduces, segments, strict=True)]
        self._free = [Fraction(0)] * ranks
        self._phases: dict[tuple[int, int, int], _Phase] = {}
        self._events: list[tuple[Fraction, int, int, int, int, int]] = []
        self._all_reduces = all_reduces

    def ends(self) -> list[Fraction]:
        """When the last rank has everything, of each."""
        ends = [Fraction(0)] * len(self._all_reduces)
        for number, own in enumerate(self._all_reduces):
            for rank in range(self._ranks):
                self._ask(Fraction(own.start_ns), number, rank, 0, (0, 1))
        while self._events:
            now, kind, number, rank, phase, segment = heappop(self._events)
            own = self._phases.setdefault((number, rank, phase), _Phase())
            if kind == _TOLD:
                own.told.add(segment)
                self._join(now, number, rank, phase)
            elif kind == _LEFT:
                own.left[segment] = now
                heappush(self._events, (now + self._latency_ns, _CAME, number, (rank + 1) % self._ranks, phase, segment))
                self._join(now, number, rank, phase)
            else:
                own.done[segment] = now
            if kind != _TOLD and segment in own.left and segment in own.done:
                self._ask(now, number, rank, phase, (segment + 2,))
                if len(own.left) == len(own.done) == self._sends[number]:
                    ends[number] = max(ends[number], now)
                    if phase == 0:
                        self._ask(now, number, rank, 1, (0, 1))
        return ends

    def _ask(self, now: Fraction, number: int, rank: int, phase: int, segments: Sequence[int]) -> None:
        """Tell the left neighbour that these are waited for."""
        own = self._phases.setdefault((number, rank, phase), _Phase())
        lies = [joined + self._wire_ns[number] - now for segment, joined in own.joined.items() if segment not in own.left]
        waits = min(max([Fraction(0), *lies]), QUEUE_NS)
        for segment in segments:
            if segment < self._sends[number]:
                heappush(self._events, (now + waits + self._latency_ns, _TOLD, number, (rank - 1) % self._ranks, phase, segment))

    def _join(self, now: Fraction, number: int, rank: int, phase: int) -> None:
        """Put the next segment on the wire, if its receiver waits for it and the one before has left."""
        own = self._phases[number, rank, phase]
        segment = len(own.joined)
        if segment in own.told and (not segment or segment - 1 in own.left):
            begins = max(self._free[rank], now)
            own.joined[segment] = begins
            self._free[rank] = begins + self._wire_ns[number]
            heappush(self._events, (self._free[rank], _LEFT, number, rank, phase, segment))
