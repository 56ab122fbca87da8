"""Overlap: how much compute and communication slow each other, from a backward that overlaps with buckets.

The model of a backward is that of ``fleetbench.plan.overlap``.

The second model is how two concurrent collectives slow each other, from the times of the members of queues.
Each collective is a number of messages, each followed by its part of the latency, and the link carries
messages in order of arrival. While two are in flight, a latency takes 2 / ``latency`` times as long, and a
message occupies the link 1 / ``transfer`` times as long. So a ``transfer`` of 1 is a link that two share, and
2 for both means two collectives that do not affect each other. The simulator integrates the same rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from scipy.optimize import least_squares

from fleetbench.plan.overlap import Exchange, Overlapped, overlap

MOST = 100.0
"""Largest slowdown that the fit considers."""
_RIDGE = 1e-4
"""Small penalty on slowdowns, which decides if the times do not."""
_STARTS = ((0.05, 0.05), (1.0, 0.1), (0.1, 1.0), (2.0, 2.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdowns:
    """Slowdowns that explain a measured exchange best."""

    compute: float
    """Slowdown of compute while an all-reduce is in flight."""
    collective: float
    """Slowdown of an all-reduce while the backward runs."""
    error: float
    """Unexplained part of backward and stall, as a share of their sum."""
    statement: str | None = None
    """Sentence that no all-reduce is in flight beside compute; ``None`` if one is."""


def fit_slowdowns(exchange: Exchange, measured: Overlapped) -> Slowdowns:
    """Return the two slowdowns, both at least zero, with which the exchange takes the measured times.

    If no collective overlaps compute, they cannot be measured and are 0. If all collectives have ended before
    the backward does, only their joint effect is known, and small slowdowns are preferred.
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
    return Slowdowns(compute=round(compute, 4), collective=round(collective, 4), error=left)


LEAST_TOGETHER, _MOST_TOGETHER = 0.02, 2.0
_STARTS_TOGETHER = ((1.0, 1.0), (1.9, 1.0), (0.5, 0.5), (1.9, 1.9))
_OF_ONE = 1e-3
"""Weight of the error of one member's time, relative to that of the time of all members together."""
_RIDGE_TOGETHER = 1e-3
"""Small penalty towards a shared link and separate latencies, which decides if the times do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Combined rates of two simultaneous collectives as multiples of one's: for latencies, and for transfers."""

    latency: float
    transfer: float


def durations(
    queues: Sequence[Sequence[float]], alpha_s: float, together: Together, depth: int = 1, messages: int = 2
) -> tuple[list[list[float]], float]:
    """Return how long each member of one or two queues takes, and all of them together.

    ``queues`` has the seconds of each member's transfer, without its latency ``alpha_s``. A member consists
    of ``messages`` messages. A queue's members start in order, ``depth`` of them at once; no more than two
    run over all queues.
    """
    assert len(queues) * depth <= 2  # what was measured
    took, started = ([[0.0] * len(queue) for queue in queues] for _ in range(2))
    under_way = [min(depth, len(queue)) for queue in queues]
    due = [(0.0, lane, index, 0) for lane, number in enumerate(under_way) for index in range(number)]
    """Heap of running members: time of the next message's start or the last one's arrival, queue, member,
    messages sent."""
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
    """Return the two rates with which members take the times ``took_s``; see ``durations``.

    They have the least squares of relative errors. ``None`` in ``took_s`` is an unknown time. If the total
    ``whole_s`` is known, it decides, because the order of messages depends on small time differences.
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
