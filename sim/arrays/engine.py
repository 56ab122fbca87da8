"""Engine: runs a script, many blocks of steps at once where their ranks begin together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np

from fleetbench.plan.layers import LayerTable
from fleetbench.plan.operations import Operation
from fleetbench.stragglers import stretch
from sim.arrays.groups import Times
from sim.arrays.lanes import Lanes, Seen
from sim.arrays.layout import Layout
from sim.arrays.reach import BEYOND, SHARED, OutOfReach, carried_ns, overlaps, own_ns, refuse_slowed, shares, waits_for_all
from sim.arrays.script import Script, script_of
from sim.arrays.shared import SharedTransfers, Wires
from sim.arrays.stretches import Stretches
from sim.arrays.transfers import Transfers
from sim.clock import LATEST_NS
from sim.scenario import Scenario

CELLS = 2**17
"""Ranks times steps that are looked at together: arrays of this size stay in a processor's cache."""


class Heads:
    """The time from every step's start to its forward, for arrays of ranks; see ``fleetbench.plan.host_work``."""

    def __init__(self, table: LayerTable, fetch_every: int, num_steps: int) -> None:
        step = np.arange(num_steps)
        fetches = (step > 0) & (step % fetch_every == 0)
        self._fetch_ns = np.where(fetches, int(table.fetch), 0)
        self._known_ns = self._fetch_ns + int(table.load) + int(table.read)
        self._table = table
        outstanding = table.loaders * table.prefetch
        zero = np.zeros((1, 1), dtype=np.int64)
        self._ready = deque([zero] * table.loaders, maxlen=table.loaders)
        self._taken = deque([zero] * outstanding, maxlen=outstanding)

    @property
    def most_ns(self) -> int:
        """What one of them takes at most, with all batches still to be made."""
        table = self._table
        return table.fetch + table.read + table.load * (2 if self.is_remembered else 1)

    @property
    def is_remembered(self) -> bool:
        """Loaders are ahead or late, so that a head follows from steps before it."""
        return self._table.loaders > 0

    def known(self, first: int, stride: int, count: int) -> Times:
        """What the heads of steps ``first``, ``first + stride``, ... take, without loaders; shape ``(count, 1)``."""
        return self._known_ns[first : first + stride * count : stride, None]

    def following(self, step: int, start: Times) -> Times:
        """What the head of the next step takes, which starts at ``start``; loaders began at 0."""
        if not self.is_remembered:
            return self.known(step, 1, 1)
        asked = start + self._fetch_ns[step]
        self._ready.append(np.maximum(self._ready[0], self._taken[0]) + int(self._table.load))
        self._taken.append(np.maximum(asked, self._ready[-1]))
        return np.asarray(self._taken[-1] + int(self._table.read) - start)


