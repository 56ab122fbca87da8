"""Names that a user or a file gives are printed as they are, wherever a command prints them: no markup, no control character."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from fleetbench.cli.output import emit, emit_table, new_table, say
from fleetbench.cli.profile import layers_table
from fleetbench.errors import ConfigError
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.quantities import Nanoseconds

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
