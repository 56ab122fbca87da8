"""Penalty: how many more steps local training takes to a target at a K that was not run, from runs at those that were.

The mean of parameters that have drifted for K - 1 steps is worse than parameters that met in each of them, and the bounds on it grow with
K - 1 (Stich, arXiv 1805.09767, theorem 2.2). So steps at K are those of synchronous training times ``1 + c (K - 1)``, with ``c`` the least
squares' over the ratios that were run. A training that did not arrive counts as one that needs all its steps: ``c`` is a lower bound then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from scipy import stats

CONFIDENCE = 0.9


@dataclass(frozen=True, slots=True)
class Penalty:
    """Steps to the target at K over those of synchronous training."""

    c: float
    """A step between two averagings more."""
    half: float | None
    """Half the 90 % interval of ``c``; none where a single run says it."""
    largest: int
    """K that was run; beyond it, ``ratio`` is outside of what was measured."""

    @classmethod
    def of(cls, ratios: Mapping[int, Sequence[float]]) -> Self | None:
        """Fitted to ratios by K, one a seed; none without any at a K above 1."""
        pairs = [(k - 1, ratio - 1) for k, own in ratios.items() if k > 1 for ratio in own]
        if not pairs:
            return None
        x, y = np.array(pairs, dtype=np.float64).T
        c = float(x @ y / (x @ x))
        half = None
        if len(pairs) > 1:
            deviation = float(np.sqrt(((y - c * x) ** 2).sum() / (len(pairs) - 1) / (x @ x)))
            half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(pairs) - 1)) * deviation
        return cls(c, half, int(x.max()) + 1)

    def ratio(self, k_steps: int) -> float:
        """At K; never below a tenth, which no straight line is to be believed beyond."""
        return max(0.1, 1 + self.c * (k_steps - 1))

    def says(self, levels: Sequence[int]) -> str:
        """The curve in words."""
        interval = (
            "one run, no interval"
            if self.half is None
            else f"90 % interval {100 * (self.c - self.half):.2g} to {100 * (self.c + self.half):.2g} %"
        )
        inside = [f"K = {k}: {self.ratio(k):.2f}x" for k in levels if 1 < k <= self.largest]
        outside = [f"K = {k}: {self.ratio(k):.2f}x" for k in levels if k > self.largest]
        beyond = f"; outside of what was run {', '.join(outside)}" if outside else ""
        return f"steps to the target grow by {100 * self.c:.2g} % a local step ({interval}): {', '.join(inside)}{beyond}"
