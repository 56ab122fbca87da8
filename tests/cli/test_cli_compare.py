"""``fleetbench compare`` and ``fleetbench report`` on stored runs of 20 and 22 ms a step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


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
    assert [cell.strip() for cell in row.split("│")[2:5]] == ["0.02", "0.022", "1.100x"]
    assert "plans: equal" in ended.out
    assert "mean step time: +10.00 %" in ended.out


@pytest.mark.parametrize(("gate", "code"), [("10.5", 0), ("9.5", 1)])
def test_the_gate_opens_and_shuts_at_its_percentage(gate: str, code: int, command: Callable, two_runs: tuple[Path, Path]) -> None:
    """10 % apart passes a gate of 10.5 and fails one of 9.5, and the table is printed all the same."""
    ended = command("compare", *two_runs, "--fail-over", gate)
    assert ended.code == code
    assert "step_s.mean" in ended.out
    assert ("differ by more than 9.5 %" in ended.err) == bool(code)


def test_the_gate_also_catches_a_faster_run(command: Callable, two_runs: tuple[Path, Path]) -> None:
    """22 to 20 ms is 9.09 % less."""
    fast, slow = two_runs
    assert command("compare", slow, fast, "--fail-over", "9").code == 1
    assert command("compare", slow, fast, "--fail-over", "9.2").code == 0


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
