"""Two runs side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from fleetbench.report.compare import compare_runs
from fleetbench.result import RunResult

MakeRun = Callable[..., RunResult]


def test_every_key_of_the_summary_is_laid_beside_its_twin(make_run: MakeRun) -> None:
    """No key of the summary is left out, nested ones under dotted names."""
    run = make_run()
    keys = {row.key.partition(".")[0] for row in compare_runs(run, run).rows}
    assert {field.name for field in dataclasses.fields(run.summary)} <= keys


def test_ratios_are_of_b_over_a(make_run: MakeRun) -> None:
    """Steps of 9 and 11 ms (mean 10) against steps of 14 and 16 ms (mean 15) are 1.5 times as long."""
    comparison = compare_runs(make_run((5, 7)), make_run((10, 12)))
    rows = {row.key: row for row in comparison.rows}
    assert rows["step_s.mean"].a == pytest.approx(0.010)
    assert rows["step_s.mean"].b == pytest.approx(0.015)
    assert rows["step_s.mean"].ratio == pytest.approx(1.5)
    assert rows["samples_per_s"].ratio == pytest.approx(1 / 1.5)
    assert comparison.step_difference == pytest.approx(0.5)


def test_staleness_is_one_distance_and_not_a_row_for_each_age(make_run: MakeRun) -> None:
    """Shares of 1/4, 3/4 and none against none, 1/2 and 1/2 are half of 1/4 + 1/4 + 1/2 apart; runs without servers have no distance."""
    runs = []
    for histogram in ({"0": 1, "1": 3}, {"1": 50, "7": 50}):
        run = make_run()
        load = {"utilisation": 0.5, "staleness_histogram": histogram}
        runs.append(dataclasses.replace(run, summary=dataclasses.replace(run.summary, server_load=load)))
    comparison = compare_runs(*runs)
    assert comparison.staleness_variation == pytest.approx(0.5)
    assert comparison.to_dict()["staleness_variation"] == pytest.approx(0.5)
    assert "total variation of 0.500" in comparison.text()
    assert [row.key for row in comparison.rows if row.key.startswith("server_load")] == ["server_load.utilisation"]
    assert compare_runs(runs[0], make_run()).staleness_variation is None


def test_json_holds_what_the_table_shows(make_run: MakeRun) -> None:
    """The JSON carries every row, and text and table those of which a run knows something."""
    comparison = compare_runs(make_run((5, 7)), make_run((10, 12)))
    data = comparison.to_dict()
    assert [row["key"] for row in data["rows"]] == [row.key for row in comparison.rows]
    assert data["step_difference"] == pytest.approx(0.5)
    text = comparison.text()
    shown = [line.split()[0] for line in text.splitlines() if line and not line.startswith((" ", "A = ", "B = ", "plans:"))]
    assert shown == [row.key for row in comparison.rows if (row.a, row.b) != (None, None)]
    assert len(shown) < len(comparison.rows)
    assert "1.500x" in text
