"""In flight: what two collectives at once do to each other, from how long the members of queues took.

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


def durations(queues: Sequence[Sequence[float]], alpha_s: float, together: Together, depth: int = 1) -> list[list[float]]:
    """How long each member of one or two queues takes, given its transfer's seconds alone.

    A queue's members start in order, and ``depth`` of them are under way at once; no more than two over all queues.
    """
    assert len(queues) * depth <= 2  # what was measured
    took = [[0.0] * len(queue) for queue in queues]
    number = [0] * len(queues)
    under_way: list[tuple[int, int, float, list[float]]] = []  # queue, place, beginning, and what is left: transfer, before it latency
    now = 0.0
    while True:
        for lane, queue in enumerate(queues):
            while number[lane] < len(queue) and sum(member[0] == lane for member in under_way) < depth:
                under_way.append((lane, number[lane], now, [queue[number[lane]], alpha_s]))
                number[lane] += 1
        if not under_way:
            return took
        stages = [len(left) for *_, left in under_way]
        shared = together.latency if stages[0] == 2 else together.transfer
        speed = min(1.0, shared / 2) if len(stages) > 1 and stages[0] == stages[1] else 1.0
        lasts = min(left[-1] for *_, left in under_way) / speed
        now += lasts
        for member in tuple(under_way):
            lane, index, began_s, left = member
            left[-1] -= lasts * speed
            if left[-1] <= _END:
                left.pop()
            if not left:
                took[lane][index] = now - began_s
                under_way.remove(member)


def fit_together(queues: Sequence[Sequence[float]], alpha_s: float, took_s: Sequence[Sequence[float | None]], depth: int = 1) -> Together:
    """The two numbers under which the members take these times, relative errors squared; none: not known. See ``durations``."""

    def residuals(numbers: Sequence[float]) -> list[float]:
        model = durations(queues, alpha_s, Together(latency=numbers[0], transfer=numbers[1]), depth)
        errors = [
            model[lane][index] / known - 1.0
            for lane in range(len(queues))
            for index, known in enumerate(took_s[lane])
            if known is not None and known > 0.0
        ]
        return [*errors, _RIDGE * (numbers[0] - MOST), _RIDGE * (numbers[1] - 1.0)]

    fits = [least_squares(residuals, start, bounds=(_LEAST, MOST), diff_step=1e-3, loss="soft_l1", f_scale=0.2) for start in _STARTS]
    best = min(fits, key=lambda fit: float(fit.cost))
    return Together(latency=float(best.x[0]), transfer=float(best.x[1]))
