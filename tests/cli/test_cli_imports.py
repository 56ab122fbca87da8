"""What a command imports, and so how soon it answers."""

from __future__ import annotations

import json
import os
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


@pytest.mark.parametrize("command", [[sys.executable, "-m", "fleetbench"], [str(Path(sys.executable).with_name("fleetbench"))]])
def test_the_module_and_the_installed_program_are_the_command(command: list[str]) -> None:
    """``python -m fleetbench`` and the program that the installation makes answer alike."""
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("usage: fleetbench ")


def test_a_folder_of_the_users_does_not_hide_ours(tmp_path: Path, experiment: Callable[..., Path]) -> None:
    """``python -m`` puts the working directory first on Python's path, and a project may well have a package called sim."""
    (tmp_path / "sim").mkdir()
    (tmp_path / "sim" / "__init__.py").write_text("raise RuntimeError('this is no simulator of fleetbench')\n")
    command = [sys.executable, "-m", "fleetbench", "sim", str(experiment()), "--out", str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("form", ["package", "module"])
def test_a_package_that_hides_ours_is_named(form: str, tmp_path: Path) -> None:
    """Where it stands first on Python's path, by the command and by the script that lies beside it; a mere folder hides nothing."""
    stranger = tmp_path / "real" / "__init__.py" if form == "package" else tmp_path / "real.py"
    stranger.parent.mkdir(exist_ok=True)
    (tmp_path / "sim").mkdir()
    stranger.touch()
    (tmp_path / "train.py").write_text("import fleetbench\nprint('found')\nfrom fleetbench import fleet\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-P", "-m", "fleetbench", "sim"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: real: is another package than fleetbench's (got {stranger})\nHINT: ")
    done = subprocess.run([sys.executable, str(tmp_path / "train.py")], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "found\n")
    assert f"ConfigError: real: is another package than fleetbench's (got {stranger})" in done.stderr
