"""Samples to the target by batch size."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fleetbench.experiment import ReferencePoint
from tuner.samples_to_target import Noise, samples_to_target

RNNT = {512: 42.05, 1024: 44.6, 1536: 48.9, 2048: 56.5, 3072: 65.1, 6144: 96.1}
"""Mean epochs of 20 runs each of RNN-T in MLPerf's reference points (mlcommons/logging, rcp_checker, Apache-2.0)."""


def points(samples: dict[int, float], runs: int = 10) -> list[ReferencePoint]:
    """A point for each batch size."""
    return [ReferencePoint(batch_size=batch, samples=value, runs=runs) for batch, value in samples.items()]


def line(batch: float, critical: float = 2000.0) -> float:
    """McCandlish's law with S = 1000."""
    return 1000 * (1 + batch / critical)


@pytest.mark.parametrize("batch", [256, 1024, 8192])
def test_a_line_through_small_batches_is_carried_on(batch: int) -> None:
    """From batches of 128 to 4,096, the one that is asked left out."""
    low, median, high = samples_to_target(points({each: line(each) for each in (128, 512, 2048, 4096) if each != batch}), batch)
    assert low < line(batch) < high
    assert median == pytest.approx(line(batch), rel=0.1)


def test_the_interval_is_that_of_one_run() -> None:
    """With many runs of 20 % a seed, of which half counts beside 4 %: 1.645 deviations of 12 % and the misfit."""
    many = [ReferencePoint(batch_size=batch, samples=1000.0, runs=10_000, sd=200.0) for batch in (100, 200, 400)]
    low, _, high = samples_to_target(many, 200)
    assert math.log(high / low) / 2 / 1.645 == pytest.approx(math.hypot(0.12, 0.04), rel=0.1)


def test_one_size_alone_says_little_of_others_and_a_noise_scale_more() -> None:
    """At twice the batch S (1 + 2 B / B_crit): 1.5 times as much at B_crit = B, as much where B_crit is far above."""
    alone = samples_to_target(points({512: 1000.0}, 100), 4096)
    small, large = (samples_to_target(points({512: 1000.0}, 100), 4096, Noise(samples=noise)) for noise in (512, 1e5))
    assert alone[2] / alone[0] > large[2] / large[0]
    assert small[1] > 2 * large[1]
    assert large[1] == pytest.approx(1000 * (1 + 4096e-5) / (1 + 512e-5), rel=0.15)


def test_a_bound_of_the_noise_scale_keeps_larger_ones() -> None:
    """A scale of at least the batch leaves all above it, and so fewer samples, than one that is equal to it."""
    bound, equal = (samples_to_target(points({512: 1000.0}), 4096, Noise(samples=512, at_least=at_least)) for at_least in (True, False))
    assert bound[1] < equal[1]
    assert bound[1] <= samples_to_target(points({512: 1000.0}), 4096)[1]


def test_samples_scale_with_their_unit() -> None:
    """Epochs or samples, batches of images or of tokens: the law has no unit."""
    one = samples_to_target(points({8: 10.0, 32: 12.0}), 64)
    other = samples_to_target(points({8000: 1e7, 32000: 1.2e7}), 64_000)
    assert np.divide(other, one) == pytest.approx([1e6] * 3)


@pytest.mark.parametrize("batch", list(RNNT))
def test_mlperf_reference_points_lie_in_the_interval_of_the_others(batch: int) -> None:
    """One size left out; the median is within 8 %."""
    low, median, high = samples_to_target(points({each: epochs for each, epochs in RNNT.items() if each != batch}, 20), batch)
    assert low < RNNT[batch] < high
    assert median == pytest.approx(RNNT[batch], rel=0.08)
