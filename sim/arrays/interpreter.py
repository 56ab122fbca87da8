"""The interpreter: takes the ranks of several blocks, side by side, through one program after the other.

A rank's time is ``offset`` plus the time that ``base_ns`` of its own compute takes with its delay. While all
ranks of a block have the same offset, it is one number per block, and the largest X alone decides which rank
is last.

Where compute and collectives slow each other, a collective is slow until the last of its ranks has computed.
The interpreter assumes when ranks' compute ends, runs the step, and repeats it with the ends that it found,
until both are equal. This takes few repetitions: compute up to a bucket depends only on collectives of
earlier buckets, and a collective is slow in any case while one of its ranks computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce

import numpy as np
import numpy.typing as npt

from sim.arrays.compute import Slowed, Stretches
from sim.arrays.layout import LATER, NEVER, Group, Layout, Times
from sim.arrays.program import Compute, Finish, Head, Join, Program, Share, Wait, Work
from sim.arrays.transfers import Flight, Transfers

_NEVER = np.full((1, 1), NEVER)


@dataclass(slots=True)
class Seen:
    """Times of one step of every block.

    Arrays have a row per block and a column per rank, or one column if all ranks have the same value. Times
    and durations are in ns.
    """

    start: Times
    read: Times
    """Duration of the step's head."""
    head_end: Times
    compute_end: Times
    """End of the backward."""
    forward: Times
    """Duration of the forward, without gates."""
    gated: Times
    """Duration of waits at gates, which hold compute up; a part of the stall."""
    stall: Times
    """Duration of all waits for collectives."""
    wait: Times
    """Part of the stall before the last rank had joined the awaited collectives."""
    update: Times
    end: Times
    arrival: Times
    """Time at which the rank joined its last collective; ``NEVER`` if it joined none."""
    spans: list[tuple[str, str, Times, Times]]
    """Timeline of every rank: streams, names, starts and ends of its spans."""
    flights: list[Flight]

    @property
    def compute(self) -> Times:
        """Duration of the forward and the backward, without gates."""
        return self.compute_end - self.head_end - self.gated

    @property
    def backward(self) -> Times:
        """Duration of the backward, without gates."""
        return self.compute - self.forward

    @property
    def total(self) -> Times:
        """Duration of the whole step."""
        return self.end - self.start


