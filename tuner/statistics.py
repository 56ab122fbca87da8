"""Statistics of the verdict: the interval of a mean paired log ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.90
"""Two-sided: the lower end is a one-sided 95 % bound."""


@dataclass(frozen=True, slots=True)
class Speedup:
    """How many times as fast the finalist is as the default, with the ends of its interval."""

    mean: float
    low: float
    high: float

    def exceeds(self, min_gain: float) -> bool:
        """Whether the whole interval lies above ``1 + min_gain``."""
        return self.low > 1 + min_gain

    def __str__(self) -> str:
        return f"{self.mean:.3f}x [{self.low:.3f}, {self.high:.3f}]"


def paired_speedup(default_s: Sequence[float], finalist_s: Sequence[float], confidence: float = CONFIDENCE) -> Speedup:
    """Student's t interval of the mean of ``log(default_s[i] / finalist_s[i])``, as ratios of times.

    Pairs share their moment, so what slows the machine for both cancels. Needs at least two pairs.
    """
    ratios = np.log(np.asarray(default_s, dtype=np.float64) / np.asarray(finalist_s, dtype=np.float64))
    count = len(ratios)
    assert count >= 2, "an interval needs at least two pairs"
    half = float(stats.t.ppf((1 + confidence) / 2, count - 1) * ratios.std(ddof=1) / math.sqrt(count))
    mean = float(ratios.mean())
    return Speedup(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
