"""``fleetbench profile --from``: what ran already, as ``[[cluster.stragglers]]``."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fleetbench.experiment import Experiment

Files = Callable[..., Path]
STRAGGLERS = """
[[cluster.stragglers]]
kind = "jitter"
distribution = "exponential"
mean = 0.2
[[cluster.stragglers]]
kind = "slow_rank"
ranks = [2]
factor = 1.5
"""
FOUR = ("--set", "cluster.trainers_per_node=4", "--set", 'cluster.intra={ bandwidth = "80 Gbit/s" }')


@pytest.fixture
def run_folder(command: Callable, experiment: Files, tmp_path: Path) -> Path:
    """A simulated run of four trainers, the third of them slow."""
    command("sim", experiment(steps=150, more=STRAGGLERS), *FOUR, "--out", tmp_path / "runs")
    (folder,) = (tmp_path / "runs").iterdir()
    return folder


def test_what_is_printed_can_be_pasted(command: Callable, run_folder: Path, experiment: Files) -> None:
    """The TOML of a run's fit, after an experiment without stragglers, is one with the run's own, about."""
    ended = command("profile", "--from", run_folder)
    assert ended.code == 0
    assert tomllib.loads(ended.out)
    path = experiment("pasted")
    path.write_text(path.read_text().replace("[run]", f"{ended.out}\n[run]"), encoding="utf-8")
    slow, blocks = Experiment.load(path, ["cluster.trainers_per_node=4"]).cluster.stragglers
    assert (slow.ranks, slow.factor) == ((2,), pytest.approx(1.5, rel=0.05))  # type: ignore[union-attr]  # a slow rank
    assert np.mean(blocks.values) == pytest.approx(0.2, rel=0.1)  # type: ignore[union-attr]  # blocks
    assert "rank 2 takes 1." in ended.out


def test_json_is_the_fit(command: Callable, run_folder: Path) -> None:
    """Entries; the table of steps gives the same."""
    data = json.loads(command("profile", "--from", run_folder, "--json").out)
    assert [entry["kind"] for entry in data["entries"]] == ["slow_rank", "blocks"]
    assert json.loads(command("profile", "--from", run_folder / "steps.parquet", "--json").out)["entries"] == data["entries"]


@pytest.mark.parametrize("more", [("--set", "run.seed=1"), ("--seed", "0"), ("--", "python", "train.py")])
def test_nothing_runs_beside_a_fit(more: tuple[str, ...], command: Callable, tmp_path: Path) -> None:
    """What would measure is refused by name."""
    ended = command("profile", "--from", tmp_path, *more)
    assert ended.code == 2
    assert more[0] in ended.err
    assert "HINT" in ended.err


def test_a_source_that_is_none_is_an_error(command: Callable, tmp_path: Path) -> None:
    """A path that is not there, without a traceback."""
    ended = command("profile", "--from", tmp_path / "nothing")
    assert ended.code == 2
    assert "cannot be read" in ended.err
