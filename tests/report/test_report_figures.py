"""Figures draw what the data say."""

from __future__ import annotations

import base64
import itertools
from pathlib import Path

import pytest
from matplotlib.container import BarContainer
from matplotlib.patches import Rectangle

from fleetbench.report import figures
from fleetbench.report.model import SPLIT, Report, TuneView, read_report


@pytest.fixture
def report(tuned: Path) -> Report:
    """The report of the hand-made tuning."""
    return read_report(tuned)


@pytest.fixture
def tune(report: Report) -> TuneView:
    """Its tuning."""
    assert report.tune is not None
    return report.tune


def _bars(container: object) -> list[Rectangle]:
    return list(container)  # type: ignore[call-overload,no-any-return]  # matplotlib's containers are tuples of patches


def test_bars_are_as_long_as_the_step_times(tune: TuneView) -> None:
    """One simulated and one real bar an arm, in ms, in the arms' order from the top."""
    axes = figures.simulated_against_real(tune.recommendation.arms).axes[0]
    simulated, real = (bars for bars in axes.containers if isinstance(bars, BarContainer))
    assert [bar.get_width() for bar in _bars(simulated)] == pytest.approx([9.0, 4.0, 8.4])
    assert [bar.get_width() for bar in _bars(real)] == pytest.approx([10.0, 5.0, 8.4])
    labels = [label.get_text().partition(" (")[0] for label in axes.get_yticklabels()]
    assert labels == ["default", "candidate 1", "candidate 2"]
    assert axes.yaxis_inverted()


def test_the_range_of_the_legs_is_drawn(tune: TuneView) -> None:
    """The default's legs lie between 8 and 12 ms."""
    axes = figures.simulated_against_real(tune.recommendation.arms).axes[0]
    segments = axes.collections[0].get_segments()  # type: ignore[attr-defined]  # a LineCollection
    assert segments[0][:, 0] == pytest.approx([8.0, 12.0])


def test_stacked_bars_are_the_parts_of_a_step(report: Report) -> None:
    """Each part starts where the last one ended, and the last ends at the mean step time."""
    axes = figures.time_split(report.views).axes[0]
    assert len(axes.containers) == len(SPLIT)
    for row, view in enumerate(report.views):
        bars = [_bars(container)[row] for container in axes.containers]
        assert [bar.get_width() for bar in bars] == pytest.approx([part * 1e3 for part in view.split_s], abs=1e-9)
        assert bars[0].get_x() == 0
        for earlier, later in itertools.pairwise(bars):
            assert later.get_x() == pytest.approx(earlier.get_x() + earlier.get_width())
    last = _bars(axes.containers[-1])[1]
    assert last.get_x() + last.get_width() == pytest.approx(10.0)


def test_equal_figures_give_equal_text(report: Report) -> None:
    """The page of one tuning is the same every time, so that reports can be compared."""
    first, second = (figures.data_uri(figures.time_split(report.views)) for _ in range(2))
    assert first == second
    assert base64.b64decode(first.partition(",")[2]).startswith(b"<?xml")
