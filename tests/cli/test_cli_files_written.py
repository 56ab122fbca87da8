"""A folder of its own keeps apart what a script that is tuned writes."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from fleetbench.cli.main import main

SCRIPT = """\
import os, sys
from pathlib import Path
Path("seen").write_text(os.getcwd() + " " + str("FLEETBENCH_TUNING" in os.environ))
sys.exit(3)
"""


def test_the_command_starts_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Made where it is not there; the script is found from here, and a note says that it writes there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a failed launch keeps its output for the user
    Path("script.py").write_text(SCRIPT, encoding="utf-8")
    assert main(["tune", "--workdir", "own/place", "--", sys.executable, "script.py"]) == 4
    assert (tmp_path / "own/place/seen").read_text(encoding="utf-8") == f"{tmp_path / 'own/place'} True"
    assert not (tmp_path / "seen").exists()
    said = capsys.readouterr().err
    assert f"writes its files below {tmp_path / 'own/place'}: " in said


@pytest.mark.parametrize("command", ["tune", "profile"])
def test_a_folder_without_a_command_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody would be started there."""
    assert main([command, "--workdir", "own"]) == 2
    assert "--workdir: needs a command to start in that folder" in capsys.readouterr().err
