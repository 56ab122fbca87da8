import math

import numpy as np
import pytest
from scipy import stats

from tuner.sequential import Speedup, paired_speedup


def test_the_interval_is_the_one_computed_by_hand() -> None:
    """Log ratios 0.1, 0.2 and 0.3 have mean 0.2 and standard error 0.1 / sqrt 3; t at 95 % and 2 degrees is 2.919986."""
    ratios = [0.1, 0.2, 0.3]
    speedup = paired_speedup([math.exp(ratio) for ratio in ratios], [1.0, 1.0, 1.0])
    half = 2.919986 * 0.1 / math.sqrt(3)
    assert math.log(speedup.mean) == pytest.approx(0.2)
    assert math.log(speedup.low) == pytest.approx(0.2 - half, rel=1e-6)
    assert math.log(speedup.high) == pytest.approx(0.2 + half, rel=1e-6)


def test_the_interval_agrees_with_scipy() -> None:
    """The two-sided 90 % interval is the one that scipy's one-sample t test gives."""
    generator = np.random.default_rng(3)
    default_s, finalist_s = generator.lognormal(0, 0.05, 6), generator.lognormal(-0.04, 0.05, 6)
    found = paired_speedup(default_s.tolist(), finalist_s.tolist())
    expected = stats.ttest_1samp(np.log(default_s / finalist_s), 0).confidence_interval(0.90)
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((expected.low, expected.high))


def test_pairing_cancels_what_slows_both() -> None:
    """A machine whose speed wanders by a factor of three leaves a constant ratio exact."""
    machine = [1.0, 3.0, 0.7, 2.2]
    speedup = paired_speedup([1.2 * speed for speed in machine], machine)
    assert (speedup.mean, speedup.low, speedup.high) == pytest.approx((1.2, 1.2, 1.2))


def test_a_gain_is_told_from_its_threshold() -> None:
    """A lower end of 1.008 misses 1.01, and a reader sees it."""
    assert str(Speedup(mean=1.012, low=1.008, high=1.016)) == "1.012x [1.008, 1.016]"
