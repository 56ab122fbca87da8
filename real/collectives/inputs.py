"""Inputs of a collective benchmark for which there is one right answer, to the last bit.

Every rank brings small whole numbers, so small that each partial sum, in whatever order, is one
that the type holds; an average's are multiples of the number of ranks where halving alone cannot
divide by it. They repeat with a prime period, so that pieces that change places show.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from real.collectives.bench import Case

PERIOD = 251
EXACT_UP_TO: dict[str, int] = {"float32": 2**24, "float16": 2**11, "bfloat16": 2**8, "int32": 2**24}
"""Up to here a type holds every whole number (an int32 more)."""

Integers = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


def inputs(case: Case) -> Integers:
    """What the ranks bring: a row a rank, of one period."""
    ranks = case.ranks
    most = EXACT_UP_TO[case.type]
    mixed = _mixed(ranks)
    if case.redop not in ("sum", "avg"):
        return mixed % (most + 1)
    unit = _unit(case)
    largest = most // (ranks * unit)
    if largest > 0:
        return unit * (mixed % (largest + 1))
    # More ranks than even ones may add up to: only every so many ranks bring anything, others at every element.
    stride = -(-ranks // max(1, most // unit))
    turn = (np.arange(ranks)[:, None] + np.arange(PERIOD)) % stride
    return np.where(turn == 0, unit, 0)


def result(case: Case, brought: Integers) -> Numbers:
    """What a reduction must give, of one period."""
    if case.redop == "max":
        return np.asarray(brought.max(axis=0), dtype=np.float64)
    total = brought.sum(axis=0)
    return np.asarray(total / case.ranks if case.redop == "avg" else total, dtype=np.float64)


def tolerance(case: Case, *, divides: bool) -> float:
    """By which share of itself a right result may be off: 0, but for averages over no power of two.

    ``divides``: the backend sums and then divides, which is exact for ``inputs``. NCCL multiplies
    every input by 1/n before it sums, and a GPU divides by multiplying; then each of n products and
    n - 1 sums may round by half a unit in the last place, and 1/n itself.
    """
    if case.redop != "avg" or _is_power_of_two(case.ranks) or (divides and _unit(case) <= EXACT_UP_TO[case.type]):
        return 0.0
    return (case.ranks + 2) / EXACT_UP_TO[case.type]


def _unit(case: Case) -> int:
    return case.ranks if case.redop == "avg" and not _is_power_of_two(case.ranks) else 1


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _mixed(ranks: int) -> Integers:
    """Numbers below 2^24 that look random, the same in every process: Knuth's multiplicative hash."""
    index = np.arange(1, ranks * PERIOD + 1, dtype=np.uint64).reshape(ranks, PERIOD)
    return ((index * np.uint64(2654435761) % np.uint64(2**32)) >> np.uint64(8)).astype(np.int64)
