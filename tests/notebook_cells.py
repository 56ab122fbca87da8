"""Execute notebooks' cells here, where all is imported, as a kernel does."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest

from fleetbench.report.figures import Drawing

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_of(notebook: Path) -> list[Any]:
    """Its cells of code."""
    return [cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]


def value_of(source: str, names: dict[str, Any]) -> Any:
    """Execute a cell as a kernel does: the value of the expression that it ends with, if it ends with one."""
    tree = ast.parse(source)
    last, names["_"] = tree.body[-1], None
    if isinstance(last, ast.Expr):
        tree.body[-1] = ast.Assign(targets=[ast.Name("_", ast.Store())], value=last.value)
    exec(compile(ast.fix_missing_locations(tree), "cell", "exec"), names)  # noqa: S102  # our own notebooks
    return names["_"]


SMALLER = {
    "01_quickstart": [
        ("tune.trials=12", "tune.trials=4"),
        ("tune.leg_steps=20", "tune.leg_steps=10"),
        ('"tune.pairs=8"', '"tune.pairs=3", "tune.target_seeds=1"'),
    ],
    "02_stragglers": [("steps = 200", "steps = 64"), ("64,128,256", "64")],
    "03_communication": [("repeat=96", "repeat=16"), ("1,8,16,32,64,128,400", "1,32,400")],
    "04_local_steps": [("steps = 240", "steps = 72"), ("eval_every = 12", "eval_every = 24")],
    "05_parameter_servers": [("steps = 120", "steps = 40"), ("(1, 2, 4)", "(1, 2)")],
    "07_tuning": [("tune.trials=12", "tune.trials=4")],
    "08_cluster_i_do_not_have": [
        ("layers=4,", "layers=1,"),
        ("layers=6,", "layers=1,"),
        ("tune.trials=8", "tune.trials=4"),
        ("nodes=1,2,8", "nodes=1,8"),
    ],
}
"""What ``make test`` executes less of, by notebook: texts of its cells, and what stands there instead."""


def run_notebook(notebook: Path, folder: Path, *, whole: bool = True) -> None:
    """Execute every cell in a folder beside the repository's; one that is stored with a picture draws one, and others draw none."""
    names: dict[str, Any] = {}
    left = [] if whole else [*SMALLER.get(notebook.stem, [])]
    with _beside_the_repository(folder):
        for cell in code_of(notebook):
            found = [pair for pair in left if pair[0] in cell.source]
            left = [pair for pair in left if pair not in found]
            value = value_of(functools.reduce(lambda source, pair: source.replace(*pair), found, cell.source), names)
            is_stored = any("image/png" in output.get("data", {}) for output in cell.outputs)
            assert isinstance(value, Drawing) == is_stored, cell.source
            if isinstance(value, Drawing):
                assert value._repr_png_().startswith(b"\x89PNG")
                assert not value.data.empty
    assert not left, f"{notebook.stem} does not have {left}"


@contextmanager
def _beside_the_repository(folder: Path) -> Iterator[None]:
    """A folder for notebooks beside the reports and examples that they read. Modules of a report do not stay imported."""
    for name in ("reports", "examples"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "notebooks").mkdir(exist_ok=True)
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "notebooks")
        patch.setattr(sys, "path", [*sys.path])
        yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)) or name in {"errors", "files", "rivals"}:
            del sys.modules[name]
