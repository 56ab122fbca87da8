"""A script that is tuned is announced to write, and a folder of its own keeps that apart."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from fleetbench.cli import your_script
from fleetbench.cli.main import main
from fleetbench.errors import ConfigError

SCRIPT = """\
import os, sys
from pathlib import Path
Path("seen").write_text(os.getcwd() + " " + str("FLEETBENCH_TUNING" in os.environ))
sys.exit(3)
"""


def test_the_command_starts_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Made where it is not there; the script is found from here, and the command says first that it writes there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a failed launch keeps its output for the user
    Path("script.py").write_text(SCRIPT, encoding="utf-8")
    assert main(["tune", "--workdir", "own/place", "--", sys.executable, "script.py"]) == 4
    assert (tmp_path / "own/place/seen").read_text(encoding="utf-8") == f"{tmp_path / 'own/place'} True"
    assert not (tmp_path / "seen").exists()
    said = capsys.readouterr().err
    assert f"really runs, over and over, and writes what it writes, in {tmp_path / 'own/place'}" in said
    assert "FLEETBENCH_TUNING" in said
    assert "--workdir" in said


@pytest.mark.parametrize("command", ["tune", "profile"])
def test_a_folder_without_a_command_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody would be started there."""
    assert main([command, "--workdir", "own"]) == 2
    assert "--workdir: is the folder of a command" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["tune", "torchrun", "--nproc-per-node", "2", "train.py"], "fleetbench tune -- torchrun --nproc-per-node 2 train.py"),
        (["profile", "--seconds", "3", "train.py"], "fleetbench profile --seconds 3 -- train.py"),
        (["tune", "--json", "train.py"], "fleetbench tune --json -- train.py"),
        (["tune", "--out=runs", "train.py"], "fleetbench tune --out=runs -- train.py"),
        (["tune", "mine.toml", "/usr/bin/python3", "a b.py"], "fleetbench tune mine.toml -- /usr/bin/python3 'a b.py'"),
    ],
)
def test_a_forgotten_separator_is_named(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the line as it was meant."""
    assert main(words) == 2
    assert f"HINT: {hint}\n" in capsys.readouterr().err


def test_other_command_lines_need_none() -> None:
    """An experiment's file, options and their values are not taken for a command."""
    for words in (["tune", "mine.toml", "--set", "name=python"], ["tune", "--out", "/data/fleetbench"], ["sim", "python"], ["tune"]):
        assert your_script.split_command(words) == (words, ())
    with pytest.raises(ConfigError):
        your_script.split_command(["tune", "python", "x"])