@dataclass(slots=True)
class Interpreter:
    """The state of blocks that run side by side: between two steps, or within one."""

    layout: Layout
    carrier: Transfers
    offset: Times
    looks: bool
    """Whether durations are recorded in ``Seen``. If not, only its starts and ends are right."""
    draws: bool
    """Whether spans of the timeline are recorded; this needs ``looks``."""
    contention: Fraction
    """Factor on the time of compute while collectives of its rank are in flight."""
    _num_ids: int = 0
    """Number of operations in the previous step."""
    _base_ns: int = 0
    _behind: bool = False
    """Whether ranks are outside compute: before the step's forward, or after its backward."""
    _x: Stretches = field(init=False)
    _seen: Seen = field(init=False)
    _shares: list[tuple[Share, Times, int]] = field(default_factory=list)
    _arrivals: list[tuple[Group, Times, int]] = field(default_factory=list)
    _head_ns: Times = field(init=False)
    _slowed: Slowed | None = None
    _compute_end: Times = field(init=False)
    _forward_end: Times = field(init=False)
    _ready: tuple[str, Times] | None = None
    """Name and start of the unfinished span that starts a bucket; ``None`` if there is none or no spans are
    recorded."""

    def step(self, program: Program, x: Stretches, head_ns: Times) -> Seen:
        """Run one step of every block and return its times.

        ``head_ns``: time from the step's start to its forward, by block, or by block and rank.
        """
        begun, before, until = self.offset, self.carrier, np.full((len(self.offset), self.layout.num_ranks), LATER)
        while True:
            self.offset, self.carrier = begun, before.beside(until)
            seen = self._step(program, x, head_ns)
            if self.carrier is before or (self._compute_end == until).all():
                break
            until = np.broadcast_to(self._compute_end, until.shape)
        self._num_ids = program.num_ids
        return seen

    def _step(self, program: Program, x: Stretches, head_ns: Times) -> Seen:
        none = np.zeros((1, 1), dtype=np.int64)
        self._seen = Seen(self.offset, head_ns, none, none, none, none, none, none, none, none, _NEVER, [], [])
        self._x, self._head_ns, self._behind, self._shares, self._arrivals = x, head_ns, True, [], []
        self._slowed = None if self.contention == 1 else Slowed(self.contention)
        self.carrier.begin(self.offset, self._num_ids)
        for instruction in program.instructions:
            self._execute(instruction)
        self._settle()
        self._seen.end = self.offset
        if self.looks:
            self._seen.arrival = self._arrived()
        if self.draws:
            self._seen.flights = self.carrier.flights(tuple(join.operation.id for join in program.joins))
        return self._seen

    def is_even(self) -> npt.NDArray[np.bool_]:
        """Return whether each block's ranks are at one time with nothing in flight, shape ``(num_blocks,)``."""
        first = self.offset[:, 0]
        return np.asarray((self.offset == first[:, None]).all(axis=1) & (self.carrier.finished()[:, 0] <= first))

    def _execute(self, instruction: object) -> None:
        match instruction:
            case Compute():
                self._compute(instruction)
            case Join():
                self._join(instruction)
            case Wait(after, gates):
                flights = self.carrier.flights(after)
                if gates and flights:
                    self._gate(*self._of_ranks(flights))
                else:
                    self._wait(flights)
            case Work(name, takes_ns):
                self._work(name, takes_ns)
            case Share():
                self._shares.append((instruction, self.offset, self._base_ns))
            case Finish():
                self._finish()
            case Head():
                self._behind = False
                self.offset = self.offset + self._head_ns
                self._seen.head_end = self.offset

    def _now(self) -> Times:
        return self._at(self.offset, self._base_ns)

    def _at(self, offset: Times, base_ns: int) -> Times:
        return offset if base_ns == 0 else offset + self._x.of(base_ns)

    def _settle(self) -> None:
        """Add the compute so far to the offsets, and count it from 0 again."""
        self.offset, self._base_ns = self._now(), 0

    def _compute(self, instruction: Compute) -> None:
        if self._ready is not None:
            self._span("host", *self._ready, self._now())
            self._ready = None
        if self._slowed is None:
            self._base_ns = max(self._base_ns, instruction.base_ns)
        else:
            flights = [self._on_ranks(flight)[:2] for flight in self.carrier.flights(None)]
            self.offset = self._slowed.reach(self._x.of(instruction.base_ns), self.offset, flights)
        if instruction.name == "backward":
            self._behind, self._compute_end = True, self._now()
            seen = self._seen
            seen.compute_end = self._compute_end
            if self.draws:
                begun = self._forward_end
                self._span("compute", "forward", seen.head_end, begun)
                self._span("compute", "backward", begun, seen.compute_end)
        elif instruction.name not in ("forward", "block"):
            self._ready = (instruction.name, self._now()) if self.draws else None
        elif instruction.name == "forward" and self.looks:
            seen, self._forward_end = self._seen, self._now()
            is_whole = self._slowed is None and self.offset is seen.head_end  # nothing has held it up
            seen.forward = self._x.of(instruction.base_ns) if is_whole else self._forward_end - seen.head_end - seen.gated

    def _join(self, instruction: Join) -> None:
        operation = instruction.operation
        group = self.layout.groups[operation.group]
        if instruction.takes_ns:
            self._work(None, instruction.takes_ns, group)
        if self.offset.shape[1] == 1:
            ready = self.offset + self._x.latest(self._base_ns, group) if self._base_ns else self.offset
        else:
            ready = group.latest(self._now())
        self._arrivals.append((group, self.offset, self._base_ns))
        self.carrier.join(operation, ready)
        if instruction.holds:
            self._wait(self.carrier.flights((operation.id,)))

    def _arrived(self) -> Times:
        """Return the time at which each rank joined its last collective; ``NEVER`` if it joined none."""
        found = _NEVER
        for group, offset, base_ns in reversed(self._arrivals):
            found = np.where((found == NEVER) & group.members, self._at(offset, base_ns), found)
            if group.has_all:
                break
        return found

    def _wait(self, flights: list[Flight]) -> None:
        if flights:
            self._wait_until(*self._of_ranks(flights))

    def _of_ranks(self, flights: Sequence[Flight]) -> tuple[Times, Times]:
        """Return for each rank when all ``flights`` have ended, and when all of their ranks had joined them."""
        _, ends, mets = zip(*map(self._on_ranks, flights), strict=True)
        return reduce(np.maximum, ends), reduce(np.maximum, mets)

    def _on_ranks(self, flight: Flight) -> tuple[Times, Times, Times]:
        """Return for each rank the collective's start, its end, and when all of its ranks had joined it."""
        to_ranks = self.layout.groups[flight.operation.group].to_ranks
        return to_ranks(flight.start), to_ranks(flight.end), to_ranks(flight.met)

    def _wait_until(self, end: Times, met: Times) -> None:
        if not self._behind:  # the compute so far stays done
            if self._base_ns:
                end = end - self._x.of(self._base_ns)
            self.offset = np.maximum(self.offset, end)
            return
        if end.shape[1] == 1 and self.offset.shape[1] == 1:
            latest = self.offset
            if self._base_ns:
                latest = latest + self._x.latest(self._base_ns)
            if (end >= latest).all():
                self._stall(end, met)
                self.offset, self._base_ns = end, 0
                return
        self._settle()
        end = np.maximum(self.offset, end)
        self._stall(end, met)
        self.offset = end

    def _gate(self, end: Times, met: Times) -> None:
        now = self._now()
        takes = np.maximum(end - now, 0)
        self._seen.gated = self._seen.gated + takes
        self._stall(now + takes, met)
        self.offset = self.offset + takes

    def _stall(self, end: Times, met: Times) -> None:
        if self.looks:
            now = self._now()
            self._seen.stall = self._seen.stall + (end - now)
            self._seen.wait = self._seen.wait + np.clip(met - now, 0, end - now)
            if self.draws:
                self._span("compute", "wait", now, end)

    def _work(self, name: str | None, takes_ns: int, group: Group | None = None) -> None:
        takes: Times | int = takes_ns if group is None or group.has_all else np.where(group.members, takes_ns, 0)[None, :]
        self.offset = self.offset + takes
        if self._behind and self.looks:
            self._seen.update = self._seen.update + takes
        if self.draws and name is not None:
            self._span("compute", name, self._now() - takes, self._now())

    def _finish(self) -> None:
        ended = _NEVER
        for share, offset, base_ns in self._shares:
            flights = self.carrier.flights(share.after)
            start, met = self._of_ranks(flights) if flights else (_NEVER, _NEVER)
            if not any(self.layout.groups[flight.operation.group].has_all for flight in flights):  # else issued before they end
                start = np.maximum(start, self._at(offset, base_ns))
            start = np.maximum(start, ended)
            ended = start + share.takes_ns
            if self.draws:
                self._span("update", "update", start, ended)
            self._wait_until(start, met)
            self._settle()
            begun, self.offset = self.offset, np.maximum(self.offset, ended)
            if self.looks:
                self._seen.update = self._seen.update + (self.offset - begun)
        self._shares = []

    def _span(self, stream: str, name: str, start: Times, end: Times) -> None:
        self._seen.spans.append((stream, name, start, end))
