"""What a command imports, and so how soon it answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SLOW = {"torch", "matplotlib", "pandas", "numpy", "scipy", "optuna", "simpy", "sklearn", "rich", "jinja2"}

SCRIPT = """
import json, sys
from fleetbench.cli.main import main
try:
    code = main(json.loads(sys.argv[1]))
except SystemExit as stop:
    code = stop.code
print(json.dumps({"code": code, "modules": sorted(name for name in sys.modules if "." not in name)}), file=sys.stderr)
"""


def _modules(arguments: list[str]) -> tuple[int, set[str]]:
    command = [sys.executable, "-c", SCRIPT, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = json.loads(done.stderr.splitlines()[-1])
    return found["code"], set(found["modules"])


@pytest.mark.parametrize("arguments", [["--help"], ["tune", "--help"], ["launch", "--help"], ["--version"]])
def test_help_imports_nothing_slow(arguments: list[str]) -> None:
    """Neither torch nor matplotlib nor pandas nor numpy, nor anything else that takes its time."""
    code, modules = _modules(arguments)
    assert code == 0
    assert not modules & SLOW


def test_simulating_a_table_of_layers_needs_no_torch(tmp_path: Path, experiment: Callable[..., Path]) -> None:
    """Where layer times are declared, nothing is measured and torch stays out."""
    code, modules = _modules(["sim", str(experiment()), "--out", str(tmp_path / "runs")])
    assert code == 0
    assert "numpy" in modules
    assert "torch" not in modules


def test_the_module_is_the_command() -> None:
    """``python -m fleetbench`` answers as ``fleetbench`` does."""
    done = subprocess.run([sys.executable, "-m", "fleetbench", "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("usage: fleetbench ")
