"""Groups: process groups as index arrays."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from itertools import chain

import numpy as np
import numpy.typing as npt

from fleetbench.plan.groups import Parts

Times = npt.NDArray[np.int64]
"""Nanoseconds, a row for each block of steps; a column for each rank or part, or one column where all have the same."""

NEVER = -(2**62)
"""Before every time: what a rank waits for that waits for nothing."""
LATER = 2**62
"""After every time."""


def latest_of(times: Iterable[Times]) -> Times:
    """The latest of some times, of which some are the same in all columns."""
    return functools.reduce(np.maximum, times)


class Group:
    """The parts of a group in which there is somebody to meet."""

    def __init__(self, parts: Parts, num_ranks: int) -> None:
        self.parts = tuple(part for part in parts if len(part) > 1)
        sizes = [len(part) for part in self.parts]
        self.num_ranks = num_ranks
        self._order = np.fromiter(chain.from_iterable(self.parts), dtype=np.int64, count=sum(sizes))
        self._begins = np.cumsum([0, *sizes], dtype=np.int64)[:-1]
        self.part_of = np.full(num_ranks, -1, dtype=np.int64)
        """The part of every rank; -1: in none."""
        self.part_of[self._order] = np.repeat(np.arange(len(sizes)), sizes)
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.members = self.part_of >= 0
        self.has_all = len(self._order) == num_ranks
        self.is_whole = self.has_all and len(sizes) == 1
        """All ranks are in one part."""
        self._is_sorted = self.has_all and bool((self._order == np.arange(num_ranks)).all())

    def latest(self, values: Times) -> Times:
        """The largest value among each part's ranks, from one a rank."""
        if self.is_whole:
            return np.asarray(values.max(axis=1, keepdims=True))
        inside = values if self._is_sorted else values[:, self._order]
        return np.asarray(np.maximum.reduceat(inside, self._begins, axis=1))

    def to_ranks(self, values: Times) -> Times:
        """Each part's value for its ranks, and ``NEVER`` for those in none."""
        of_ranks = values if values.shape[1] == 1 else values[:, self.part_of]
        return of_ranks if self.has_all else np.where(self.members, of_ranks, NEVER)


class Crossing:
    """Which parts of one group have ranks of which parts of another."""

    def __init__(self, of: Group, among: Group) -> None:
        both = of.members & among.members
        pairs = np.unique(np.stack([among.part_of[both], of.part_of[both]], axis=1), axis=0)
        self._among, self._begins = np.unique(pairs[:, 0], return_index=True)
        self._of = pairs[:, 1]
        self._num_parts = len(among.parts)
        self.is_full = len(pairs) == len(of.parts) * len(among.parts)
        """Each part of the one has a rank of each part of the other."""

    def latest(self, values: Times) -> Times:
        """For every part of ``among``, the largest value over the parts of ``of`` that have a rank of it."""
        if not len(self._of):
            return np.full((len(values), self._num_parts), NEVER)
        found = np.maximum.reduceat(values[:, self._of], self._begins, axis=1)
        if len(self._among) == self._num_parts:
            return np.asarray(found)
        whole = np.full((len(values), self._num_parts), NEVER)
        whole[:, self._among] = found
        return whole


class Groups:
    """A plan's groups by name, and how they cross."""

    def __init__(self, parts: dict[str, Parts], num_ranks: int) -> None:
        self._groups = {name: Group(found, num_ranks) for name, found in parts.items()}
        self._crossings: dict[tuple[str, str], Crossing] = {}

    def __getitem__(self, name: str) -> Group:
        return self._groups[name]

    def crossing(self, of: str, among: str) -> Crossing:
        """See ``Crossing``."""
        key = (of, among)
        if key not in self._crossings:
            self._crossings[key] = Crossing(self._groups[of], self._groups[among])
        return self._crossings[key]
