"""Spans: sets of points in time, as intervals in ns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fleetbench.stragglers import Integers

Spans = tuple[Integers, Integers]
"""Starts and ends in ns. The intervals are sorted and do not overlap, unless stated otherwise."""


def union(*sets: Spans) -> Spans:
    """Return the times that are in at least one of the sets, whose intervals may overlap and be unsorted."""
    return _sweep(sets, (), 1)


def within(*sets: Spans) -> Spans:
    """Return the times that are in all of the sets."""
    return _sweep(sets, (), len(sets))


def without(spans: Spans, other: Spans) -> Spans:
    """Return the times of ``spans`` that are not in ``other``."""
    return _sweep((spans,), (other,), 1)


def _sweep(sets: Sequence[Spans], but: Sequence[Spans], least: int) -> Spans:
    """Return the times that lie in at least ``least`` intervals of ``sets``; each of ``but`` subtracts two."""
    parts = [
        (part, sign)
        for each, weight in ((sets, 1), (but, -2))
        for spans in each
        for part, sign in zip(spans, (weight, -weight), strict=True)
    ]
    if not parts:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    times = np.concatenate([part for part, _ in parts])
    changes = np.concatenate([np.full(len(part), sign) for part, sign in parts])
    times, where = np.unique(times, return_inverse=True)
    depth = np.cumsum(np.bincount(where, weights=changes, minlength=len(times)).astype(np.int64))
    holds = np.concatenate([[False], depth >= least])
    return times[holds[1:] & ~holds[:-1]], times[~holds[1:] & holds[:-1]]


def lengths(spans: Spans, windows: Spans) -> Integers:
    """Return for each window the nanoseconds of it that the spans cover."""
    begins, ends = spans
    if not len(begins):
        return np.zeros(len(windows[0]), dtype=np.int64)
    total = np.concatenate([[0], np.cumsum(ends - begins)])

    def until(moments: Integers) -> Integers:
        index = np.searchsorted(begins, moments, side="right")
        return np.asarray(total[index] - np.where(index > 0, np.maximum(ends[index - 1] - moments, 0), 0))

    return until(windows[1]) - until(windows[0])


def inside(moments: Integers, spans: Spans) -> npt.NDArray[np.bool_]:
    """Return for each moment whether it lies in the spans, excluding their ends."""
    index = np.searchsorted(spans[0], moments, side="right")
    return (index > 0) & (moments < np.concatenate([[0], spans[1]])[index])
