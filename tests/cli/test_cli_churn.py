"""``cluster.churn`` on the command line: goodput in ``sim`` and ``tune --simulate-only``, a note or a refusal elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Files = Callable[..., Path]
CHURN = 'cluster.churn={ mean_up = "2 h", checkpoint_time = "10 s", restart_time = "1 min", duration = "40 h" }'
TWO = ("--set", "cluster.nodes=2", "--set", 'cluster.inter={ bandwidth = "8 Gbit/s", latency = "1 ms" }', "--set", CHURN)


def test_sim_prints_the_goodput_of_both_policies(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """In a table, with the price where there is one, and in the stored summary; without churn there is neither."""
    priced = ("--set", "tune.price_per_trainer_hour=3", "--out", tmp_path / "runs")
    ended = command("sim", experiment(), *TWO, *priced)
    assert ended.code == 0, ended.err
    assert "under cluster.churn: up to 2 nodes, 40 h with each of 8 seeds, K = 1" in ended.out
    assert "│ synchronous │" in ended.out
    assert "│ elastic     │" in ended.out
    assert "price of 1e6" in ended.out
    (run,) = (tmp_path / "runs").iterdir()
    found = json.loads((run / "summary.json").read_text())["churn"]
    assert [one["policy"] for one in found] == ["synchronous", "elastic"]
    assert all(one["price"] == pytest.approx(3 * one["paid_trainer_s"] / 3600 / one["samples"] * 1e6) for one in found)
    assert json.loads(command("sim", experiment(), "--json", "--out", tmp_path / "runs").out)["churn"] is None


def test_tune_prints_the_choice(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """Its line is followed by its file."""
    ended = command("tune", experiment(), *TWO, "--set", "tune.local_steps=[1,4]", "--simulate-only", "--out", tmp_path / "runs")
    assert ended.code == 0, ended.err
    line, place = ended.out.strip().splitlines()[-4:-2]
    assert line.startswith("SIMULATED, under cluster.churn: elastic training, K = 4, a checkpoint every ")
    assert Path(place.removeprefix("strategy: ")).read_text(encoding="utf-8").splitlines()[0] == f"# {line}"
    assert "synchronous, Young" in ended.out


@pytest.mark.parametrize("asked", [("sim", "--seeds", "2"), ("sim", "--what-if"), ("sim", "--sweep", "workload.batch_size=1,2")])
def test_several_runs_say_that_they_leave_churn_out(command: Callable, experiment: Files, tmp_path: Path, asked: tuple[str, ...]) -> None:
    """Once."""
    ended = command(asked[0], experiment(), *asked[1:], *TWO, "--out", tmp_path / "runs")
    assert ended.code == 0, ended.err
    assert ended.err.count("cluster.churn is left out here") == 1
    assert "under cluster.churn" not in ended.out


def test_churn_that_cannot_be_simulated_is_refused_before_the_run(command: Callable, experiment: Files, tmp_path: Path) -> None:
    """One node alone makes no two workers; no run was simulated, and none is lost."""
    local = ("--set", "strategy.localsgd=true", "--set", "strategy.localsgd_configs={ k_steps = 4, worker_trainers = 2 }")
    four = ("--set", "cluster.nodes=4", "--set", f"{CHURN}".replace(" }", ', mean_down = "1 h" }'))
    ended = command("sim", experiment(), *TWO, *four, *local, "--out", tmp_path / "runs")
    assert ended.code == 2
    assert "of 4 nodes" in ended.err
    assert "HINT" in ended.err
    assert not list(tmp_path.glob("runs/*"))
