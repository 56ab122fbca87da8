"""Overlap: by how much compute and communication slow each other, from a backward beside which buckets travel.

One rank of many that are alike: its backward passes the moments at which buckets are ready; starting
a bucket's all-reduce holds it up; all-reduces go one behind the other. While one is in flight,
compute takes ``1 + compute`` times as long; while the backward goes on, an all-reduce takes
``1 + collective`` times as long. The simulator integrates the same two rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from scipy.optimize import least_squares

MOST = 100.0
"""The largest slowdown that is looked for."""
_END = 1e-15
_RIDGE = 1e-4
"""So little speaks for no slowdown, where the times do not tell."""
_TOLD = 0.01
"""Both must move the times by this share, for a slowdown of 1, in ways of their own."""
_STARTS = ((0.05, 0.05), (1.0, 0.1), (0.1, 1.0), (2.0, 2.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A backward and the all-reduces beside it. Times in seconds, undisturbed."""

    ready_s: tuple[float, ...]
    """From the backward's start until each bucket is ready."""
    nbytes: tuple[int, ...]
    backward_s: float
    start_s: tuple[float, ...]
    """What starting each bucket's all-reduce takes from compute."""
    alpha_s: float
    beta_s: float
    """Seconds a byte."""


@dataclass(frozen=True, slots=True)
class Overlapped:
    """How an exchange went."""

    backward_s: float
    """The backward, with what held it up or slowed it."""
    stall_s: float
    """From the backward's end to the last all-reduce's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdowns:
    """What explains a measured exchange best."""

    compute: float
    collective: float
    error: float
    """What of backward and stall stays unexplained, as a share of their sum."""
    statement: str | None = None


def overlap(exchange: Exchange, compute: float, collective: float) -> Overlapped:
    """How the exchange goes with these two slowdowns."""
    order = sorted(range(len(exchange.ready_s)), key=exchange.ready_s.__getitem__)
    marks = list(accumulate((exchange.ready_s[index] for index in order), max))
    work: list[tuple[float, float, int | None]] = []  # compute, then a hold, then the bucket that joins the queue
    before = 0.0
    for mark, index in zip(marks, order, strict=True):
        work.append((mark - before, exchange.start_s[index], index))
        before = mark
    work.append((max(0.0, exchange.backward_s - before), 0.0, None))
    channel = _Channel(exchange, 1.0 + collective)
    now = 0.0
    for left_s, hold_s, bucket in work:
        now = channel.compute(now, left_s, 1.0 + compute)
        now = channel.hold(now, hold_s)
        if bucket is not None:
            channel.join(bucket)
    return Overlapped(backward_s=now, stall_s=channel.drain())


class _Channel:
    """All-reduces one behind the other: what is left of the one in flight, and the queue."""

    def __init__(self, exchange: Exchange, slow: float) -> None:
        self._exchange = exchange
        self._slow = slow
        self._queue: list[float] = []
        """Seconds that each still takes, with nothing beside it."""

    def join(self, bucket: int) -> None:
        self._queue.append(self._exchange.alpha_s + self._exchange.beta_s * self._exchange.nbytes[bucket])

    def compute(self, now: float, left_s: float, slow: float) -> float:
        """Compute for ``left_s`` of undisturbed time; when that is done."""
        while left_s > 0.0:
            pace = slow if self._queue else 1.0
            lasts = min(left_s * pace, self._next_s())
            left_s -= lasts / pace
            if left_s < _END:
                left_s = 0.0
            self._advance(lasts)
            now += lasts
        return now

    def hold(self, now: float, left_s: float) -> float:
        """Nothing is computed for so long."""
        while left_s > 0.0:
            lasts = min(left_s, self._next_s())
            left_s -= lasts
            self._advance(lasts)
            now += lasts
        return now

    def drain(self) -> float:
        """Seconds until the last one ends, with nothing beside it."""
        return sum(self._queue)

    def _next_s(self) -> float:
        """Until the one in flight ends, beside compute."""
        return self._queue[0] * self._slow if self._queue else math.inf

    def _advance(self, lasts: float) -> None:
        if self._queue:
            self._queue[0] -= lasts / self._slow
            if self._queue[0] <= _END:
                self._queue.pop(0)


def fit_slowdowns(exchange: Exchange, measured: Overlapped) -> Slowdowns:
    """The two slowdowns under which the exchange takes the measured times, neither below zero.

    Where no collective is in flight beside compute, nothing tells them, and both are 0. Where all
    have ended before the backward does, only what they do together is known, and ``statement`` says so.
    """
    scale = measured.backward_s + measured.stall_s
    free = overlap(exchange, 0.0, 0.0)
    if scale <= 0.0 or not _overlaps(exchange):
        error = 0.0 if scale <= 0.0 else (abs(free.backward_s - measured.backward_s) + abs(free.stall_s - measured.stall_s)) / scale
        return Slowdowns(compute=0.0, collective=0.0, error=error, statement="no all-reduce is in flight beside compute")

    def residuals(slowdowns: Sequence[float]) -> list[float]:
        found = overlap(exchange, slowdowns[0], slowdowns[1])
        return [
            (found.backward_s - measured.backward_s) / scale,
            (found.stall_s - measured.stall_s) / scale,
            _RIDGE * slowdowns[0],
            _RIDGE * slowdowns[1],
        ]

    fits = [least_squares(residuals, start, bounds=(0.0, MOST), x_scale=0.1, diff_step=1e-4) for start in _STARTS]
    best = min(fits, key=lambda fit: float(fit.cost))
    compute, collective = (float(value) if value > 1e-6 else 0.0 for value in best.x)
    left = float(np.abs(best.fun[:2]).sum())
    told = np.linalg.svd(best.jac[:2], compute_uv=False)
    statement = None
    if told[1] < _TOLD:
        statement = (
            "the two slowdowns cannot be told apart here: no all-reduce is under way when the backward ends; small ones were preferred"
        )
    return Slowdowns(compute=round(compute, 4), collective=round(collective, 4), error=left, statement=statement)


def _overlaps(exchange: Exchange) -> bool:
    """Whether some all-reduce starts before the backward has ended."""
    return any(ready < exchange.backward_s for ready in exchange.ready_s)
