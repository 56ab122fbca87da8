"""The notebooks run from top to bottom, and are stored with the pictures that they draw; the first runs in ``test_quickstart.py``."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import nbformat
import pytest
from notebook_cells import NOTEBOOKS, code_of, run_notebook

NAMES = "quickstart stragglers communication local_steps parameter_servers fidelity tuning cluster_i_do_not_have"


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("short_profiles")
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["shortened", "whole"])
@pytest.mark.parametrize(
    "notebook",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * path.stem.startswith(("02", "04", "05", "08"))) for path in NOTEBOOKS[1:]],
)
def test_a_notebook_runs(notebook: Path, whole: bool, tmp_path: Path) -> None:
    """Every cell, here where all is imported."""
    run_notebook(notebook, tmp_path, whole=whole)


def test_there_are_eight_notebooks() -> None:
    """Their names are what docs and README point to."""
    assert [path.stem for path in NOTEBOOKS] == [f"{number:02d}_{name}" for number, name in enumerate(NAMES.split(), 1)]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_has_no_logic_and_ends_with_the_readers_own_run(notebook: Path) -> None:
    """Ten to twenty cells that call the packages; stored with their outputs, two pictures at least, which name no path or host."""
    cells = nbformat.read(notebook, as_version=4).cells
    assert 10 <= len(cells) <= 20
    headings = re.findall(r"^#+ (.*)$", "\n".join(cell.source for cell in cells if cell.cell_type == "markdown"), re.MULTILINE)
    assert cells[0].source.startswith("# ")
    assert headings[-1] == "Now with your own run"
    code = code_of(notebook)
    assert not [cell.source for cell in code if re.search(r"^(\s*(def|class|while) |for )", cell.source, re.MULTILINE)]
    outputs = [output for cell in code for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    assert {output.output_type for output in outputs} <= {"execute_result", "display_data", "stream"}, "no error is stored"
    said = " ".join(str(output.get("text", "")) + str(output.get("data", {}).get("text/plain", "")) for output in outputs)
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users|var)/", said)
    assert socket.gethostname() not in said
