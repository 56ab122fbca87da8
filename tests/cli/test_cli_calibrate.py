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


def test_bad_tables_exit_2(command: Callable[..., Any], tmp_path: Path) -> None:
    """With the file's line and a hint."""
    (tmp_path / "mine.toml").write_text(EXPERIMENT, encoding="utf-8")
    (tmp_path / "cells.csv").write_text("seconds\n-1\n", encoding="utf-8")
    ended = command("calibrate", tmp_path / "mine.toml", tmp_path / "cells.csv", "--out", tmp_path, "--fit", "compute")
    assert ended.code == 2
    assert "line 2" in ended.err
    assert "HINT" in ended.err


RUNS = "gpus,gpus_per_node,local_batch,seconds\n8,8,32,1\n8,8,32,1.01\n16,8,32,1.04\n"
"""Steps of 1, 1.01 and 1.04 s."""


def test_a_table_of_runs_gives_larger_sizes_without_an_experiment(command: Callable[..., Any], tmp_path: Path) -> None:
    """The step of measured sizes is theirs; 64 GPUs are faster, and what was not measured is called a prior."""
    (tmp_path / "runs.csv").write_text(RUNS, encoding="utf-8")
    arguments = ["calibrate", tmp_path / "runs.csv", "--gpus", "64", "--set", 'cluster.preset="1 x 8 H100, 400G per NIC"']
    found = json.loads(command(*arguments, "--out", tmp_path, "--parameters", "25.6e6", "--json").out)
    assert [one["measured"] for one in found["sizes"]] == [True, True, False]
    assert abs(found["sizes"][0]["step_s"][1] - 1.005) < 0.02
    assert found["sizes"][2]["faster"] > 0.95
    assert found["declared"]["gradient_bytes"] == 4 * 25.6e6
    assert {row["from"] for row in found["parameters"] if row["name"] != "noise"} == {"prior"}
    shown = command(*arguments, "--out", tmp_path, "--set", "tune.price_per_trainer_hour=2", "--global-batch", "512").out
    assert all(words in shown for words in ("8 x 8", "cost", "yes (", "bytes of the gradients", "spread from run to run"))
