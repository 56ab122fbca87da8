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


@dataclass(slots=True)
class _Member:
    """One of a queue, under way."""

    place: tuple[int, int]
    began_s: float
    latency_s: float
    transfer_s: float

    @property
    def waits(self) -> bool:
        return self.latency_s > 0.0


def durations(queues: Sequence[Sequence[float]], alpha_s: float, together: Together, depth: int = 1) -> list[list[float]]:
    """How long each member of one or two queues takes, given its transfer's seconds alone.

    A queue's members start in order, and ``depth`` of them are under way at once; no more than two over all queues.
    """
    assert len(queues) * depth <= 2  # what was measured
    took = [[0.0] * len(queue) for queue in queues]
    number = [0] * len(queues)
    under_way: list[_Member] = []
    now = 0.0
    while True:
        for lane, queue in enumerate(queues):
            while number[lane] < len(queue) and sum(member.place[0] == lane for member in under_way) < depth:
                under_way.append(_Member((lane, number[lane]), now, alpha_s, queue[number[lane]]))
                number[lane] += 1
        if not under_way:
            return took
        both = len(under_way) > 1 and under_way[0].waits == under_way[1].waits
        speed = 1.0 if not both else min(1.0, (together.latency if under_way[0].waits else together.transfer) / 2)
        lasts = min((member.latency_s if member.waits else member.transfer_s) / speed for member in under_way)
        now += lasts
        for member in tuple(under_way):
            if member.waits:
                member.latency_s = _left(member.latency_s - lasts * speed)
            else:
                member.transfer_s = _left(member.transfer_s - lasts * speed)
            if member.latency_s == 0.0 and member.transfer_s == 0.0:
                took[member.place[0]][member.place[1]] = now - member.began_s
                under_way.remove(member)


def _left(seconds: float) -> float:
    return seconds if seconds > _END else 0.0


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
