"""Pictures of sweeps: what they show is the table's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fleetbench.report.sweep_figures import scaling_curve, sweep_figure, write_figure


def table(**keys: list[object]) -> pd.DataFrame:
    """Points of one or two keys; throughput 100, 180, 300, ... and its parts."""
    rows = len(next(iter(keys.values())))
    at = np.arange(rows, dtype=float)
    parts = {name: 0.001 * (at + index) for index, name in enumerate(("compute_s", "wait_s", "exposed_comm_s", "update_s", "other_s"))}
    return pd.DataFrame({**keys, "trainers": 2 ** np.arange(rows), "samples_per_s": 100 + 20 * at * (at + 3), **parts})


def test_a_scaling_curve_has_efficiency() -> None:
    """180 of 200 are 90 %, 300 of 400 75 %: throughput, the first point's times the trainers, and shares beside the points."""
    figure = scaling_curve(table(**{"cluster.nodes": [1, 2, 4]}), "cluster.nodes", "e")
    above, below = figure.axes
    simulated, ideal = above.lines
    assert list(simulated.get_ydata()) == [100, 180, 300]
    assert list(ideal.get_ydata()) == [100, 200, 400]
    assert [text.get_text() for text in above.texts] == ["100 %", "90 %", "75 %"]
    assert len(below.collections) == 5
    assert below.get_xlabel() == "cluster.nodes"


def test_a_key_that_changes_no_trainers_has_no_efficiency() -> None:
    """Nothing to be efficient against; text values stand side by side."""
    points = table(**{"strategy.mode": ["a", "b", "c"]}).assign(trainers=8)
    figure = scaling_curve(points, "strategy.mode", "e")
    assert len(figure.axes[0].lines) == 1
    assert not figure.axes[0].texts
    assert [tick.get_text() for tick in figure.axes[1].get_xticklabels()] == ["a", "b", "c"]


def test_wide_ranges_are_logarithmic() -> None:
    """1 to 1024 is, 1 to 4 is not."""
    wide = scaling_curve(table(**{"cluster.nodes": [1, 32, 1024]}), "cluster.nodes", "e")
    near = scaling_curve(table(**{"cluster.nodes": [1, 2, 4]}), "cluster.nodes", "e")
    assert wide.axes[1].get_xscale() == "log"
    assert near.axes[1].get_xscale() == "linear"


def test_two_keys_are_lines() -> None:
    """A line for each value of the first, also where these are many."""
    few = table(a=[1, 1, 2, 2], b=[1, 2, 1, 2])
    assert [line.get_label() for line in sweep_figure(few, ["a", "b"], "e").axes[0].lines] == ["a = 1", "a = 2"]
    many = table(a=[n for n in range(7) for _ in range(2)], b=[1, 2] * 7)
    drawn = [list(line.get_ydata()) for line in sweep_figure(many, ["a", "b"], "e").axes[0].lines]
    assert [value for line in drawn for value in line] == many["samples_per_s"].tolist()


def test_numbers_are_drawn_in_their_order() -> None:
    """8, 1, 2 as they were asked for: the line, the areas below it and the second key's lines go from 1 to 8."""
    drawn = sweep_figure(table(**{"cluster.nodes": [8, 1, 2]}).assign(trainers=[8, 1, 2]), ["cluster.nodes"], "e").axes[0].lines
    assert list(drawn[0].get_xdata()) == [1, 2, 8]
    assert list(drawn[0].get_ydata()) == [180, 300, 100]
    assert list(drawn[1].get_ydata()) == [180, 360, 1440]
    lines = sweep_figure(table(a=["y", "y", "x", "x"], b=[2, 1, 2, 1]), ["a", "b"], "e").axes[0].lines
    assert [line.get_label() for line in lines] == ["a = y", "a = x"]
    assert [list(line.get_ydata()) for line in lines] == [[180, 100], [460, 300]]


@pytest.mark.parametrize(("name", "begins"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml")])
def test_equal_figures_give_equal_bytes(name: str, begins: bytes, tmp_path: Path) -> None:
    """No date and no random names; the ending says the format."""
    written = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write_figure(scaling_curve(table(**{"cluster.nodes": [1, 2, 4]}), "cluster.nodes", "e"), tmp_path / folder / name)
        written.append((tmp_path / folder / name).read_bytes())
    assert written[0] == written[1]
    assert written[0].startswith(begins)