class Sight(Protocol):
    """Keeps something of what ranks saw."""

    def see(self, seen: Seen, steps: Times, begins: Times) -> None:
        """One step of some blocks: the indices of the steps, and what is to be added to all times, shape ``(num_blocks, 1)``.

        ``seen`` may hold more blocks, which are to be left out.
        """
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A scenario whose steps run block by block."""

    scenario: Scenario
    script: Script
    layout: Layout
    carrier: Callable[[int], Transfers]
    """Makes what carries the collectives of so many blocks."""
    contention: tuple[Fraction, Fraction] = (Fraction(1), Fraction(1))
    """How many times as long compute takes beside collectives of its rank, and a collective beside compute of its ranks."""

    @classmethod
    def of(cls, scenario: Scenario, layout: Layout) -> Prepared:
        """Look at what a scenario's steps do. Raises ``OutOfReach`` where they are none of this engine's."""
        script = script_of(scenario)
        programs, is_slowed = script.programs, overlaps(scenario, script.programs)
        if shares(layout, programs):
            if is_slowed or not all(map(waits_for_all, programs)):
                raise OutOfReach(SHARED)
            wires: dict[tuple[Operation, ...], Wires] = {}
            return cls(scenario, script, layout, lambda num_blocks: SharedTransfers(layout, num_blocks, wires))
        if not is_slowed:
            return cls(scenario, script, layout, lambda num_blocks: Transfers(layout, num_blocks))
        declared = (scenario.table.contention, scenario.table.collective_contention)
        compute, collectives = (1 + Fraction(repr(value)) for value in declared)  # the decimals that a file writes
        if collectives > 1:
            refuse_slowed(layout, programs)
        return cls(scenario, script, layout, lambda num_blocks: Transfers(layout, num_blocks, 1 / collectives), (compute, collectives))


class Engine:
    """Runs a script from 0 ns to its end.

    Trainers that begin a block of steps together, with nothing in flight, go through it as if it were
    the first: so blocks that do the same are run side by side, from 0 ns each, and laid one after the
    other. Where ranks do not end a block together, the next ones are run one by one.
    """

    def __init__(self, prepared: Prepared, sights: Sequence[Sight], *, looks: bool = True, draws: bool = False) -> None:
        """``looks`` and ``draws`` are those of ``Lanes``."""
        scenario, self._layout, self._script = prepared.scenario, prepared.layout, prepared.script
        self._heads = Heads(scenario.table, scenario.fetch_every, len(scenario.steps))
        self._rows = scenario.draws.rows
        self._carrier = prepared.carrier
        self._sights = sights
        self._options = (looks, draws, prepared.contention[0])
        programs = self._script.programs
        self._slowest = math.ceil(max(prepared.contention))
        self._most_ns = self._heads.most_ns + own_ns(programs) + carried_ns(self._layout, programs)
        self._compute_ns = max((program.compute_ns for program in programs), default=0)
        self._reached_ns = 0
        self._now_ns = 0
        self._lanes: Lanes | None = None
        self._most_blocks = CELLS
        self._window: tuple[int, Times] = (0, np.zeros((0, self._layout.num_ranks), dtype=np.int64))

    def run(self, done: Callable[[int], None]) -> None:
        """Run all steps; ``done`` is told how many have been. Raises ``OutOfReach`` where times may leave 64 bits on the way."""
        for begin, pattern, count in self._script.blocks():
            first, end = begin, begin + count * len(pattern)
            while first < end:
                if self._lanes is None and not self._heads.is_remembered and len(pattern) * self._layout.num_ranks <= CELLS:
                    begun = first
                    first += self._together(first, pattern, (end - first) // len(pattern)) * len(pattern)
                    for step in range(begun, first):
                        done(step + 1)
                else:
                    self._one(first, pattern, done)
                    first += len(pattern)

    def _together(self, first: int, pattern: tuple[int, ...], count: int) -> int:
        """Run blocks side by side; how many of them are done."""
        length, ranks = len(pattern), self._layout.num_ranks
        num_blocks = min(count, max(1, CELLS // (length * ranks)), self._most_blocks)
        lanes = Lanes(self._layout, self._carrier(num_blocks), np.zeros((num_blocks, 1), dtype=np.int64), *self._options)
        x = self._x(first, num_blocks * length).reshape(num_blocks, length, ranks)
        seen = [
            lanes.step(self._script.programs[program], Stretches(x[:, index]), self._heads.known(first + index, length, num_blocks))
            for index, program in enumerate(pattern)
        ]
        even = lanes.is_even()
        good = num_blocks if even.all() else int(np.argmin(even)) + 1
        begins = self._now_ns + np.concatenate(([0], np.cumsum(lanes.offset[: good - 1, 0]))).astype(np.int64)
        for index, found in enumerate(seen):
            steps = np.arange(first + index, first + good * length, length)
            for sight in self._sights:
                sight.see(found, steps, begins[:, None])
        if even[good - 1]:
            self._now_ns = int(begins[-1] + lanes.offset[good - 1, 0])
            self._most_blocks = min(2 * self._most_blocks, CELLS)
        else:
            self._lanes = lanes.block(good - 1, int(begins[-1]))
            self._most_blocks = good
        return good

    def _one(self, first: int, pattern: tuple[int, ...], done: Callable[[int], None]) -> None:
        """Run one block by itself, from wherever its ranks are."""
        lanes = self._lanes
        if lanes is None:
            lanes = Lanes(self._layout, self._carrier(1), np.full((1, 1), self._now_ns), *self._options)
        for step, program in enumerate(pattern, start=first):
            head_ns = self._heads.following(step, lanes.offset)
            found = lanes.step(self._script.programs[program], Stretches(self._x(step, 1)), head_ns)
            for sight in self._sights:
                sight.see(found, np.asarray([step]), np.zeros((1, 1), dtype=np.int64))
            done(step + 1)
        is_even = bool(lanes.is_even()[0])
        self._now_ns = int(lanes.offset[0, 0])
        self._lanes = None if is_even else lanes

    def _x(self, first: int, count: int) -> Times:
        """X of so many steps, shape ``(count, num_ranks)``; a few steps more are drawn at once where they are few."""
        begin, drawn = self._window
        if first < begin or first + count > begin + len(drawn):
            begin = first
            ahead = max(count, CELLS // self._layout.num_ranks)
            drawn = self._rows(first, min(first + ahead, len(self._script.sequence)))
            self._window = (begin, drawn)
            self._check(drawn)
        return drawn[first - begin : first - begin + count]

    def _check(self, drawn: Times) -> None:
        """Raise ``OutOfReach`` before times may leave 64 bits."""
        self._reached_ns += len(drawn) * self._slowest * (self._most_ns + stretch(self._compute_ns, int(drawn.max(initial=0))))
        if self._reached_ns > LATEST_NS:
            raise OutOfReach(BEYOND)
