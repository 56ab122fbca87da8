"""``fleetbench sim --loss``: virtual trainers, from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from tuner_fakes import profiled_experiment

from fleetbench.experiment import Experiment
from fleetbench.store import load_run
from sim.learning.virtual_training import train


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An experiment of a registry model whose profile is there."""
    profiled_experiment(tmp_path).save(tmp_path / "e.toml")
    return tmp_path / "e.toml"


def test_loss_trains_before_it_simulates(command: Callable, path: Path, tmp_path: Path) -> None:
    """The summary says from whom its losses are, the table has them, stderr what memory they take."""
    learnt = train(profiled_experiment(tmp_path))
    ended = command("sim", path, "--loss", "--json", "--out", tmp_path / "runs")
    summary = json.loads(ended.out)
    assert summary["final_loss"] == pytest.approx(learnt.final_loss)
    assert summary["loss_from"] == "virtual trainers"
    assert "2 virtual trainers take" in ended.err
    (steps,) = tmp_path.glob("runs/profiled-sim-*/steps.parquet")
    assert pd.read_parquet(steps)["loss"].mean() == pytest.approx(learnt.losses.mean())
    again = command("sim", path, "--loss", "--out", tmp_path / "runs")
    assert "losses (simulated): from virtual trainers" in again.out
    assert "profiled: 2 trainers, 40 steps, target loss 0.5 ┏" in " ".join(again.out.split())
    assert command("sim", path, "--json", "--out", tmp_path / "runs").out.count('"final_loss": null') == 1


@pytest.mark.slow
def test_loss_over_seeds_has_an_interval_and_counts_arrivals(command: Callable, path: Path, tmp_path: Path) -> None:
    """Each seed's own training; the target of 0.5 is too low for 40 steps, so that no run arrives."""
    ended = command("sim", path, "--loss", "--seeds", "2", "--out", tmp_path / "runs")
    assert "losses: from virtual trainers" in ended.out
    assert "profiled: 2 trainers, 40 steps, 2 seeds, target loss 0.5 " in ended.out
    assert "reached by 0 of 2" in ended.out
    data = json.loads(command("sim", path, "--loss", "--seeds", "2", "--json", "--out", tmp_path / "runs").out)
    assert data["num_reached"] == 0
    assert data["median_to_target_s"] is None
    assert data["intervals"]["final_loss"]["std"] > 0


@pytest.mark.slow
def test_loss_with_parameter_servers(command: Callable, path: Path, tmp_path: Path) -> None:
    """Asynchronous trainers have losses and staleness, in one run and over seeds."""
    inter = "cluster.inter={ bandwidth = '1 Gbit/s', latency = '20 us' }"
    changes = ("strategy.mode=ps", "strategy.a_sync=true", "strategy.a_sync_configs.k_steps=0", "cluster.servers=1", inter)
    asked = ("sim", path, "--loss", "--json", "--out", tmp_path / "runs", *(word for change in changes for word in ("--set", change)))
    ended = command(*asked)
    summary = json.loads(ended.out)
    assert "2 virtual trainers take" in ended.err
    assert summary["loss_from"] == "virtual trainers"
    assert summary["staleness"]["mean"] > 0
    (steps,) = tmp_path.glob("runs/profiled-sim-*/steps.parquet")
    assert pd.read_parquet(steps)["loss"].notna().all()
    data = json.loads(command(*asked, "--seeds", "2").out)
    assert data["summaries"][0]["final_loss"] == summary["final_loss"]
    assert data["intervals"]["final_loss"]["std"] > 0


@pytest.mark.slow
def test_losses_are_drawn(command: Callable, path: Path, tmp_path: Path) -> None:
    """The picture shows three runs. Runs without losses, or without a folder, are not drawn."""
    for folder, changes in {"a": (), "b": ("run.seed=1", "workload.steps=5"), "c": ("workload.lr=0.5",)}.items():
        command("sim", path, "--loss", *(word for change in changes for word in ("--set", change)), "--out", tmp_path / folder)
    runs = [next((tmp_path / folder).glob("profiled-sim-*")) for folder in "abc"]
    assert command("compare", *runs, "--losses", tmp_path / "l.png").code == 0
    assert (tmp_path / "l.png").read_bytes()[1:4] == b"PNG"
    held_out = train(Experiment.load(runs[2] / "experiment.toml")).held_out
    assert load_run(runs[2]).held_out == held_out, "stored with the run"
    assert len(held_out) > 1
    assert command("compare", *runs, "--losses", tmp_path / "l.doc").code == 2
    wrong = command("compare", *runs, "--losses", tmp_path / "no" / "l.png")
    assert (wrong.code, "--losses" in wrong.err) == (2, True)
    command("sim", path, "--out", tmp_path / "bare")
    (bare,) = (tmp_path / "bare").glob("profiled-sim-*")
    unlike = command("compare", runs[0], bare, "--losses", tmp_path / "m.png")
    assert (unlike.code, "a run without losses" in unlike.err) == (2, True)
    assert not (tmp_path / "m.png").exists()


def test_a_sweep_prints_every_points_loss(command: Callable, path: Path, tmp_path: Path) -> None:
    """Beside its times, as the stored table has them."""
    ended = command("sim", path, "--loss", "--sweep", "workload.lr=0.01,0.1", "--out", tmp_path / "runs")
    (table,) = (tmp_path / "runs").glob("*-sweep-*/sweep.parquet")
    assert "profiled: 2 points, 40 steps, target loss 0.5 " in ended.out
    losses = pd.read_parquet(table)["final_loss"]
    assert losses.nunique() == 2
    assert all(f"{loss:.4g}" in ended.out for loss in losses)


def test_loss_of_what_cannot_be_trained_is_refused(command: Callable, path: Path, experiment: Callable, tmp_path: Path) -> None:
    """A table of layers, a strategy that virtual trainers do not execute, and a what-if, by name."""
    for asked, name in (
        ((experiment(),), "workload.model"),
        ((path, "--set", "strategy.sync_batch_norm=true"), "strategy.sync_batch_norm"),
        ((path, "--what-if"), "--what-if"),
    ):
        ended = command("sim", *asked, "--loss", "--out", tmp_path / "runs")
        assert ended.code == 2
        assert name in ended.err
        assert "HINT" in ended.err
        assert not list((tmp_path / "runs").glob("profiles/*"))
