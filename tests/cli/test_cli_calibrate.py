"""``fleetbench calibrate``: what is printed and written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXPERIMENT = """\
name = "mine"

[workload]
model = "layers"
layers = [{ name = "only", params = 1_000_000, forward = "10 ms", backward = "20 ms" }]

[cluster]
nodes = 2
inter = { bandwidth = "10 Gbit/s", latency = "1 us", payload = true }
"""
"""A step of 30 ms, and an all-reduce of 4 MB at 1.25 GB/s: 3.2 ms."""


def test_a_table_of_measurements_gives_an_experiment(command: Callable[..., Any], tmp_path: Path) -> None:
    """At half the bandwidth steps take 36.4 ms and more for larger gradients; the file then has it, and what is not identified is said."""
    (tmp_path / "mine.toml").write_text(EXPERIMENT, encoding="utf-8")
    rows = [f"{nbytes},{nbytes / 0.625e9}" for nbytes in (4_000_000, 8_000_000, 16_000_000)]
    (tmp_path / "cells.csv").write_text("\n".join(["all_reduce_bytes,seconds", *rows]), encoding="utf-8")
    arguments = ["calibrate", tmp_path / "mine.toml", tmp_path / "cells.csv", "--out", tmp_path, "--fit", "cluster.inter.bandwidth"]
    ended = command(*arguments, "--fit", "cluster.inter.latency")
    assert ended.code == 0
    assert "not identified" in ended.out
    assert "the cells do not identify cluster.inter.latency: it keeps its declared 1.00 us" in ended.err
    ended = command(*arguments, "--json")
    (parameter,) = json.loads(ended.out)["parameters"]
    assert abs(parameter["value"] / 5e9 - 1) < 0.01
    simulated = command("sim", tmp_path / "mine-calibrated.toml", "--out", tmp_path / "runs", "--json")
    assert abs(json.loads(simulated.out)["step_s"]["mean"] / 36.4e-3 - 1) < 0.01


def test_what_a_table_cannot_tell_is_said(command: Callable[..., Any], tmp_path: Path) -> None:
    """One row and one parameter: it fits whatever was measured, without an interval, and no row is left to be predicted."""
    (tmp_path / "mine.toml").write_text(EXPERIMENT, encoding="utf-8")
    (tmp_path / "cells.csv").write_text("all_reduce_bytes,seconds\n4000000,0.0064\n", encoding="utf-8")
    ended = command("calibrate", tmp_path / "mine.toml", tmp_path / "cells.csv", "--out", tmp_path, "--fit", "cluster.inter.bandwidth")
    assert ended.code == 0
    assert "without an interval and an error to expect" in ended.err
    assert "not known" in ended.out
    assert "left out of the fit" not in ended.out
    (tmp_path / "cells.csv").write_text("all_reduce_bytes,seconds\n4000000,6.4\n", encoding="utf-8")
    ended = command("calibrate", tmp_path / "mine.toml", tmp_path / "cells.csv", "--out", tmp_path, "--fit", "cluster.inter.bandwidth")
    assert ended.code == 2
    assert "times what is simulated as declared" in ended.err
    assert "milliseconds" in ended.err


def test_bad_tables_exit_2(command: Callable[..., Any], tmp_path: Path) -> None:
    """With the file's line and a hint."""
    (tmp_path / "mine.toml").write_text(EXPERIMENT, encoding="utf-8")
    (tmp_path / "cells.csv").write_text("seconds\n-1\n", encoding="utf-8")
    ended = command("calibrate", tmp_path / "mine.toml", tmp_path / "cells.csv", "--out", tmp_path, "--fit", "compute")
    assert ended.code == 2
    assert "line 2" in ended.err
    assert "HINT" in ended.err
