"""Intervals: closed forms for the time between two checkpoints, in ns."""

import math


def young(checkpoint_ns: int, mean_ns: float) -> int:
    """Return Young's interval sqrt(2 C M) for checkpoints of C ns and a mean time M between failures.

    J. W. Young 1974, A first order approximation to the optimum checkpoint interval, CACM 17(9).
    """
    return round(math.sqrt(2 * checkpoint_ns * mean_ns))


def daly(checkpoint_ns: int, mean_ns: float) -> int:
    """Return Daly's higher-order interval: sqrt(2 C M) (1 + sqrt(x) / 3 + x / 9) - C with x = C / 2M, and M for C >= 2M.

    J. T. Daly 2006, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22,
    equation 37.
    """
    x = checkpoint_ns / (2 * mean_ns)
    if x >= 1:
        return round(mean_ns)
    return round(math.sqrt(2 * checkpoint_ns * mean_ns) * (1 + math.sqrt(x) / 3 + x / 9) - checkpoint_ns)
