"""Transfers: starts and ends of collectives that share no port with others in flight.

A collective starts when all ranks of its part have joined it, when the collectives that it comes after have
ended, and when its communicator has started all earlier ones and has a free place in its queue. It may be
slower while one of its ranks computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from fleetbench.plan.operations import Operation
from sim.arrays.layout import LATER, Layout, Times, alone_ns


@dataclass(frozen=True, slots=True)
class Flight:
    """Start and end of one collective in every part of its group."""

    operation: Operation
    start: Times
    end: Times
    met: Times
    """Time at which the last rank had joined it and the collectives that it comes after."""


class Transfers:
    """Carries the collectives of several blocks, once all ranks of a part have joined; see the module."""

    def __init__(self, layout: Layout, num_blocks: int, pace: Fraction = Fraction(1)) -> None:
        """``pace``: a collective's speed while one of its ranks computes, as a share of its full speed."""
        self._layout = layout
        self._pace = pace
        self._compute_end: Times | None = None
        self._num_blocks = num_blocks
        self._met: dict[int, tuple[str, Times]] = {}
        """By id of the step's collectives: the group, and for each part the time at which the last rank had
        joined it and those that it comes after."""
        self._step: dict[int, Flight] = {}
        self._before: dict[int, Flight] = {}
        """Collectives of earlier steps, by id; these ids are below 0."""
        self._queues: dict[tuple[int, str], tuple[Times, list[Times]]] = {}
        """By communicator and group: the last start, and the latest ends in ascending order, at most as many
        as may be in flight."""

    def begin(self, start: Times, num_ids: int) -> None:
        """Begin a step after one with ``num_ids`` operations.

        Ranks start it at ``start``. Ids count from the step's first operation.
        """
        earliest = start.min(axis=1, keepdims=True)
        earlier = {other - num_ids: flight for other, flight in (self._before | self._step).items()}
        self._before = {other: flight for other, flight in earlier.items() if (flight.end > earliest).any()}
        self._step, self._met = {}, {}

    def join(self, operation: Operation, ready: Times) -> None:
        """Let each part's last rank join at ``ready``."""
        met, ready = self._meet(operation, ready), self._after(operation, ready)
        depth, key = self._layout.queue_depth, (operation.communicator, operation.group)
        started, ends = self._queues.get(key, (None, []))
        start = ready if started is None else np.maximum(ready, started)
        if len(ends) == depth:
            start = np.maximum(start, ends[0])
            ends = ends[1:]
        end = self._end(operation, start)
        ends = [*ends, end] if depth == 1 else list(np.sort(np.stack([*ends, end]), axis=0))
        self._queues[key] = (start, ends)
        self._step[operation.id] = Flight(operation, start, end, met)

    def _meet(self, operation: Operation, ready: Times) -> Times:
        """Return when the last rank of each part had joined ``operation`` and those that it comes after."""
        met = np.broadcast_to(ready, (len(ready), len(self._layout.groups[operation.group].parts)))
        for other in operation.after:
            if other in self._met:
                met = np.maximum(met, self._seen(*self._met[other], operation.group))
        self._met[operation.id] = operation.group, met
        return met

    def _after(self, operation: Operation, ready: Times) -> Times:
        """Return the latest of ``ready`` and the known ends of the collectives that ``operation`` comes after."""
        for other in operation.after:
            if other in self._step:
                ready = np.maximum(ready, self._seen(self._step[other].operation.group, self._step[other].end, operation.group))
        return ready

    def _seen(self, of: str, times: Times, group: str) -> Times:
        """Return for each part of ``group`` the latest of ``times`` in parts of group ``of`` that share a rank."""
        groups = self._layout.groups
        return times if of == group else groups[group].latest_of(groups[of], times)

    def flights(self, after: tuple[int, ...] | None) -> list[Flight]:
        """Return the collectives ``after`` that may still be in flight; ``None``: all of them."""
        joined = self._before | self._step
        return list(joined.values()) if after is None else [joined[other] for other in after if other in joined]

    def finished(self) -> Times:
        """Return the time in ns at which nothing is in flight any more, shape ``(num_blocks, 1)``."""
        ends = [ends[-1].max(axis=1, keepdims=True) for _, ends in self._queues.values()]
        return np.maximum.reduce(ends) if ends else np.zeros((self._num_blocks, 1), dtype=np.int64)

    def beside(self, compute_end: Times) -> Transfers:
        """Return a copy whose ranks compute until ``compute_end``, or this object if compute slows no collective."""
        if self._pace == 1:
            return self
        taken = Transfers(self._layout, self._num_blocks, self._pace)
        taken._step, taken._before, taken._queues = dict(self._step), dict(self._before), dict(self._queues)
        taken._compute_end = compute_end
        return taken

    def _end(self, operation: Operation, start: Times) -> Times:
        if self._compute_end is None:
            return start + self._layout.takes_ns(operation)
        until = self._layout.groups[operation.group].latest(self._compute_end)
        return _paced(start, [alone_ns(route) for route in self._layout.ways(operation)], until, self._pace)


def _paced(start: Times, alone: list[int], until: Times, pace: Fraction) -> Times:
    """Return when work of ``alone`` ns ends in each part: at ``pace`` until ``until``, then at full speed.

    The end is rounded once.
    """
    slow, unit = pace.numerator, pace.denominator
    exact: Any = np.int64 if 4 * max(alone) * unit + 4 * unit < LATER else object
    work = np.asarray([alone], dtype=exact) * unit
    slow_end = start + (2 * work + slow) // (2 * slow)
    changed = np.clip(until, start, slow_end)
    left = np.maximum((2 * (work - (changed - start).astype(exact) * slow) + unit) // (2 * unit), 0)
    return np.asarray(np.where(slow_end <= until, slow_end, changed + left).astype(np.int64))
