"""Engine: runs a script, many blocks of steps at once where their ranks begin together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from fleetbench.stragglers import stretch
from sim.clock import LATEST_NS
from sim.vector.groups import Times
from sim.vector.heads import Heads
from sim.vector.lanes import Lanes, Seen
from sim.vector.layout import Layout
from sim.vector.reach import BEYOND, OutOfReach, carried_ns, own_ns
from sim.vector.script import Script
from sim.vector.stretches import Stretches
from sim.vector.transfers import Carrier

CELLS = 2**17
"""Ranks times steps that are looked at together: arrays of this size stay in a processor's cache."""


class Sight(Protocol):
    """Keeps something of what ranks saw."""

    def see(self, seen: Seen, steps: Times, begins: Times) -> None:
        """One step of some blocks: the indices of the steps, and what is to be added to all times, shape ``(num_blocks, 1)``.

        ``seen`` may hold more blocks, which are to be left out.
        """
        ...


class Engine:
    """Runs a script from 0 ns to its end.

    Trainers that begin a block of steps together, with nothing in flight, go through it as if it were
    the first: so blocks that do the same are run side by side, from 0 ns each, and laid one behind the
    other. Where ranks do not end a block together, the next ones are run one by one.
    """

    def __init__(
        self,
        layout: Layout,
        script: Script,
        heads: Heads,
        rows: Callable[[int, int], Times],
        carrier: Callable[[int], Carrier],
        sights: Sequence[Sight],
        *,
        looks: bool = True,
        draws: bool = False,
    ) -> None:
        """``rows`` gives X of the steps with indices from one to another, ``carrier`` what carries the collectives of so many blocks.

        ``looks`` and ``draws`` are those of ``Lanes``.
        """
        self._layout = layout
        self._script = script
        self._heads = heads
        self._rows = rows
        self._carrier = carrier
        self._sights = sights
        self._options = (looks, draws)
        self._most_ns = heads.most_ns + own_ns(script.programs) + carried_ns(layout, script.programs)
        self._compute_ns = max((program.compute_ns for program in script.programs), default=0)
        self._reached_ns = 0
        self.is_even = True
        """Trainers have begun all blocks of steps together so far."""
        self._now_ns = 0
        self._lanes: Lanes | None = None
        self._most_blocks = CELLS
        self._window: tuple[int, Times] = (0, np.zeros((0, layout.num_ranks), dtype=np.int64))

    def run(self, done: Callable[[int], None]) -> None:
        """Run all steps; ``done`` is told how many have been."""
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
            self.is_even = False
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
        self.is_even = self.is_even and is_even

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
        self._reached_ns += len(drawn) * (self._most_ns + stretch(self._compute_ns, int(drawn.max(initial=0))))
        if self._reached_ns > LATEST_NS:
            raise OutOfReach(BEYOND)
