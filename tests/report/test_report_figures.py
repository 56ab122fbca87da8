"""Figures draw what the data say."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.container import BarContainer
from matplotlib.patches import Rectangle

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.report import figures
from fleetbench.report.model import SPLIT, Report, TuneView, read_report
from fleetbench.result import RunResult
from sim.run import simulate


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


@pytest.fixture(scope="module")
def run() -> RunResult:
    """Two simulated trainers, three steps, two buckets; the second trainer is slow."""
    workload = {
        "model": "layers",
        "layers": [{"name": "a", "params": 10_000_000, "forward": "1 ms", "backward": "2 ms", "repeat": 2}],
        "steps": 3,
    }
    cluster = {
        "trainers_per_node": 2,
        "intra": {"bandwidth": "10 GB/s", "latency": "1 us"},
        "stragglers": [{"kind": "slow_rank", "ranks": [1], "factor": 1.5}],
    }
    strategy = {"fuse_grad_size_in_MB": 1}
    return simulate(Experiment.from_dict({"schema": 1, "name": "two", "workload": workload, "cluster": cluster, "strategy": strategy}))


def test_bars_are_as_long_as_the_step_times(tune: TuneView) -> None:
    """One simulated and one real bar an arm, in ms, in the arms' order from the top."""
    axes = figures.simulated_against_real(tune.recommendation.arms).axes[0]
    simulated, real = (bars for bars in axes.containers if isinstance(bars, BarContainer))
    assert [bar.get_width() for bar in _bars(simulated)] == pytest.approx([9.0, 4.0, 8.4])
    assert [bar.get_width() for bar in _bars(real)] == pytest.approx([10.0, 5.0, 8.4])
    labels = [label.get_text().partition(" (")[0] for label in axes.get_yticklabels()]
    assert labels == ["default", "candidate 1", "candidate 2"]
    assert axes.yaxis_inverted()


def test_stacked_bars_are_the_parts_of_a_step(report: Report) -> None:
    """Each part starts where the last one ended, and the last ends at the mean step time."""
    axes = figures.step_breakdown(report.splits).axes[0]
    assert len(axes.containers) == len(SPLIT)
    for row, split in enumerate(report.splits.to_numpy()):
        bars = [_bars(container)[row] for container in axes.containers]
        assert [bar.get_width() for bar in bars] == pytest.approx([part * 1e3 for part in split], abs=1e-9)
        assert bars[0].get_x() == 0
        for earlier, later in itertools.pairwise(bars):
            assert later.get_x() == pytest.approx(earlier.get_x() + earlier.get_width())
    last = _bars(axes.containers[-1])[1]
    assert last.get_x() + last.get_width() == pytest.approx(10.0)


def test_a_timeline_has_one_step_of_each_rank(run: RunResult) -> None:
    """Bars of step 2 begin at 0, end at the step's end, and wait is rank 0's, which is not slow."""
    figure = figures.timeline(run, first=2)
    data = figure.data
    assert set(data["rank"]) == {0, 1}
    steps = run.steps[run.steps["step"] == 2]
    assert data["start_ms"].min() == pytest.approx(0.0, abs=1e-6)
    expected = 1e3 * steps[steps["rank"] == 0][["forward_s", "backward_s"]].to_numpy()[0]
    for kind, length in zip(("forward", "backward"), expected, strict=True):
        assert data[(data["rank"] == 0) & (data["kind"] == kind)]["duration_ms"].sum() == pytest.approx(length)
    waits = data[data["kind"] == "wait"].groupby("rank")["duration_ms"].sum()
    assert waits[0] > waits[1]
    collectives = data[data["kind"] == "communication"]
    assert len(collectives) == 2 * len(run.plan.buckets)
    assert set(figures.timeline(run, ranks=[1]).data["rank"]) == {1}
    assert len(figures.timeline(run.timeline).data) > len(data), "a table is drawn whole"


def test_losses_are_drawn_over_steps_and_seconds(run: RunResult) -> None:
    """Two panels with one loss axis: steps on the left, the ends of these steps on the right; the target is a line of both."""
    learnt = dataclasses.replace(run, held_out=((1, 2.0), (2, 1.0), (3, 0.0)))
    figure = figures.loss_against_time({"a": learnt, "b": learnt}, target=0.5)
    left, right = figure.axes
    assert left.lines[0].get_xydata().tolist() == [[1, 2], [2, 1], [3, 0]]
    ends = [float(run.steps.loc[run.steps["step"] == step, "start_s"].iloc[0]) for step in (2, 3)]
    begin = float(run.steps.loc[run.steps["step"] == 1, "start_s"].min())
    assert right.lines[0].get_xdata()[:2] == pytest.approx([end - begin for end in ends])
    assert [line.get_ydata()[0] for line in (left.lines[-1], right.lines[-1])] == [0.5, 0.5]
    assert left.lines[0].get_marker() != left.lines[1].get_marker()
    assert left.lines[0].get_linestyle() != left.lines[1].get_linestyle()
    with pytest.raises(ConfigError, match=r"^b: a run without losses\nHINT: .*target_loss.*--loss"):
        figures.loss_against_time({"a": dataclasses.replace(run, steps=run.steps.assign(loss=1.0)), "b": run})


def test_runs_of_several_seeds_are_their_median_in_a_band(run: RunResult) -> None:
    """Losses 3 - s, 4 - s and 8 - s of step s: the line is the middle one, the band goes from the first to the last; one run has none."""
    of = [dataclasses.replace(run, steps=run.steps.assign(loss=first - run.steps["step"])) for first in (8.0, 3.0, 4.0)]
    figure = figures.loss_against_time({"several": of, "one": of[0]})
    left, right = figure.axes
    assert left.lines[0].get_ydata().tolist() == [3, 2, 1]
    assert left.lines[1].get_ydata().tolist() == [7, 6, 5]
    own = figure.data[figure.data["label"] == "several"]
    assert own[["low", "high"]].to_numpy().tolist() == [[2, 7], [1, 6], [0, 5]]
    assert [len(axes.collections) for axes in (left, right)] == [1, 1]


def test_scaling_says_the_efficiency_of_each_line() -> None:
    """Samples a second and trainer over the line's first row; the ideal goes through the last line's first point."""
    table = pd.DataFrame({"trainers": [1, 2, 4] * 2, "samples_per_s": [10.0, 20, 40, 10, 15, 20], "label": ["a"] * 3 + ["b"] * 3})
    figure = figures.scaling(table)
    assert figure.data["efficiency_percent"].tolist() == pytest.approx([100, 100, 100, 100, 75, 50])
    assert list(figure.axes[0].lines[0].get_ydata()) == [10, 20, 40]
    assert [text.get_text() for text in figure.axes[1].get_xticklabels()] == ["1", "2", "4"]


def test_curves_are_one_a_value_with_a_bound() -> None:
    """A line for each value of ``by``, and the bound."""
    table = pd.DataFrame({"x": [1, 8, 1, 8], "y": [3, 4, 5, 6], "by": ["a", "a", "b", "b"], "least": [2, 2, 2, 2]})
    figure = figures.curves(table, "x", "y", by="by", bound="least", ylabel="y (ms)")
    lines = figure.axes[0].lines
    assert [list(line.get_ydata()) for line in lines] == [[3, 4], [5, 6], [2, 2]]
    assert figure.axes[0].get_ylabel() == "y (ms)"
