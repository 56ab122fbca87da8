"""Commands in which a process is struck, and what is left of them: cells of ``reports/kill_matrix``."""

from __future__ import annotations

from pathlib import Path

import pytest
from kill_cells import Cell, cells, phase_cells, run_cell
from processes import fork_command

FOUR_LINES = Path(__file__).parents[1] / "real" / "four_lines.py"
PHASE_CELLS = phase_cells()
PHASE_FEW = [cell for cell in PHASE_CELLS if (cell.command, cell.moment) == ("tune FILE", "verifying") and cell.signal == "KILL"]
"""What ``make test-all`` strikes of them; ``make test SLOW=--whole`` strikes all."""
SAMPLE = [cell for cell in cells() if cell not in PHASE_CELLS][::17]
"""Every seventeenth: all commands, victims, moments and signals are among them. All: ``python reports/kill_matrix/measure.py``."""
FEW = SAMPLE[::4]
"""What ``make test-all`` strikes; ``make test SLOW=--whole`` strikes the sample."""
ODD = "a#b?c%20d e\nf"
"""A name of a folder that a URL would cut short."""


EMULATED = """\
[workload]
model = "layers"
layers = [{ name = "block", params = 1000, forward = "1 ms", backward = "2 ms" }]
steps = 5
[cluster]
trainers_per_node = 2
[run]
device = "emulated"
"""


KILLED = [("launch", "driver"), ("launch --servers", "driver")]


@pytest.mark.parametrize("cell", [Cell(command, "start", victim, "KILL") for command, victim in KILLED], ids=str)
def test_the_kernel_ends_children_with_their_parents(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before they call ``fleet.init``; the next start removes the temporary folder of a killed command."""
    monkeypatch.setenv("KILL_SCRIPT_START_S", "30")
    outcome = run_cell(cell)
    assert not outcome.faults, outcome
    assert outcome.gone_s < 8.0, outcome


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cell", [pytest.param(cell, id=str(cell), marks=() if cell in FEW else pytest.mark.whole) for cell in SAMPLE])
def test_a_struck_command_ends_in_time_and_leaves_nothing(cell: Cell) -> None:
    """With the exit code and the name that belong to it."""
    outcome = run_cell(cell)
    assert not outcome.faults, outcome


@pytest.mark.slow
@pytest.mark.parametrize("cell", [Cell("launch", "load", "driver", "TERM")], ids=str)
def test_a_struck_load_leaves_a_checkpoint_that_loads(cell: Cell) -> None:
    """The same script loads it afterwards, and nothing of the launch is left."""
    outcome = run_cell(cell)
    assert not outcome.faults, outcome
    assert outcome.again is not None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=str(cell), marks=() if cell in PHASE_FEW else pytest.mark.whole) for cell in PHASE_CELLS]
)
def test_a_command_struck_in_any_phase_comes_to_its_end_when_it_is_given_again(cell: Cell) -> None:
    """A tuning to its verdict, a profile to its table, a script to its checkpoint; nothing half-written stays."""
    outcome = run_cell(cell)
    assert not outcome.faults, outcome


def test_trainers_meet_below_a_temporary_folder_of_any_name(tmp_path: Path) -> None:
    """Nothing is written beside the job's own folder, where another job could meet it, and nothing is left."""
    folder = tmp_path / ODD
    folder.mkdir()
    command = ["launch", "--nproc", "2", "--log-dir", tmp_path / "log", FOUR_LINES, tmp_path / "out"]
    assert fork_command(command, tmp_path / "said", folder).wait(100) == 0, (tmp_path / "said").read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([ODD, "log", "out.0.npz", "out.1.npz", "said"])
    assert [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")] == []  # torch's own cache


def test_workers_of_an_experiment_meet_there_too(tmp_path: Path) -> None:
    """As those of a script do."""
    folder = tmp_path / ODD
    folder.mkdir()
    experiment = tmp_path / "emulated.toml"
    experiment.write_text(EMULATED, encoding="utf-8")
    command = ["real", experiment, "--out", tmp_path / "runs"]
    assert fork_command(command, tmp_path / "said", folder).wait(100) == 0, (tmp_path / "said").read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([ODD, "emulated.toml", "runs", "said"])
    assert [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")] == []  # torch's own cache
