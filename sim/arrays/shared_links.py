"""Shared links: collectives that are in flight together and have ports in common.

One part of one collective is a meeting. Those of one communicator, group and part make a queue, which starts them in order. Queues whose
meetings have ports in common, directly or not, are a region: which of its meetings are in flight says how fast each of them goes.

An event loop over arrays carries them: one event of every block at a time, each block at a time of its own, with progress integrated
exactly and each end rounded once, as in ``sim.network.sharing``. Progress counts in units so small that all of it is whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fleetbench.plan.operations import Operation
from sim.arrays.layout import LATER, Layout, Times
from sim.arrays.supported import SHARED, Unsupported
from sim.arrays.transfers import Flight, Transfers, as_seen
from sim.clock import half_up
from sim.network.links import LATENCY, Port
from sim.network.sharing import fair_speeds

_LARGEST_UNIT, _LONGEST_NS = 2**60, 2**44
"""In 64 bits: units a nanosecond, and what a transfer alone may take, about five hours."""
_LOW_BITS = 2**64 - 1


class SharedTransfers(Transfers):
    """Carries collectives when somebody waits for one of them."""

    def __init__(self, layout: Layout, num_blocks: int, wires: dict[tuple[Operation, ...], Wires]) -> None:
        """``wires``: those known of operations that are joined together."""
        super().__init__(layout, num_blocks)
        self._wires = wires
        self._waiting: list[tuple[Operation, Times]] = []
        self._carried: list[tuple[Wires, Times]] = []
        """Ends that may be later than the next starts elsewhere."""
        self._finished = np.zeros((num_blocks, 1), dtype=np.int64)

    def begin(self, start: Times, num_ids: int) -> None:
        """See ``Transfers``."""
        if self._waiting:  # what goes on into this step has nothing beside it
            self._carry()
        earliest = start.min(axis=1)
        self._carried = [(wires, ends) for wires, ends in self._carried if (ends > earliest).any()]
        super().begin(start, num_ids)

    def join(self, operation: Operation, ready: Times) -> None:
        """See ``Transfers``."""
        for other in operation.after:
            if other in self._step:  # it has ended
                ready = np.maximum(ready, as_seen(self._layout, self._step[other], operation.group))
        self._waiting.append((operation, np.broadcast_to(ready, (self._num_blocks, len(self._layout.groups[operation.group].parts)))))

    def flights(self, after: tuple[int, ...] | None) -> list[Flight]:
        """See ``Transfers``."""
        if self._waiting:
            self._carry()
        return super().flights(after)

    def finished(self) -> Times:
        """See ``Transfers``."""
        if self._waiting:
            self._carry()
        return self._finished

    def _carry(self) -> None:
        operations, ready = (
            tuple(operation for operation, _ in self._waiting),
            np.concatenate([times for _, times in self._waiting], axis=1),
        )
        self._waiting = []
        if operations not in self._wires:
            self._wires[operations] = Wires(self._layout, operations)
        wires = self._wires[operations]
        starts, ends = wires.carry(ready.T)
        if any(before.meets(wires, ended, starts) for before, ended in self._carried):
            raise Unsupported(SHARED)
        self._carried.append((wires, ends))
        for operation, own in zip(operations, wires.places, strict=True):
            self._step[operation.id] = Flight(operation, starts[own].T, ends[own].T)
        self._finished = np.maximum(self._finished, ends.max(axis=0)[:, None])


class Wires:
    """What is known of operations that are joined together, before anybody joins: their meetings, queues, regions and speeds.

    Meetings are numbered by operation, then by part; one more number, the last, stands for none. Raises ``Unsupported`` where too many
    kinds of routes meet, or one takes no nanosecond.
    """

    def __init__(self, layout: Layout, operations: Sequence[Operation]) -> None:
        parts = [layout.groups[operation.group].parts for operation in operations]
        ends = list(accumulate(map(len, parts)))
        self.places = [slice(end - len(own), end) for end, own in zip(ends, parts, strict=True)]
        """The meetings of each operation."""
        self.routes = [route for operation in operations for route in layout.ways(operation)]
        self.depth = layout.queue_depth
        self._links = layout.routes.links
        self.num = len(self.routes)
        queues: dict[tuple[int, str, int], list[int]] = {}
        for operation, place in zip(operations, self.places, strict=True):
            for part, meeting in enumerate(range(place.start, place.stop)):
                queues.setdefault((operation.communicator, operation.group, part), []).append(meeting)
        by_region = _regions([{port for meeting in queue for port in self.routes[meeting].ports} for queue in queues.values()])
        own_queues = list(queues.values())
        ordered = [own_queues[index] for region in by_region for index in region]
        longest = max(map(len, ordered))
        self.queues = np.asarray([[*queue, *[self.num] * (longest + 1 - len(queue))] for queue in ordered])
        """Meetings of each queue in their order; queues of a region lie side by side."""
        self.region = np.repeat(np.arange(len(by_region)), [self.depth * len(region) for region in by_region])
        """Of every slot; a queue has as many as it has in flight at most."""
        self._begins = np.flatnonzero(np.diff(self.region, prepend=-1))
        self._followers(layout, operations)
        self._kinds()

    def _followers(self, layout: Layout, operations: Sequence[Operation]) -> None:
        """Which meetings come after each, and how many each comes after: those that a rank of its part is in."""
        place = {operation.id: index for index, operation in enumerate(operations)}
        followers: list[list[int]] = [[] for _ in range(self.num + 1)]
        missing = [*[0] * self.num, LATER]
        for operation, own in zip(operations, self.places, strict=True):
            for before in (place[other] for other in operation.after if other in place):
                part_of = layout.groups[operations[before].group].part_of
                for meeting, part in enumerate(layout.groups[operation.group].parts, start=own.start):
                    for met in set(part_of[list(part)].tolist()) - {-1}:
                        followers[self.places[before].start + met].append(meeting)
                        missing[meeting] += 1
        most = max(map(len, followers))
        self.followers = np.asarray([[*own, *[self.num] * (most - len(own))] for own in followers], dtype=np.int64)
        self.missing = np.asarray(missing)[:, None]

    def _kinds(self) -> None:
        """Routes of one kind go alike, and so do their latencies. The kinds that are in flight in a region, each counted, make a code."""
        of_flow = {id(route.flow): (route.ports, route.flow.loads, route.flow.bits_per_s) for route in self.routes}
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(of_flow.values()))}
        number_of = {flow: numbers[kind] for flow, kind in of_flow.items()}  # to hash a kind takes longer than all else here
        kinds = np.asarray([number_of[id(route.flow)] for route in self.routes])
        self._of_kind = [(set(ports), np.flatnonzero(kinds == number)) for (ports, _, _), number in numbers.items()]
        self.latencies_share = bool(self._links.in_flight)
        place = [0] * (2 * len(numbers))
        for begin, end in pairwise([*self._begins.tolist(), len(self.region)]):
            here = self.queues[begin // self.depth : end // self.depth]
            own = kinds[here[here < self.num]].tolist()
            weight = 1
            for kind in dict.fromkeys(own):
                for number in (kind, kind + len(numbers)) if self.latencies_share else (kind,):
                    place[number] = weight
                    weight *= 1 + min(own.count(kind), end - begin)
            if weight * len(self._begins) >= LATER:
                raise Unsupported(SHARED)
        none = [0] * len(kinds)
        self.columns = np.pad([none, none, kinds + len(numbers), kinds], ((0, 0), (0, 1)))
        """By stage and meeting: where its speed stands in a row of ``rates``."""
        self.weights = np.pad(np.asarray([none, none, *np.asarray(place)[self.columns[2:, :-1]]]), ((0, 0), (0, 1)))
        """By stage and meeting: what it adds to its region's code."""
        self._rows: dict[int, int] = {}
        costs = [route.cost for route in self.routes]
        if any(half_up(cost.transfer_ns) == 0 for cost in costs):  # which of several begins first within a nanosecond would matter
            raise Unsupported(SHARED)
        self.latency_ns = np.asarray([int(cost.latency_ns) for cost in costs])
        self.unit = math.lcm(*(cost.transfer_ns.denominator for cost in costs))
        """Units of progress in what takes a nanosecond alone."""
        takes_ns = ([cost.latency_ns for cost in costs], [cost.transfer_ns for cost in costs])
        self._whole_work = np.asarray([none, none, *([int(self.unit * each) for each in own] for own in takes_ns)], dtype=object)
        """By stage and meeting."""
        self.rates = np.zeros((0, len(place)), dtype=object)
        """Units a nanosecond, by what is in flight in a region, and by ``columns``."""
        self._count_in(self.unit)

    def _count_in(self, unit: int) -> None:
        """Use a smaller unit, of which there are so many in a nanosecond alone."""
        scale, self.unit = unit // self.unit, unit
        self._whole_work = whole = self._whole_work * scale
        fits = unit < _LARGEST_UNIT and int(whole.max()) < _LONGEST_NS * unit
        self.exact: Any = np.int64 if fits else object
        self.rates = np.asarray(self.rates.astype(object) * scale, dtype=self.exact)
        self.work = (whole & _LOW_BITS).astype(np.uint64).view(np.int64) if fits else whole
        """By stage and meeting; the lower 64 bits, unless ``exact`` is ``object``."""
        self.work_about = whole.astype(np.float64) if fits else whole

    def rows(self, stage: Times, held: Times) -> Times:
        """Of ``rates``, for every region and block, by the stage and the meeting of every slot. May change ``unit``."""
        num_regions = len(self._begins)
        codes = np.add.reduceat(self.weights[stage, held], self._begins, axis=0) * num_regions + np.arange(num_regions)[:, None]
        found, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
        for code, where in zip(found.tolist(), first.tolist(), strict=True):
            if code not in self._rows:
                region, block = divmod(where, codes.shape[1])
                own = self.region == region
                self._learn(code, list(zip(stage[own, block].tolist(), held[own, block].tolist(), strict=True)))
        return np.asarray([self._rows[code] for code in found.tolist()])[inverse.reshape(codes.shape)]

    def _learn(self, code: int, in_flight: Sequence[tuple[int, int]]) -> None:
        """How fast these go together, each with its stage: a new row."""
        moving = {meeting: self.routes[meeting] for stage, meeting in in_flight if stage == 3}
        flows = {meeting: route.flow for meeting, route in moving.items()}
        found = fair_speeds({meeting: route.ports for meeting, route in moving.items()}, self._links.capacity, flows)
        speeds = {int(self.columns[3, meeting]): speed for meeting, speed in found.items()}
        if self.latencies_share:
            routes = {meeting: self.routes[meeting] for stage, meeting in in_flight if stage == 2}
            waiting = {meeting: [(name + LATENCY, number, way) for name, number, way in own.ports] for meeting, own in routes.items()}
            found = fair_speeds(waiting, self._links.capacity)
            speeds |= {int(self.columns[2, meeting]): speed for meeting, speed in found.items()}
        unit = math.lcm(self.unit, *(speed.denominator for speed in speeds.values()))
        if unit != self.unit:
            self._count_in(unit)
        row = [int(unit * speeds.get(column, 1)) for column in range(self.rates.shape[1])]
        self._rows[code] = len(self.rates)
        self.rates = np.vstack([self.rates, np.asarray(row, dtype=self.exact)])

    def meets(self, later: Wires, ends: Times, starts: Times) -> bool:
        """Whether a meeting of ``later`` starts before one of these has ended that has a port in common with it."""
        return bool((ends.max(axis=0) > starts.min(axis=0)).any()) and any(
            not ports.isdisjoint(others) and bool((ends[own].max(axis=0) > starts[theirs].min(axis=0)).any())
            for ports, own in self._of_kind
            for others, theirs in later._of_kind
        )

    def carry(self, ready: Times) -> tuple[Times, Times]:
        """Starts and ends of all meetings, which set out on idle links, each when the ranks of its part have joined at ``ready``.

        Shapes ``(num_meetings, num_blocks)``.
        """
        while (found := _Loop(self, ready).run()) is None:
            continue
        return found


