"""The notebooks run from top to bottom, and are stored with the pictures that they draw."""

from __future__ import annotations

import ast
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from fleetbench.report.figures import Drawing

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = "quickstart stragglers communication local_steps parameter_servers fidelity tuning cluster_i_do_not_have"


def _code(notebook: Path) -> list[Any]:
    return [cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]


def _value(source: str, names: dict[str, Any]) -> Any:
    """Execute a cell as a kernel does: the value of the expression that it ends with, if it ends with one."""
    tree = ast.parse(source)
    last, names["_"] = tree.body[-1], None
    if isinstance(last, ast.Expr):
        tree.body[-1] = ast.Assign(targets=[ast.Name("_", ast.Store())], value=last.value)
    exec(compile(ast.fix_missing_locations(tree), "cell", "exec"), names)  # noqa: S102  # our own notebooks
    return names["_"]


@pytest.fixture
def beside_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder for notebooks beside the reports and examples that they read. Modules of a report do not stay imported."""
    for name in ("reports", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)) or name in {"errors", "files", "rivals"}:
            del sys.modules[name]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("short_profiles", "beside_the_repository")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every cell, here where all is imported: one that is stored with a picture draws one, and others draw none."""
    names: dict[str, Any] = {}
    for cell in _code(notebook):
        value = _value(cell.source, names)
        is_stored = any("image/png" in output.get("data", {}) for output in cell.outputs)
        assert isinstance(value, Drawing) == is_stored, cell.source
        if isinstance(value, Drawing):
            assert value._repr_png_().startswith(b"\x89PNG")
            assert not value.data.empty
    if notebook.stem == "01_quickstart":
        said = capsys.readouterr().out
        assert re.search(r"^(USE|KEEP DEFAULT)", said, re.MULTILINE)
        assert re.search(r"^time_to_target_s +\S+ +[\d.]+", said, re.MULTILINE), "the real run reaches its target"


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
    code = _code(notebook)
    assert not [cell.source for cell in code if re.search(r"^(\s*(def|class|while) |for )", cell.source, re.MULTILINE)]
    outputs = [output for cell in code for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    assert {output.output_type for output in outputs} <= {"execute_result", "display_data", "stream"}, "no error is stored"
    said = " ".join(str(output.get("text", "")) + str(output.get("data", {}).get("text/plain", "")) for output in outputs)
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users|var)/", said)
    assert socket.gethostname() not in said
