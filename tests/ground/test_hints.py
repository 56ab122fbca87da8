from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("what", "where", "value", "hint")


def raised(source: str) -> Iterator[tuple[int, dict[str, ast.expr]]]:
    """Every ConfigError and EnvironmentLacks that a source makes: its line and its arguments by name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("ConfigError", "EnvironmentLacks"):
            given = dict(zip(NAMES, node.args, strict=False)) | {word.arg: word.value for word in node.keywords if word.arg}
            yield node.lineno, {name: item for name, item in given.items() if not (isinstance(item, ast.Constant) and not item.value)}


def without(source: str) -> list[int]:
    """Lines of errors without a hint, or with neither a place nor a value."""
    return [line for line, given in raised(source) if "hint" not in given or not {"where", "value"} & given.keys()]


@pytest.mark.parametrize("package", ["fleetbench", "sim", "real", "tuner"])
def test_every_error_of_a_user_says_where_and_has_a_hint(package: str) -> None:
    """What can be mended is said where it is raised, in every package."""
    sources = {path.relative_to(ROOT): path.read_text() for path in sorted((ROOT / package).rglob("*.py"))}
    assert any(list(raised(source)) for source in sources.values())
    assert {str(path): lines for path, source in sources.items() if (lines := without(source))} == {}


def test_an_error_without_a_hint_is_found() -> None:
    """The test above is not vacuous: by position or by name, left out, empty or none."""
    good = 'ConfigError("a", "b", "c", "d"); ConfigError("a", value=v, hint=f"{h}"); GateFailed("a")\n'
    bad = 'ConfigError("a", "b", "c")\nConfigError("a", "b", hint=None)\nEnvironmentLacks("a", hint="d")\nConfigError("a", "b", "c", "")\n'
    assert without(good + bad) == [2, 3, 4, 5]