class _Loop:
    """Meetings under way, each in a slot: it waits for its start (stage 1), its latency passes (2), then its bytes (3).

    Where latencies share nothing, stage 1 goes on until the latency has passed, as all of that is known beforehand.

    What is left of a meeting may have more than 64 bits, of which the lower 64 are kept; see ``rounded_quotient``.
    """

    def __init__(self, wires: Wires, ready: Times) -> None:
        self._wires = wires
        num, num_blocks = ready.shape
        self._exact = wires.exact
        self._columns = np.arange(num_blocks)
        self._rows = np.arange(len(wires.queues))[:, None]
        self._ready = ready
        self._missing = np.repeat(wires.missing, num_blocks, axis=1)
        """Meetings that each one still comes after; none never starts."""
        self._flying, self._next, self._last = (np.zeros((len(wires.queues), num_blocks), dtype=np.int64) for _ in range(3))
        """Of each queue; the start of its last meeting."""
        shape = (len(wires.region), num_blocks)
        self._held = np.full(shape, num)
        self._stage = np.zeros(shape, dtype=np.int64)
        self._left, self._rate = np.zeros(shape, dtype=wires.exact), np.zeros(shape, dtype=wires.exact)
        self._due = np.full(shape, LATER)
        self._now = np.zeros(num_blocks, dtype=np.int64)
        self._starts, self._ends = (np.zeros((num, num_blocks), dtype=np.int64) for _ in range(2))

    def run(self) -> tuple[Times, Times] | None:
        """Until nothing is in flight in any block; none where a smaller unit turned out to need more bits."""
        self._start_all()
        while (then := self._due.min(axis=0)).min() < LATER:
            self._advance(then)
            if self._wires.exact is not self._exact:
                return None
        return self._starts, self._ends

    def _advance(self, then: Times) -> None:
        """The next event of every block, with all that happens at the same time."""
        is_live = then < LATER
        passed_ns = np.where(is_live, then - self._now, 0)
        self._left = self._left - passed_ns * self._rate
        self._now = self._now + passed_ns
        due = (self._due == then) & is_live
        self._end(*np.nonzero(due & (self._stage == 3)))
        passed = due & (self._stage > 0)
        self._stage[passed] += 1 if self._wires.latencies_share else 2
        self._left[passed] = self._wires.work[self._stage[passed], self._held[passed]]
        self._start_all()
        self._share(passed)

    def _end(self, slots: Times, blocks: Times) -> None:
        meetings = self._held[slots, blocks]
        self._ends[meetings, blocks] = self._now[blocks]
        self._stage[slots, blocks] = 0
        self._due[slots, blocks] = LATER
        np.subtract.at(self._missing, (self._wires.followers[meetings], blocks[:, None]), 1)
        np.subtract.at(self._flying, (slots // self._wires.depth, blocks), 1)

    def _start_all(self) -> None:
        for _ in range(self._wires.depth):
            self._start()

    def _start(self) -> None:
        """Give a slot to the next meeting of each queue that comes after nothing any more."""
        wires, depth = self._wires, self._wires.depth
        head = wires.queues[self._rows, self._next]
        queues, blocks = np.nonzero((self._flying < depth) & (self._missing[head, self._columns] == 0))
        meetings = head[queues, blocks]
        start = np.maximum(np.maximum(self._now[blocks], self._ready[meetings, blocks]), self._last[queues, blocks])
        slots = queues * depth + self._stage.reshape(-1, depth, self._stage.shape[1])[queues, :, blocks].argmin(axis=1)
        self._held[slots, blocks] = meetings
        self._stage[slots, blocks] = 1
        self._due[slots, blocks] = start if wires.latencies_share else start + wires.latency_ns[meetings]
        self._starts[meetings, blocks] = self._last[queues, blocks] = start
        self._next[queues, blocks] += 1
        self._flying[queues, blocks] += 1

    def _share(self, fresh: Times) -> None:
        """From now on, those in flight go as fast as their regions let them. ``fresh``: those of which nothing has passed yet."""
        wires, unit = self._wires, self._wires.unit
        rows = wires.rows(self._stage, self._held)
        if wires.exact is not self._exact:
            return
        scale = wires.unit // unit
        self._left = self._left * scale
        moves = self._stage > 1
        about: Any = None
        if self._exact is np.int64:
            about = np.where(moves, self._due - self._now, 0) * self._rate.astype(np.float64) * scale
            about[fresh] = wires.work_about[self._stage[fresh], self._held[fresh]]
        self._rate = np.where(moves, wires.rates[rows[wires.region], wires.columns[self._stage, self._held]], 0)
        takes = rounded_quotient(self._left, np.maximum(self._rate, 1), about)
        self._due = np.where(moves, self._now + np.maximum(takes, 0), self._due).astype(np.int64)


def rounded_quotient(left: Times, rate: Times, about: npt.NDArray[np.float64] | None) -> Times:
    """``left / rate``, half up. Of integers of any size where ``about`` is none.

    Else ``left`` has the lower 64 bits of numbers that ``about`` is near to: by half of 2**60, or of a rate before this one, and rounding.
    The remainder beside the quotient in floating point has fewer than 62 bits then, so that its lower 64 bits are all of it. Rates are
    below 2**60, quotients below 2**45.
    """
    if about is None:
        return np.asarray((2 * left + rate) // (2 * rate))
    near = np.rint(about / rate).astype(np.int64)
    return np.asarray(near + (2 * (left - near * rate) + rate) // (2 * rate))


def _regions(ports_of: Sequence[set[Port]]) -> list[list[int]]:
    """The indices of sets that have ports in common, directly or not."""
    found: list[tuple[list[int], set[Port]]] = []
    for index, ports in enumerate(ports_of):
        near = [region for region in found if not region[1].isdisjoint(ports)]
        found = [region for region in found if region not in near]
        found.append(([*(other for region in near for other in region[0]), index], ports.union(*(region[1] for region in near))))
    return [indices for indices, _ in found]
