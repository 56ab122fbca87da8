"""In flight: what two collectives at once do to each other, from how long each of two queues' members took.

The rules are the simulator's: each spends its latency first and then its transfer. While both are in
their latency, each goes at ``latency`` / 2 of its pace alone; while both transfer, at ``transfer`` / 2.
So 1 is what a link does that two share, and 2 is two that know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scipy.optimize import least_squares

_LEAST, MOST = 0.02, 2.0
_END = 1e-12
_STARTS = ((1.0, 1.0), (1.9, 1.0), (0.5, 0.5), (1.9, 1.9))
_RIDGE = 1e-3
"""So little speaks for a link that is shared, and latencies that are not, where the times do not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """What two carry together, as a multiple of one: of their latencies, and of their transfers."""

    latency: float
    transfer: float


def durations(queues: Sequence[Sequence[float]], alpha_s: float, together: Together) -> list[list[float]]:
    """How long each member of two queues takes, given its transfer's seconds alone; a queue's members follow each other."""
    pace = {True: min(1.0, together.latency / 2), False: min(1.0, together.transfer / 2)}
    left = [[alpha_s, queue[0]] if queue else None for queue in queues]
    number, began, now = [0, 0], [0.0, 0.0], 0.0
    took: list[list[float]] = [[], []]
    while any(left):
        waiting = [part is not None and part[0] > 0.0 for part in left]
        both = all(left) and waiting[0] == waiting[1]
        speed = [pace[waiting[0]] if both else 1.0] * 2
        ends = [(part[0] if waits else part[1]) / speed[lane] for lane, (part, waits) in enumerate(zip(left, waiting, strict=True)) if part]
        lasts = min(ends)
        now += lasts
        for lane, part in enumerate(left):
            if part is None:
                continue
            phase = 0 if waiting[lane] else 1
            part[phase] -= lasts * speed[lane]
            if part[phase] <= _END:
                part[phase] = 0.0
            if part == [0.0, 0.0]:
                took[lane].append(now - began[lane])
                number[lane] += 1
                began[lane] = now
                left[lane] = [alpha_s, queues[lane][number[lane]]] if number[lane] < len(queues[lane]) else None
    return took


def fit_together(queues: Sequence[Sequence[float]], alpha_s: float, took_s: Sequence[Sequence[float | None]]) -> Together:
    """The two numbers under which the members take these times, relative errors squared; none: not known."""

    def residuals(numbers: Sequence[float]) -> list[float]:
        model = durations(queues, alpha_s, Together(latency=numbers[0], transfer=numbers[1]))
        errors = [
            model[lane][index] / known - 1.0
            for lane in (0, 1)
            for index, known in enumerate(took_s[lane])
            if known is not None and known > 0.0
        ]
        return [*errors, _RIDGE * (numbers[0] - MOST), _RIDGE * (numbers[1] - 1.0)]

    fits = [least_squares(residuals, start, bounds=(_LEAST, MOST), diff_step=1e-3, loss="soft_l1", f_scale=0.2) for start in _STARTS]
    best = min(fits, key=lambda fit: float(fit.cost))
    return Together(latency=float(best.x[0]), transfer=float(best.x[1]))
