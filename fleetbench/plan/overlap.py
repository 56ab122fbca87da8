"""Overlap: the durations of a backward and of the all-reduces during it, if they slow each other.

The model is one rank of many that are alike. A bucket's all-reduce is started once the backward reaches the
time at which the bucket is ready, and starting it delays the backward. All-reduces run one after the other.
While one is in flight, compute takes ``1 + compute`` times as long; while the backward runs, an all-reduce
takes ``1 + collective`` times as long. The simulator integrates the same rules.
"""

import math
from dataclasses import dataclass
from itertools import accumulate

_END = 1e-15


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A backward and the all-reduces that overlap it. Times in seconds, without mutual slowdown."""

    ready_s: tuple[float, ...]
    """Seconds from the start of the backward until each bucket is ready."""
    takes_s: tuple[float, ...]
    """Seconds of each bucket's all-reduce."""
    backward_s: float
    """Seconds of the backward."""
    start_s: tuple[float, ...]
    """Seconds of compute that it takes to start each bucket's all-reduce."""


@dataclass(frozen=True, slots=True)
class Overlapped:
    """Durations with mutual slowdown."""

    backward_s: float
    """Seconds of the backward, including delays and slowdown."""
    stall_s: float
    """Seconds from the end of the backward to the end of the last all-reduce."""


def overlap(exchange: Exchange, compute: float, collective: float) -> Overlapped:
    """Return the durations if compute has the slowdown ``compute``, and all-reduces ``collective``."""
    order = sorted(range(len(exchange.ready_s)), key=exchange.ready_s.__getitem__)
    marks = [0.0, *accumulate((exchange.ready_s[index] for index in order), max)]
    work: list[tuple[float, float]] = []  # seconds without slowdown, and the factor while an all-reduce is in flight
    for before, mark, index in zip(marks, marks[1:], order, strict=False):
        work += [(mark - before, 1.0 + compute), (exchange.start_s[index], 1.0)]
    work.append((max(0.0, exchange.backward_s - marks[-1]), 1.0 + compute))
    queue: list[float] = []  # seconds that each all-reduce still takes without slowdown; the one in flight is first
    now = 0.0
    for number, (takes_s, slow) in enumerate(work):
        left_s = takes_s
        while left_s > 0.0:
            pace = slow if queue else 1.0
            lasts = min(left_s * pace, queue[0] * (1.0 + collective) if queue else math.inf)
            now += lasts
            left_s = _left(left_s - lasts / pace)
            if queue:
                queue[0] = _left(queue[0] - lasts / (1.0 + collective))
                queue = queue if queue[0] else queue[1:]
        if number % 2:  # a bucket has been started
            queue.append(exchange.takes_s[order[number // 2]])
    return Overlapped(backward_s=now, stall_s=sum(queue))


def _left(seconds: float) -> float:
    return seconds if seconds > _END else 0.0
