"""Shared: what ranks have in common in a step, told apart from what each has by itself.

Two ways of one sum of squares: the logarithm of a rank's step time is a step's own part plus a rank's
own part, independent of each other. The mean over n ranks holds the step's part and one n-th of the
variance of a rank's; what is left over holds (n - 1) / n of that (Searle, Casella and McCulloch 1992,
"Variance Components", section 3.3), and is put right by a factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

TOGETHER = 0.3
"""Ranks whose steps correlate more than this are slow together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Factors whose product is a step's time."""

    common: Floats
    """Logarithms of seconds, by group and step, as the mean over the group's ranks has them."""
    noise: float
    """Standard deviation of what the ranks' own parts leave in it."""
    own: Floats
    """Around 1, by rank and step."""


def split_shared(level_s: Floats, groups: Sequence[Integers]) -> Shared:
    """Take times by rank and step apart; ``groups`` are the ranks that share, at least two in each."""
    logs = np.log(np.asarray(level_s, dtype=float))
    commons, own, variances = [], np.zeros_like(logs), []
    for ranks in groups:
        mean = logs[ranks].mean(axis=0)
        rest = logs[ranks] - mean
        size, steps = rest.shape
        commons.append(mean)
        own[ranks] = np.exp(rest * math.sqrt(size / (size - 1)))
        variances.append(float((rest**2).sum()) / (steps * (size - 1)) / size)
    return Shared(common=np.array(commons), noise=math.sqrt(float(np.mean(variances))), own=own)


def correlation(level_s: Floats, pairs: npt.NDArray[np.bool_] | None = None) -> float | None:
    """Mean correlation between two ranks, by the order of their steps' times, so that single slow steps do not decide.

    ``pairs`` says by rank and rank which to look at; default: all. None where there is no pair, or a rank's steps are constant.
    """
    ranks = len(level_s)
    upper = np.triu(np.ones((ranks, ranks), dtype=bool), 1)
    chosen = upper if pairs is None else upper & pairs
    if not chosen.any() or np.ptp(level_s, axis=1).min() == 0.0:
        return None
    found = np.atleast_2d(np.corrcoef(stats.rankdata(level_s, axis=1)))
    return float(found[chosen].mean())


def groups_of(level_s: Floats, nodes: Sequence[int]) -> list[Integers]:
    """Who is slow together: all ranks as one group, those of each node, or nobody; ``nodes`` has each rank's."""
    node = np.asarray(nodes)
    same = node[:, None] == node[None, :]
    between, within = correlation(level_s, ~same), correlation(level_s, same)
    if between is not None and between > TOGETHER:
        return [np.arange(len(node))]
    if within is None or within <= TOGETHER:
        return []
    groups = [np.flatnonzero(node == number) for number in np.unique(node)]
    return groups if min(map(len, groups)) > 1 else []
