"""Shared: collectives of all trainers that are in flight together, and share one way.

Where every collective passes the same ports, all that is to be known of those in flight is how many
they are. So an event loop over arrays carries them: one event of every block at a time, each block at
a time of its own, with progress integrated exactly and each end rounded once, as in ``sim.network.sharing``.
Progress counts in units so small that all of it is whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from fleetbench.plan.operations import Operation
from sim.arrays.groups import LATER, Times
from sim.arrays.layout import Layout
from sim.arrays.program import Finish, Join, Program, Share, Wait
from sim.arrays.reach import with_those_before
from sim.arrays.transfers import Flight
from sim.network.links import LATENCY
from sim.network.sharing import fair_speeds
from sim.network.work import Route


@dataclass(frozen=True, slots=True)
class SharedWire:
    """The way of all collectives, and how fast so many in flight go on it."""

    layout: Layout
    unit: int
    """Units of progress in what takes a nanosecond alone."""
    latency_rates: tuple[int, ...]
    """Units a nanosecond of each of 0, 1, 2, ... in their latency."""
    rates: tuple[int, ...]
    """The same of those behind it."""
    routes: dict[tuple[str, bool, int], Route]

    @classmethod
    def of(cls, layout: Layout, programs: Sequence[Program]) -> SharedWire | None:
        """The wire of these programs; none where their collectives go different ways, or some are waited for while others go on."""
        joins = [join for program in programs for join in program.joins]
        if not all(layout.groups[join.operation.group].is_whole for join in joins) or not all(map(_waits_for_all, programs)):
            return None
        routes = {_key(join.operation): layout.ways(join.operation)[0] for join in joins}
        first = next(iter(routes.values()))
        if any(route.ports != first.ports or route.flow != first.flow for route in routes.values()):
            return None
        most = len({(join.operation.communicator, join.operation.group) for join in joins}) * layout.queue_depth
        speeds, latency_speeds = zip(*(_speeds(layout, first, count) for count in range(most + 1)), strict=True)
        parts = [*speeds, *latency_speeds, *(route.cost.transfer_ns for route in routes.values())]
        unit = math.lcm(*(part.denominator for part in parts))
        return cls(layout, unit, tuple(int(unit * speed) for speed in latency_speeds), tuple(int(unit * speed) for speed in speeds), routes)

    def carrier(self, num_blocks: int) -> SharedTransfers:
        """What carries the collectives of so many blocks."""
        return SharedTransfers(self, num_blocks)


class SharedTransfers:
    """Collectives of some blocks; see ``sim.arrays.transfers.Carrier``. They are carried when somebody waits for one of them."""

    def __init__(self, wire: SharedWire, num_blocks: int) -> None:
        self._wire = wire
        self._num_blocks = num_blocks
        self._waiting: list[tuple[Operation, Times]] = []
        self._step: dict[int, Flight] = {}
        self._finished = np.zeros((num_blocks, 1), dtype=np.int64)

    def begin(self, start: Times) -> None:  # noqa: ARG002  # nothing of a step is in flight in the next
        """See ``Carrier``."""
        assert not self._waiting, "a step waits for all of its collectives"
        self._step = {}

    def join(self, operation: Operation, ready: Times) -> None:
        """See ``Carrier``."""
        self._waiting.append((operation, np.broadcast_to(ready, (self._num_blocks, 1))))

    def flights(self, after: tuple[int, ...] | None) -> list[Flight]:
        """See ``Carrier``."""
        if self._waiting:
            self._carry()
        return list(self._step.values()) if after is None else [self._step[other] for other in after if other in self._step]

    def finished(self) -> Times:
        """See ``Carrier``."""
        return self._finished

    def block(self, index: int, begin_ns: int) -> SharedTransfers:
        """See ``Carrier``."""
        taken = SharedTransfers(self._wire, 1)
        taken._finished = self._finished[index : index + 1] + begin_ns
        return taken

    def beside(self, compute_end: Times) -> None:
        """See ``Carrier``."""

    def _carry(self) -> None:
        operations = [operation for operation, _ in self._waiting]
        ready = np.concatenate([times for _, times in self._waiting], axis=1).T
        for index, operation in enumerate(operations):
            for other in operation.after:
                if other in self._step:  # it has ended
                    ready[index] = np.maximum(ready[index], self._step[other].end[:, 0])
        self._waiting = []
        starts, ends = carry(self._wire, operations, ready)
        for index, operation in enumerate(operations):
            self._step[operation.id] = Flight(operation, starts[index][:, None], ends[index][:, None])
        self._finished = np.maximum(self._finished, ends.max(axis=0)[:, None])


def carry(wire: SharedWire, operations: Sequence[Operation], ready: Times) -> tuple[Times, Times]:
    """Starts and ends of collectives that set out on an idle wire, each when all ranks have joined at ``ready``.

    Shapes ``(num_operations, num_blocks)``. A communicator starts its own in their order.
    """
    return _Wires(wire, operations, ready).run()


class _Wires:
    """One wire a block. A slot holds a collective in flight: first its latency passes (stage 1), then its bytes (stage 2)."""

    def __init__(self, wire: SharedWire, operations: Sequence[Operation], ready: Times) -> None:
        num_operations, num_blocks = ready.shape
        costs = [wire.routes[_key(operation)].cost for operation in operations]
        work = [[wire.unit * int(cost.latency_ns) for cost in costs], [int(wire.unit * cost.transfer_ns) for cost in costs]]
        exact: Any = np.int64 if 4 * max(map(max, work)) + 4 * max(*wire.rates, *wire.latency_rates) < LATER else object
        self._work = np.asarray(work, dtype=exact)
        self._rates = np.asarray([wire.latency_rates, wire.rates], dtype=exact)
        queues: dict[int, list[int]] = {}
        place = {operation.id: index for index, operation in enumerate(operations)}
        self._followers: list[list[int]] = [[] for _ in operations]
        missing = np.zeros((num_operations + 1, 1), dtype=np.int64)
        for index, operation in enumerate(operations):
            queues.setdefault(operation.communicator, []).append(index)
            for other in operation.after:
                if other in place:
                    self._followers[place[other]].append(index)
                    missing[index] += 1
        self._has_followers = any(self._followers)
        self._columns = np.arange(num_blocks)
        self._rows = np.arange(len(queues))[:, None]
        self._depth = wire.layout.queue_depth
        self._flying = np.zeros((len(queues), num_blocks), dtype=np.int64)
        """Of each communicator."""
        self._ready = np.concatenate([ready, np.full((1, num_blocks), LATER)])
        self._missing = np.repeat(missing, num_blocks, axis=1)
        """Operations that each one still comes after."""
        longest = max(map(len, queues.values()))
        self._queues = np.asarray([[*queue, *[num_operations] * (longest + 1 - len(queue))] for queue in queues.values()])
        self._next = np.zeros((len(queues), num_blocks), dtype=np.int64)
        self._queue_of_slot = np.repeat(np.arange(len(queues)), wire.layout.queue_depth)
        shape = (len(self._queue_of_slot), num_blocks)
        self._held = np.full(shape, num_operations)
        self._stage = np.zeros(shape, dtype=np.int64)
        self._left = np.zeros(shape, dtype=exact)
        self._rate = np.ones(shape, dtype=exact)
        self._since = np.zeros(shape, dtype=np.int64)
        self._due = np.full(shape, LATER)
        self._now = np.zeros(num_blocks, dtype=np.int64)
        self._starts, self._ends = (np.zeros((num_operations, num_blocks), dtype=np.int64) for _ in range(2))

    def run(self) -> tuple[Times, Times]:
        """Until nothing is in flight in any block."""
        while self._advance():
            pass
        return self._starts, self._ends

    def _advance(self) -> bool:
        """The next event of every block, with all that happens at the same time; whether there was one."""
        head = self._queues[self._rows, self._next]
        can = self._flying < self._depth
        if self._has_followers:
            can &= self._missing[head, self._columns] == 0
        starts = np.where(can, np.maximum(self._now, self._ready[head, self._columns]), LATER)
        then = np.minimum(starts.min(axis=0), self._due.min(axis=0))
        is_live = then < LATER
        if not is_live.any():
            return False
        self._now = np.where(is_live, then, self._now)
        self._left = self._left - np.where(self._stage > 0, self._now - self._since, 0) * self._rate
        self._since[:] = self._now
        due = (self._due == then) & is_live
        self._end(due & (self._stage == 2))
        passed = due & (self._stage == 1)
        self._stage[passed] = 2
        self._left[passed] = self._work[1][self._held[passed]]
        self._start(head, (starts == then) & is_live)
        self._share()
        return True

    def _end(self, ended: Any) -> None:
        if not ended.any():
            return
        slots, blocks = np.nonzero(ended)
        operations = self._held[slots, blocks]
        self._ends[operations, blocks] = self._now[blocks]
        for operation in np.unique(operations).tolist() if self._has_followers else ():
            for follower in self._followers[operation]:
                self._missing[follower, blocks[operations == operation]] -= 1
        self._stage[ended] = 0
        np.subtract.at(self._flying, (self._queue_of_slot[slots], blocks), 1)

    def _start(self, head: Times, starting: Any) -> None:
        for queue in np.nonzero(starting.any(axis=1))[0].tolist():
            blocks = np.nonzero(starting[queue])[0]
            own = slice(queue * self._depth, (queue + 1) * self._depth)
            slots = own.start + np.argmin(self._stage[own, blocks], axis=0)
            operations = head[queue, blocks]
            self._held[slots, blocks] = operations
            self._stage[slots, blocks] = 1
            self._left[slots, blocks] = self._work[0][operations]
            self._starts[operations, blocks] = self._now[blocks]
            self._next[queue, blocks] += 1
            self._flying[queue, blocks] += 1

    def _share(self) -> None:
        """From now on, those in flight go at the rate that their number leaves each."""
        in_latency, behind = self._stage == 1, self._stage == 2
        rates = np.where(behind, self._rates[1][behind.sum(axis=0)], self._rates[0][in_latency.sum(axis=0)])
        self._rate = np.where(self._stage > 0, rates, 1)
        takes = (2 * self._left + self._rate) // (2 * self._rate)
        self._due = np.where(self._stage > 0, self._now + np.maximum(takes, 0), LATER).astype(np.int64)


def _speeds(layout: Layout, route: Route, count: int) -> tuple[Fraction, Fraction]:
    """Of each of so many in flight, as a share of its speed alone: behind its latency, and in it."""
    key = (id(route.flow), count)
    if key not in layout.speeds:
        links, all_of_them, alone = layout.routes.links, range(max(count, 1)), Fraction(1)
        latencies = tuple((name + LATENCY, number, way) for name, number, way in route.ports)
        speed = fair_speeds(dict.fromkeys(all_of_them, route.ports), links.capacity, dict.fromkeys(all_of_them, route.flow))[0]
        in_latency = fair_speeds(dict.fromkeys(all_of_them, latencies), links.capacity)[0] if links.in_flight else alone
        layout.speeds[key] = (speed, in_latency)
    return layout.speeds[key]


def _waits_for_all(program: Program) -> bool:
    """Whether whoever waits for a collective waits for all that were joined before."""
    joined: dict[int, Operation] = {}
    waited: set[int] = set()
    for instruction in program.instructions:
        if isinstance(instruction, Join):
            joined[instruction.operation.id] = instruction.operation
            waited |= {instruction.operation.id} if instruction.holds else set()
        elif isinstance(instruction, Share | Wait):
            waited |= set(joined) if instruction.after is None else set(instruction.after)
        waits = isinstance(instruction, Wait | Finish) or (isinstance(instruction, Join) and instruction.holds)
        if waits and not set(joined) <= with_those_before(waited, joined):
            return False
    return set(joined) <= with_those_before(waited, joined)


def _key(operation: Operation) -> tuple[str, bool, int]:
    return operation.kind, operation.payload == "rows", operation.nbytes
