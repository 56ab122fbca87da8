"""Stretches: what compute takes with its delays, for all ranks at once."""

from __future__ import annotations

import numpy as np

from fleetbench.stragglers import ONE
from sim.vector.groups import Group, Times

_SHIFT = ONE.bit_length() - 1


def stretched(base_ns: int, x: Times, largest: int) -> Times:
    """``fleetbench.stragglers.stretch`` for an array of X, none above ``largest``."""
    if base_ns * max(largest, ONE) < 2**62:  # no X is below -1
        return base_ns + ((base_ns * x + ONE // 2) >> _SHIFT)
    return np.asarray((base_ns * (ONE + x.astype(object)) + ONE // 2) // ONE).astype(np.int64)  # beyond 64 bits on the way


class Stretches:
    """Compute of one step of every block; ``x`` is X in units of 2^-24, shape ``(num_blocks, num_ranks)``."""

    def __init__(self, x: Times) -> None:
        self._x = x
        self._most: dict[int, Times] = {}
        self._largest = int(x.max(initial=0))
        self._known: dict[int, Times] = {}

    def of(self, base_ns: int) -> Times:
        """What ``base_ns`` takes on every rank."""
        if base_ns not in self._known:
            self._known[base_ns] = stretched(base_ns, self._x, self._largest)
        return self._known[base_ns]

    def latest(self, base_ns: int, group: Group | None = None) -> Times:
        """The longest that ``base_ns`` takes in each part of a group, or of all ranks: it grows with X, so that the largest X decides."""
        key = id(group)
        if key not in self._most:
            self._most[key] = self._x.max(axis=1, keepdims=True) if group is None or group.is_whole else group.latest(self._x)
        return stretched(base_ns, self._most[key], self._largest)
