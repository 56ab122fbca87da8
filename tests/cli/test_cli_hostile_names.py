"""Names that a user or a file gives are printed as they are, wherever a command prints them: no markup, no control character."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fleetbench.cli.output import emit, emit_table, new_table, say
from fleetbench.cli.profile import layers_table
from fleetbench.errors import ConfigError
from fleetbench.overview import overview
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.quantities import Nanoseconds
from fleetbench.report import figures
from fleetbench.strategy import DistributedStrategy

PACKAGES = ("fleetbench", "sim", "real", "tuner")
ROOT = Path(__file__).parents[2]
HOSTILE = {
    "[/x]1": "[/x]1",  # a closing tag of markup that nothing opened
    "[red]a": "[red]a",
    "\\[b]": "\\[b]",
    ":smile:": ":smile:",
    "a\x1b[31mb": "a\\x1b[31mb",  # colours a terminal from here on
    "a\x1b]0;t\x07b": "a\\x1b]0;t\\x07b",  # changes its title
    "a\x9b2Jb": "a\\x9b2Jb",  # the 8-bit form of an escape sequence
    "a\rb\x08": "a\\rb\\x08".replace("\\r", "\\x0d"),
    "a\u202eb": "a\\u202eb",  # turns the direction of text
    "a\x85\u2028b": "a\\x85\\u2028b",  # ends of lines
}
"""Names, and what is printed of them."""
EACH = pytest.mark.parametrize(("name", "shown"), HOSTILE.items(), ids=range(len(HOSTILE)))


def _is_clean(text: str) -> bool:
    return all(char.isprintable() or char in "\n\t" for char in text)


@EACH
@pytest.mark.parametrize("terminal", [False, True])
def test_every_part_of_a_table_is_text(
    name: str, shown: str, terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Title, caption, headings and cells, on a terminal and off it; a line's end within a cell is spelled out, too."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "100")
    table = new_table(f"{name} title", "", f"{name} heading")
    table.add_row(f"{name}\nx", f"{name} cell")
    table.caption = f"{name} caption"
    emit_table(table)
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out) if terminal else capsys.readouterr().out
    for part in ("title", "caption", "heading", "cell"):
        assert f"{shown} {part}" in out
    assert f"{shown}\\x0ax" in out
    assert _is_clean(out)


@EACH
def test_every_line_and_error_is_text(name: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Results, messages, and what an error says of itself in a worker's log; lines and tabs stay."""
    emit(f"{name}\n\tx")
    say(f"{name}\n\tx")
    captured = capsys.readouterr()
    assert captured.out == captured.err == f"{shown}\n\tx\n"
    assert str(ConfigError(name, name, name, name)) == f"{shown}: {shown} (got {shown})\nHINT: {shown}"


def test_tables_and_text_leave_by_one_door() -> None:
    """No module but ``output``, and the bars of ``progress``, has a console of its own; commands print through ``emit`` and ``say``."""
    consoles, prints = set(), set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in ("Console", "Plain"):
                    consoles.add(path.relative_to(ROOT).as_posix())
                if node.func.id == "print" and path.is_relative_to(ROOT / "fleetbench"):
                    prints.add(path.relative_to(ROOT).as_posix())
    assert consoles == {"fleetbench/cli/output.py", "fleetbench/cli/progress.py"}
    assert prints == {"fleetbench/cli/output.py"}


@EACH
def test_ids_of_samples(name: str, shown: str, command: Callable, tmp_path: Path) -> None:
    """``evaluate`` shows the worst samples, and its gate names the worst of all."""
    for side, value in (("offline", 1.0), ("online", 2.0)):
        pd.DataFrame({"id": [name, "b"], "vector": [np.float32([value]), np.float32([1.0])]}).to_parquet(tmp_path / f"{side}.parquet")
    ended = command("evaluate", tmp_path / "offline.parquet", "--against", tmp_path / "online.parquet")
    assert ended.code == 1
    assert shown in ended.out
    assert "1 of 2 samples" in ended.err
    assert _is_clean(ended.out + ended.err)


