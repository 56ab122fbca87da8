"""``fleetbench real`` and ``fleetbench tune`` with the launches replaced: what they print, store and return."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetbench.digests import read_json
from fleetbench.errors import WorkerFailed
from fleetbench.experiment import Experiment
from fleetbench.result import RunResult, Summary
from fleetbench.strategy import DistributedStrategy
from real.job import session as real_run
from sim.run import simulate
from tuner import tune as tuner_tune
from tuner.notes import left_out
from tuner.recommendation import Arm, Recommendation, TargetCheck


def _measured(experiment: Experiment, **_: Any) -> RunResult:
    """A real run whose steps take 25 ms where the simulator says 20."""
    layers = tuple(dataclasses.replace(layer, backward=layer.backward * 17 // 12) for layer in experiment.workload.layers)
    workload = dataclasses.replace(experiment.workload, layers=layers, target_loss=None, loss_curve=None)
    slower = simulate(experiment.replace(workload=workload))
    return dataclasses.replace(slower, experiment=experiment, summary=dataclasses.replace(slower.summary, executor="real", final_loss=0.5))


@pytest.fixture
def layers(experiment: Callable[..., Path]) -> Path:
    """Four layers of 2 + 3 ms: 20 ms; with a backward of 17/12 of it, 25 ms."""
    return experiment(backward="3 ms")


def test_real_prints_simulated_and_real_side_by_side(
    command: Callable, layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 ms simulated against 25 ms real is an error of -20 %; only the real run is stored."""
    monkeypatch.setattr(real_run, "measure", _measured)
    ended = command("real", layers, "--out", tmp_path / "runs")
    assert ended.code == 0
    row = next(line for line in ended.out.splitlines() if "step, mean" in line)
    assert [cell.strip() for cell in row.split("│")[2:5]] == ["20.00 ms", "25.00 ms", "-20.0 %"]
    (run,) = (tmp_path / "runs").iterdir()
    assert "-real-" in run.name
    assert f"run: {run}" in ended.out


def test_real_prints_the_same_keys_as_sim(command: Callable, layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--json of both has exactly the summary's keys."""
    monkeypatch.setattr(real_run, "measure", _measured)
    printed = [json.loads(command(name, layers, "--json", "--out", tmp_path / name).out) for name in ("sim", "real")]
    expected = [field.name for field in dataclasses.fields(Summary)]
    assert [list(data) for data in printed] == [expected, expected]
    assert [data["executor"] for data in printed] == ["sim", "real"]


def test_a_target_that_was_not_reached_is_said_and_is_no_failure(
    command: Callable, experiment: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 0; the loss and the target stand in one line."""
    path = experiment()
    curve = 'workload.loss_curve={ start = 2.0, floor = 0.1, half_life = "10 steps" }'
    monkeypatch.setattr(real_run, "measure", _measured)
    arguments = ("--set", "workload.target_loss=0.3", "--set", curve)
    ended = command("real", path, "--out", tmp_path / "runs", *arguments)
    assert ended.code == 0
    assert "target not reached (real): loss 0.5, target 0.3" in ended.out


@pytest.mark.parametrize("name", ["real", "tune"])
@pytest.mark.parametrize(("failure", "code"), [(KeyboardInterrupt(), 130), (WorkerFailed("was killed by SIGKILL", "rank 1"), 4)])
def test_failures_have_their_exit_codes_and_store_nothing(
    name: str, failure: BaseException, code: int, command: Callable, layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """130 for Ctrl-C, 4 for a worker; no run folder in either case."""

    def fails(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr(real_run, "measure", fails)
    monkeypatch.setattr(tuner_tune, "tune", fails)
    ended = command(name, layers, "--out", tmp_path / "runs")
    assert ended.code == code
    assert ended.out == ""
    assert "Traceback" not in ended.err
    assert not (tmp_path / "runs").exists()


RECOMMENDATION = Recommendation(
    experiment="0123abcd",
    name="layers",
    verdict="KEEP DEFAULT",
    reason="nothing was faster",
    strategy=DistributedStrategy(),
    arms=(
        Arm(name="default", strategy=DistributedStrategy(), simulated_s=0.009, measured_s=(0.008, 0.012)),
        Arm(
            name="candidate 1",
            strategy=DistributedStrategy(fuse_grad_size_in_MB=2),
            simulated_s=0.012,
            measured_s=(0.010,),
            target=TargetCheck(reached=False),
            rejected="misses the target",
        ),
    ),
    told=(left_out("tune.thread_num", "stays 1", "threads were not searched"),),
)


@pytest.fixture
def tunes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuner that recommends at once."""

    def tune(experiment: Experiment, *, out: Path, **__: Any) -> tuple[Recommendation, Path]:
        folder = out / "layers-tune"
        folder.mkdir(parents=True)
        RECOMMENDATION.save(folder)
        (folder / "experiment.toml").write_text(experiment.to_toml(), encoding="utf-8")
        return RECOMMENDATION, folder

    monkeypatch.setattr(tuner_tune, "tune", tune)


@pytest.mark.usefixtures("tunes")
def test_tune_ends_with_the_verdict_and_the_paths(command: Callable, layers: Path, tmp_path: Path) -> None:
    """KEEP DEFAULT is success; the report is written; ``-v`` has why others were not chosen, and notes."""
    ended = command("tune", layers, "--out", tmp_path / "runs")
    folder = tmp_path / "runs" / "layers-tune"
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert lines[0] == "KEEP DEFAULT"
    assert "  why       nothing was faster" in lines
    details = f"details {folder / 'report.html'}: 0 strategies simulated, 2 of them run for real, and what was not searched"
    assert " ".join(ended.out.split()).endswith(details)
    assert "threads were not searched" not in ended.out
    shutil.rmtree(folder)
    ended = command("tune", layers, "-v", "--out", tmp_path / "runs")
    assert "not chosen: candidate 1: misses the target" in ended.out
    assert "left out\n- tune.thread_num stays 1: threads were not searched" in ended.out
    assert ended.out.startswith("KEEP DEFAULT")


@pytest.mark.usefixtures("tunes")
def test_tune_prints_the_recommendation_as_json(command: Callable, layers: Path, tmp_path: Path) -> None:
    """The verdict and the answer first, then exactly what recommendation.json holds but for its digest, and nothing else on stdout."""
    ended = command("tune", layers, "--json", "--out", tmp_path / "runs")
    stored = (tmp_path / "runs" / "layers-tune" / "recommendation.json").read_text(encoding="utf-8")
    said = json.loads(ended.out)
    assert [*said][:2] == ["verdict", "answer"]
    assert said.pop("answer")["verdict"] == "KEEP DEFAULT"
    assert said == read_json(stored)
    assert "report.html" in ended.err
