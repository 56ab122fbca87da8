import math

import pytest

from tuner.sequential import paired_speedup


def test_the_interval_is_the_one_computed_by_hand() -> None:
    """Log ratios 0.1, 0.2 and 0.3 have mean 0.2 and standard error 0.1 / sqrt 3; t at 95 % and 2 degrees is 2.919986."""
    ratios = [0.1, 0.2, 0.3]
    speedup = paired_speedup([math.exp(ratio) for ratio in ratios], [1.0, 1.0, 1.0])
    half = 2.919986 * 0.1 / math.sqrt(3)
    assert math.log(speedup.mean) == pytest.approx(0.2)
    assert math.log(speedup.low) == pytest.approx(0.2 - half, rel=1e-6)
    assert math.log(speedup.high) == pytest.approx(0.2 + half, rel=1e-6)


def test_pairing_cancels_what_slows_both() -> None:
    """A machine whose speed wanders by a factor of three leaves a constant ratio exact."""
    machine = [1.0, 3.0, 0.7, 2.2]
    speedup = paired_speedup([1.2 * speed for speed in machine], machine)
    assert (speedup.mean, speedup.low, speedup.high) == pytest.approx((1.2, 1.2, 1.2))
