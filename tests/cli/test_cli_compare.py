"""``fleetbench compare`` and ``fleetbench report`` on stored runs of 20 and 22 ms a step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetbench.experiment import Experiment
from fleetbench.store import save_run
from sim.run import simulate


@pytest.fixture
def two_runs(command: Callable, experiment: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """Layers of 2 + 3 and of 2 + 3.5 ms, four of them: 20 and 22 ms."""
    for name, backward in (("slow", "3.5 ms"), ("fast", "3 ms")):
        command("sim", experiment(name, backward=backward), "--out", tmp_path / name)
    return next((tmp_path / "fast").iterdir()), next((tmp_path / "slow").iterdir())


def test_runs_lie_side_by_side(command: Callable, two_runs: tuple[Path, Path]) -> None:
    """Both names, the ratio, and the plans, which are equal."""
    ended = command("compare", *two_runs)
    assert ended.code == 0
    assert all(run.name in ended.out for run in two_runs)
    row = next(line for line in ended.out.splitlines() if "step_s.mean" in line)
    assert row.split()[1:] == ["0.02", "0.022", "1.100x"]
    assert "plans: equal" in ended.out
    assert "mean step time, B over A: +10.00 %" in ended.out


@pytest.mark.parametrize(("gate", "code"), [("10.5", 0), ("9.5", 1)])
def test_the_gate_opens_and_shuts_at_its_percentage(gate: str, code: int, command: Callable, two_runs: tuple[Path, Path]) -> None:
    """10 % apart passes a gate of 10.5 and fails one of 9.5, and the table is printed all the same."""
    ended = command("compare", *two_runs, "--fail-over", gate)
    assert ended.code == code
    assert "step_s.mean" in ended.out
    assert ("differ by more than 9.5 %" in ended.err) == bool(code)


def test_json_is_the_comparison_and_nothing_else(command: Callable, two_runs: tuple[Path, Path]) -> None:
    """Also when the gate fails."""
    ended = command("compare", *two_runs, "--json", "--fail-over", "1")
    assert ended.code == 1
    data = json.loads(ended.out)
    assert data["same_plan"] is True
    assert data["step_difference"] == pytest.approx(0.1)


def test_a_report_is_written_beside_the_run(command: Callable, two_runs: tuple[Path, Path]) -> None:
    """Its path is printed, as text or as JSON."""
    path = two_runs[0] / "report.html"
    assert command("report", two_runs[0]).out == f"report: {path}\n"
    assert "20.00 ms a step" in path.read_text(encoding="utf-8")
    assert json.loads(command("report", two_runs[0], "--json").out) == {"report": str(path)}


@pytest.fixture
def simulated_and_real(experiment: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """A simulated run of 20 ms a step, and a real one of the same experiment, of 25 ms."""
    planned = Experiment.load(experiment(backward="3 ms"))
    simulated = save_run(simulate(planned), tmp_path / "runs").path
    layers = tuple(dataclasses.replace(layer, backward=4_250_000) for layer in planned.workload.layers)
    slower = simulate(planned.replace(workload=dataclasses.replace(planned.workload, layers=layers)))
    summary = dataclasses.replace(slower.summary, executor="real", experiment=planned.digest())
    real = save_run(dataclasses.replace(slower, experiment=planned, summary=summary), tmp_path / "runs").path
    assert simulated is not None
    assert real is not None
    return simulated, real


def test_a_simulated_and_a_real_run_are_compared_step_by_step(command: Callable, simulated_and_real: tuple[Path, Path]) -> None:
    """20 against 25 ms: 20 % of each step, all of it compute."""
    simulated, real = simulated_and_real
    ended = command("compare", simulated, real)
    assert ended.code == 0
    assert "mean step time, B over A: +25.00 %" in ended.out  # B / A, as ever
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in ended.out.splitlines() if line.startswith("│")]
    step, compute = (next(row for row in rows if row[0] == name and len(row) > 4) for name in ("step", "compute"))
    assert step[1:] == ["20.00", "25.00", "-5.00", "-20.0 %", "5.00", "5.00", "5.00"]
    assert compute[1:] == step[1:]
    every_step = "bias -20.0 %, mean abs 20.0 %, p95 20.0 %, max 20.0 %"
    assert f"error of single steps, each as a share of its own real time: {every_step}" in ended.out
    assert "no stragglers are declared" in ended.out


def test_json_carries_the_errors(command: Callable, simulated_and_real: tuple[Path, Path]) -> None:
    """A simulated and a real run have errors of the step and of its phases; two simulated runs have none."""
    data = json.loads(command("compare", *simulated_and_real, "--json").out)
    assert data["step_difference"] == pytest.approx(0.25)
    fidelity = data["fidelity"]
    assert fidelity["comparable"] is True
    assert fidelity["errors"]["step"]["relative"]["bias"] == pytest.approx(-0.2)
    assert fidelity["errors"]["phases"]["compute"]["error_s"]["bias"] == pytest.approx(-5e-3)
    assert "fidelity" not in json.loads(command("compare", simulated_and_real[0], simulated_and_real[0], "--json").out)


def test_other_experiments_are_compared_by_their_summaries_only(
    command: Callable, experiment: Callable[..., Path], simulated_and_real: tuple[Path, Path], tmp_path: Path
) -> None:
    """What differs is said; the table is there, and the code is 0."""
    command("sim", experiment("longer", steps=7), "--out", tmp_path / "longer")
    (longer,) = (tmp_path / "longer").iterdir()
    ended = command("compare", longer, simulated_and_real[1])
    assert ended.code == 0
    assert "NOT COMPARED step by step" in ended.out
    assert "! workload.steps: 7 against 5" in ended.out
    assert "! counted steps: 1 to 7 against 1 to 5" in ended.out
    assert "- name: longer against layers" in ended.out
    assert "error of the simulation" not in ended.out
    assert "step_s.mean" in ended.out
