"""Overlap: by how much compute and communication slow each other, from a backward beside which buckets travel.

One rank of many that are alike: its backward passes the moments at which buckets are ready; starting
a bucket's all-reduce holds it up; all-reduces go one after the other. While one is in flight,
compute takes ``1 + compute`` times as long; while the backward goes on, an all-reduce takes
``1 + collective`` times as long.

And what two collectives at once do to each other, from how long the members of queues took: each is so many messages, each with its
part of the latency after it, and the link carries messages in the order in which they come. While two are in flight, a latency takes
2 / ``latency`` times as long, and the link is busy 1 / ``transfer`` times as long with a message. So a ``transfer`` of 1 is a link that
two share, and 2 of both are two alike that know nothing of each other.

The simulator integrates the same rules.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
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
    marks = [0.0, *accumulate((exchange.ready_s[index] for index in order), max)]
    work: list[tuple[float, float]] = []  # undisturbed seconds, and how many times as long they take beside an all-reduce
    for before, mark, index in zip(marks, marks[1:], order, strict=False):
        work += [(mark - before, 1.0 + compute), (exchange.start_s[index], 1.0)]
    work.append((max(0.0, exchange.backward_s - marks[-1]), 1.0 + compute))
    joins = [exchange.alpha_s + exchange.beta_s * exchange.nbytes[index] for index in order]
    queue: list[float] = []  # seconds that each all-reduce still takes with nothing beside it, the one in flight first
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
            queue.append(joins[number // 2])
    return Overlapped(backward_s=now, stall_s=sum(queue))


def _left(seconds: float) -> float:
    return seconds if seconds > _END else 0.0


def fit_slowdowns(exchange: Exchange, measured: Overlapped) -> Slowdowns:
    """The two slowdowns under which the exchange takes the measured times, neither below zero.

    Where no collective is in flight beside compute, nothing tells them, and both are 0. Where all
    have ended before the backward does, only what they do together is known, and ``statement`` says so.
    """
    scale = measured.backward_s + measured.stall_s
    free = overlap(exchange, 0.0, 0.0)
    if scale <= 0.0 or all(ready >= exchange.backward_s for ready in exchange.ready_s):
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


LEAST_TOGETHER, _MOST_TOGETHER = 0.02, 2.0
_STARTS_TOGETHER = ((1.0, 1.0), (1.9, 1.0), (0.5, 0.5), (1.9, 1.9))
_OF_ONE = 1e-3
"""What the error of one member counts beside that of all together."""
_RIDGE_TOGETHER = 1e-3
"""So little speaks for a link that is shared, and latencies that are not, where the times do not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """What two carry together, as a multiple of one: of their latencies, and of their transfers."""

    latency: float
    transfer: float


def durations(
    queues: Sequence[Sequence[float]], alpha_s: float, together: Together, depth: int = 1, messages: int = 2
) -> tuple[list[list[float]], float]:
    """How long each member of one or two queues takes, of so many messages, given its transfer's seconds alone; and all of them.

    A queue's members start in order, and ``depth`` of them are under way at once; no more than two over all queues.
    """
    assert len(queues) * depth <= 2  # what was measured
    took, started = ([[0.0] * len(queue) for queue in queues] for _ in range(2))
    under_way = [min(depth, len(queue)) for queue in queues]
    due = [(0.0, lane, index, 0) for lane, number in enumerate(under_way) for index in range(number)]
    """When the next message of each sets out, or its last one has come, and how many have been sent."""
    free = now = 0.0
    while due:
        now, lane, index, sent = heappop(due)
        if sent < messages:
            message_s, latency_s, is_alone = queues[lane][index] / messages, alpha_s / messages, not due
            free = max(free, now) + (message_s if is_alone else message_s / together.transfer)
            left = max(free, now + message_s)
            heappush(due, (left + (latency_s if is_alone else latency_s * 2.0 / together.latency), lane, index, sent + 1))
            continue
        took[lane][index] = now - started[lane][index]
        if under_way[lane] < len(queues[lane]):
            started[lane][under_way[lane]] = now
            heappush(due, (now, lane, under_way[lane], 0))
            under_way[lane] += 1
    return took, now


def fit_together(
    queues: Sequence[Sequence[float]],
    alpha_s: float,
    took_s: Sequence[Sequence[float | None]],
    depth: int = 1,
    messages: int = 2,
    whole_s: float | None = None,
) -> Together:
    """The two numbers under which the members take these times, relative errors squared; none: not known. See ``durations``.

    What all take, ``whole_s``, says more where it is known: which message is before another hangs on moments.
    """

    def residuals(numbers: Sequence[float]) -> list[float]:
        model, all_s = durations(queues, alpha_s, Together(latency=numbers[0], transfer=numbers[1]), depth, messages)
        errors = [
            (model[lane][index] / known - 1.0) * (1.0 if whole_s is None else _OF_ONE)
            for lane in range(len(queues))
            for index, known in enumerate(took_s[lane])
            if known is not None and known > 0.0
        ]
        errors.append(0.0 if whole_s is None else all_s / whole_s - 1.0)
        return [*errors, _RIDGE_TOGETHER * (numbers[0] - _MOST_TOGETHER), _RIDGE_TOGETHER * (numbers[1] - 1.0)]

    fits = [
        least_squares(residuals, start, bounds=(LEAST_TOGETHER, _MOST_TOGETHER), diff_step=1e-3, loss="soft_l1", f_scale=0.2)
        for start in _STARTS_TOGETHER
    ]
    best = min(fits, key=lambda fit: float(fit.cost))
    return Together(latency=float(best.x[0]), transfer=float(best.x[1]))
