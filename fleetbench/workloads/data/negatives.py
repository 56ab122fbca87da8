"""Negatives: words that are no neighbours, drawn from their frequency to the power 3/4.

A step's negatives are a function of seed, position and place in the joint batch alone, so ranks laid
end to end read what one process with the joint batch would.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

EXPONENT = 0.75
_PURPOSE = 2**64 - 1
"""Second word of the key of these draws: no epoch's; see ``Sampler``."""
HELD_OUT_POSITION = 2**63
"""Position of the held-out split's negatives: no step's."""
_WORDS_A_COUNT = 4
"""64-bit words that Philox gives for each value of its counter."""


class Negatives:
    """Draws words with probability counts^0.75 / sum(counts^0.75), each in constant time (Vose 1991, alias method)."""

    def __init__(self, counts: Integers, num_negatives: int, seed: int) -> None:
        self._num = num_negatives
        self._key = np.array([seed % 2**64, _PURPOSE], dtype=np.uint64)
        self._keep, self._alias = _alias_table(counts.astype(np.float64) ** EXPONENT)

    def drawn(self, position: int, first: int, number: int) -> Integers:
        """Negatives of ``number`` samples from place ``first`` of the joint batch on: ``(number, negatives)``."""
        begin = first * self._num
        skipped, rest = divmod(begin, _WORDS_A_COUNT)
        draws = np.random.Philox(key=self._key, counter=np.array([skipped, 0, position, 0], dtype=np.uint64))
        words = draws.random_raw(rest + number * self._num)[rest:]
        place = (words >> np.uint64(11)) * 2.0**-53 * len(self._keep)
        word = place.astype(np.int64)
        chosen = np.where(place - word < self._keep[word], word, self._alias[word])
        return chosen.reshape(number, self._num)


def _alias_table(weights: Floats) -> tuple[Floats, Integers]:
    """Of each equal cell, which share is its own word's, and whose the rest is."""
    share = weights * (len(weights) / weights.sum())
    keep, alias = np.ones(len(weights)), np.arange(len(weights))
    poor, rich = [list(np.flatnonzero(share < 1.0)), list(np.flatnonzero(share >= 1.0))]
    left = share.copy()
    while poor and rich:
        small, large = poor.pop(), rich[-1]
        keep[small], alias[small] = left[small], large
        left[large] -= 1.0 - left[small]
        if left[large] < 1.0:
            poor.append(rich.pop())
    return keep, alias
