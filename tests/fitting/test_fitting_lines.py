"""Lines and links: what was put into synthetic times is what comes out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbench.fitting.lines import Hockney, fit_line

SIZES = [2.0**power for power in range(6, 25)]


@given(st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-7))
def test_points_on_a_line_give_the_line(intercept: float, slope: float) -> None:
    """Without noise both numbers come back to one part in a million, whatever their sizes."""
    line = fit_line(SIZES, [intercept + slope * size for size in SIZES])
    assert line.intercept == pytest.approx(intercept, rel=1e-6)
    assert line.slope == pytest.approx(slope, rel=1e-6)
    assert line.largest_residual < 1e-6


def test_one_wild_point_does_not_decide() -> None:
    """A point ten times too long moves a line through 19 points by less than 2 %, and is the largest residual."""
    took = [1e-4 + 2e-9 * size for size in SIZES]
    took[9] *= 10
    line = fit_line(SIZES, took)
    assert line.intercept == pytest.approx(1e-4, rel=0.02)
    assert line.slope == pytest.approx(2e-9, rel=0.02)
    assert line.largest_residual == pytest.approx(0.9, abs=0.01)


def test_neither_number_falls_below_zero() -> None:
    """Times that fall with size have no slope; times whose line starts below zero have no intercept."""
    assert fit_line([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]).slope == 0.0
    assert fit_line([1.0, 2.0, 3.0], [1.0, 3.0, 5.0]).intercept == 0.0


@pytest.mark.parametrize(
    ("x", "y", "expected", "said"),
    [
        ([], [], (0.0, 0.0), "nothing took any time"),
        ([1.0, 2.0], [0.0, 0.0], (0.0, 0.0), "nothing took any time"),
        ([4.0, 4.0, 4.0], [2.0, 2.0, 2.0], (0.0, 0.5), "cannot be told apart"),
        ([0.0], [3.0], (3.0, 0.0), "cannot be told apart"),
    ],
)
def test_points_that_tell_too_little_are_said(x: list[float], y: list[float], expected: tuple[float, float], said: str) -> None:
    """No points, no durations, or one size: a line, and a statement."""
    line = fit_line(x, y)
    assert (line.intercept, line.slope) == expected
    assert line.statement is not None
    assert said in line.statement


@pytest.mark.parametrize("trainers", [2, 3, 8])
def test_hockneys_link_is_that_of_the_ring(trainers: int) -> None:
    """Times by the ring's closed form, with 3 % noise, give its latency and bandwidth within 5 %."""
    generator = np.random.default_rng(trainers)
    latency_s, bandwidth = 40e-6, 2e9
    steps = 2 * (trainers - 1)
    took = [(steps * latency_s + steps / trainers * size * 8 / bandwidth) * (1 + 0.03 * generator.standard_normal()) for size in SIZES * 3]
    link = Hockney(trainers=trainers, line=fit_line(SIZES * 3, took)).link
    assert link.latency * 1e-9 == pytest.approx(latency_s, rel=0.05)
    assert link.bandwidth == pytest.approx(bandwidth, rel=0.05)