def test_layers_of_a_profile(capsys: pytest.CaptureFixture[str]) -> None:
    """A module may be called anything, but for a dot."""
    layers = [
        Layer(name=name, forward=Nanoseconds(1), backward=Nanoseconds(1), gradients=(Gradient(name="g", numel=1, ready=Nanoseconds(0)),))
        for name in HOSTILE
    ]
    emit_table(layers_table(LayerTable(key="k", layers=tuple(layers))))
    out = capsys.readouterr().out
    assert all(shown in out for shown in HOSTILE.values())
    assert _is_clean(out)


def test_layers_in_the_box_of_a_run() -> None:
    """A strategy names layers, and the environment's values are a launcher's."""
    strategy = DistributedStrategy.from_dict({"recompute": True, "recompute_configs": {"checkpoints": list(HOSTILE)}})
    assert _is_clean(overview(strategy, {"endpoint": "a\x1b[2J\nb"}))


def test_columns_of_a_file(command: Callable, experiment: Callable[..., Path], tmp_path: Path) -> None:
    """An error names the column that ``calibrate`` does not know."""
    (tmp_path / "cells.csv").write_text('"[/y]\x1b[2J",seconds\nx,0.02\n', encoding="utf-8")
    ended = command("calibrate", experiment(), tmp_path / "cells.csv", "--fit", "compute", "--out", tmp_path)
    assert ended.code == 2
    assert "[/y]" in ended.err
    assert _is_clean(ended.err)


def test_folders_and_files(command: Callable, experiment: Callable[..., Path], tmp_path: Path) -> None:
    """``sim`` prints a run's folder, ``report`` its page, ``compare`` labels runs; a fit stays TOML, whatever its source is called."""
    name, shown = ("".join(names).replace("/", "") for names in (HOSTILE, HOSTILE.values()))
    folder = tmp_path / name
    ended = command("sim", experiment(), "--out", folder)
    assert ended.code == 0
    assert f"run: {tmp_path / shown}" in ended.out
    (run,) = folder.iterdir()
    compared = command("compare", run, run)
    reported = command("report", run)
    trace = folder / f"{name}\n.csv"
    trace.write_text("\n".join(["rank,step,compute_s", *(f"0,{step},0.01" for step in range(1, 41))]), encoding="utf-8")
    fitted = command("profile", "--from", trace)
    assert (compared.code, reported.code, fitted.code) == (0, 0, 0)
    tomllib.loads(fitted.out)
    assert all(_is_clean(text) for each in (ended, compared, reported, fitted) for text in (each.out, each.err))
    missing = command("sim", folder / "missing.toml")
    assert missing.code == 2
    assert shown in missing.err
    assert json.loads(command("sim", experiment(), "--out", folder, "--json").out)["trainers"] == 1


def test_labels_of_a_picture(tmp_path: Path) -> None:
    """A folder called like a formula is none: ``compare --losses`` names runs by their folders."""
    losses = pd.DataFrame({"label": "runs/$\\x{$/a", "step": [1, 2], "seconds": [1.0, 2.0], "loss": [2.0, 1.0]})
    figures.save_png(figures.loss_against_time(losses), tmp_path / "losses.png")
    assert (tmp_path / "losses.png").stat().st_size > 0


def test_strategies_of_a_tuning(command: Callable, experiment: Callable[..., Path], tmp_path: Path) -> None:
    """A strategy's values stand in the tables of ``tune``."""
    two = ("--set", "cluster.nodes=2", "--set", 'cluster.inter={ bandwidth = "8 Gbit/s", latency = "1 ms" }')
    hostile = ("--set", "strategy.recompute=true", "--set", 'strategy.recompute_configs={ checkpoints = ["[/x]"] }')
    ended = command("tune", experiment(), *two, *hostile, "--simulate-only", "--out", tmp_path / "runs")
    assert ended.code == 0
    assert "recompute_configs.checkpoints = ['[/x]']" in ended.out


def test_lines_of_a_script(tmp_path: Path) -> None:
    """The error quotes what a failed script printed last."""
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('[/x] \\x1b[31mred \\x9b2J')\n", encoding="utf-8")
    words = [sys.executable, "-m", "fleetbench", "launch", "--nproc", "1", "--log-dir", str(tmp_path / "log"), str(script)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 4
    error = done.stderr[done.stderr.index("error: ") :]
    assert _is_clean(error)
