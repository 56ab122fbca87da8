"""Trials: run a remedy in the running script, in pairs of legs with and without it."""

from __future__ import annotations

import statistics
import time

from fleetbench.why.change import DdpChange
from real.why.job import LookedAt
from real.why.look import Look
from tuner.sequential import paired_speedup
from tuner.why.causes import Tried

_PAIRS = 6
_LEAST_PAIRS = 4
_CONFIDENCE = 0.9
_LEG_S, _LEAST_STEPS, _MOST_STEPS = 0.7, 8, 200
_WARMUP = 3
"""Number of warm-up steps per leg. DDP arranges its buckets after the first one."""


def try_change(job: LookedAt, change: DdpChange, step_s: float, deadline_s: float) -> Tried | None:
    """Run legs without and with the change, A B B A A B ..., until there are six pairs, or no time for another.

    ``deadline_s`` is by ``time.monotonic``. Return None with fewer than four pairs.
    """
    steps = max(_LEAST_STEPS, min(_MOST_STEPS, int(_LEG_S / step_s)))
    found: list[tuple[float, float]] = []
    while len(found) < _PAIRS:
        began = time.monotonic()
        order = (DdpChange(), change) if len(found) % 2 == 0 else (change, DdpChange())
        legs = {}
        for one in order:
            parts = job.look(Look(what="times", steps=steps, warmup_steps=_WARMUP, change=one))
            if job.is_over:
                return _tried(found)
            legs[one] = statistics.fmean(part["step_s"] for part in parts)
        found.append((legs[DdpChange()], legs[change]))
        if 2 * time.monotonic() - began > deadline_s:  # another pair would exceed it
            break
    return _tried(found)


def _tried(found: list[tuple[float, float]]) -> Tried | None:
    if len(found) < _LEAST_PAIRS:
        return None
    today, other = zip(*found, strict=True)
    speedup, today_s = paired_speedup(today, other, _CONFIDENCE), statistics.geometric_mean(today)
    ends = (today_s / speedup.mean, today_s / speedup.high, today_s / speedup.low)
    return Tried(today_s=today_s, other_s=ends[0], low_s=ends[1], high_s=ends[2], pairs=len(found))
