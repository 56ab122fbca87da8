"""Compute times of all ranks at once, with delays and while collectives slow them."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from fleetbench.stragglers import ONE
from sim.arrays.layout import LATER, Group, Times

_SHIFT = ONE.bit_length() - 1


def stretched(base_ns: int, x: Times, largest: int) -> Times:
    """Return ``fleetbench.stragglers.stretch`` for an array of X, of which none exceeds ``largest``."""
    if base_ns * max(largest, ONE) < 2**62:  # no X is below -1
        return base_ns + ((base_ns * x + ONE // 2) >> _SHIFT)
    return np.asarray((base_ns * (ONE + x.astype(object)) + ONE // 2) // ONE).astype(np.int64)  # beyond 64 bits on the way


class Stretches:
    """Compute times of one step of every block.

    ``x`` is X in units of 2^-24, shape ``(num_blocks, num_ranks)``.
    """

    def __init__(self, x: Times) -> None:
        self._x = x
        self._most: dict[int, Times] = {}
        self._largest = int(x.max(initial=0))
        self._known: dict[int, Times] = {}

    def of(self, base_ns: int) -> Times:
        """Return the time in ns that ``base_ns`` of compute takes on every rank."""
        if base_ns not in self._known:
            self._known[base_ns] = stretched(base_ns, self._x, self._largest)
        return self._known[base_ns]

    def latest(self, base_ns: int, group: Group | None = None) -> Times:
        """Return the longest time in ns that ``base_ns`` takes in each part of ``group``; None: among all ranks.

        The time grows with X, so the largest X decides.
        """
        key = id(group)
        if key not in self._most:
            self._most[key] = self._x.max(axis=1, keepdims=True) if group is None or group.is_whole else group.latest(self._x)
        return stretched(base_ns, self._most[key], self._largest)


class Slowed:
    """Compute of one step, which takes ``slow`` times as long while collectives of its rank are in flight.

    See ``sim.reference.trainer``. Progress is counted in whole units of 1 / ``slow.numerator`` ns, so that it
    is exact, and the time of each mark is rounded once.
    """

    def __init__(self, slow: Fraction) -> None:
        self._full, self._slow = slow.numerator, slow.denominator  # units of progress per ns
        self._done: Any = 0

    def reach(self, mark_ns: Times, now: Times, flights: Sequence[tuple[Times, Times]]) -> Times:
        """Return when ranks that compute from ``now`` on reach a mark of their step.

        ``flights`` has the starts and ends of their collectives.
        """
        exact: Any = np.int64 if 4 * int(mark_ns.max()) * self._full < LATER else object
        mark = mark_ns.astype(exact) * self._full
        left = mark - self._done
        time, left = (values.copy() for values in np.broadcast_arrays(now, left))
        going = left > 0
        moments, in_flight = _changes(time, time + self._takes(left, self._slow), flights)
        before = None
        for moment, count in zip(moments, in_flight, strict=True):
            rate = np.where(count > 0, self._slow, self._full)
            takes = self._takes(left, rate)
            live = going & (moment >= time)
            if before is not None:
                live &= moment > before  # if several changes coincide, the pace before the first counts
            reached = live & (time + takes <= moment)
            passed = np.where(reached, takes, np.where(live, moment - time, 0))
            time, left, going, before = time + passed, left - passed.astype(exact, copy=False) * rate, going & ~reached, moment
        passed = np.where(going, self._takes(left, self._full), 0)
        self._done = mark - (left - passed.astype(exact) * self._full)
        return np.asarray(time + passed)

    @staticmethod
    def _takes(left: Any, rate: Any) -> Times:
        return np.asarray(np.maximum((2 * left + rate) // (2 * rate), 0).astype(np.int64))


def _changes(now: Times, last: Times, flights: Sequence[tuple[Times, Times]]) -> tuple[list[Times], list[Times]]:
    """Return when collectives start or end, in order, and the number in flight before each.

    Those that end before ``now`` or start after ``last`` are left out.
    """
    earliest, latest = now.min(), last.max()
    near = [(start, end) for start, end in flights if end.max() >= earliest and start.min() <= latest]
    if not near:
        return [], []
    moments = np.stack(np.broadcast_arrays(*(times for flight in near for times in flight)))
    more = np.asarray([1, -1] * len(near)).reshape(-1, *[1] * (moments.ndim - 1))
    order = np.argsort(moments, axis=0, kind="stable")
    moments = np.take_along_axis(moments, order, axis=0)
    changes = np.take_along_axis(np.broadcast_to(more, moments.shape), order, axis=0)
    return list(moments), list(np.cumsum(changes, axis=0) - changes)
