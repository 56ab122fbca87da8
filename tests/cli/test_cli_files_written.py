"""What a script that is tuned has written is listed, and a folder of its own keeps it apart."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from fleetbench.cli import your_script
from fleetbench.cli.main import main
from fleetbench.cli.your_script import telling

SCRIPT = """\
import os, sys
from pathlib import Path
Path("seen").write_text(os.getcwd() + " " + str("FLEETBENCH_TUNING" in os.environ))
sys.exit(3)
"""


def test_files_that_are_older_or_not_the_scripts_are_not_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that was overwritten is, and one below a folder; not what was there, our own results, logs or caches."""
    for name in ("old.pt", "model.pt"):
        (tmp_path / name).write_text("old", encoding="utf-8")
        os.utime(tmp_path / name, (1, 1))
    for folder in ("deep", "runs", "__pycache__", "log"):
        (tmp_path / folder).mkdir()
    with telling(tmp_path, tmp_path / "runs"):
        before = capsys.readouterr().err
        for name in ("model.pt", "deep/loss.csv", "runs/x", "__pycache__/x.pyc", "log/workerlog.0"):
            (tmp_path / name).write_text("new", encoding="utf-8")
    assert "really runs" in before
    assert "FLEETBENCH_TUNING" in before
    assert "--workdir" in before
    assert capsys.readouterr().err == f"note: 2 files in {tmp_path} were written meanwhile: deep/loss.csv, model.pt\n"


def test_a_list_that_is_not_complete_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of data holds more files than are looked at: the checkpoint may be among the others."""
    monkeypatch.setattr(your_script, "_MOST_ENTRIES", 2)
    for limit, said in ((2, 0), (3, 1)):
        with telling(tmp_path, tmp_path / "runs"):
            for number in range(limit):
                (tmp_path / str(number)).touch()
        assert capsys.readouterr().err.count("only the first 2 were looked at") == said


def test_nothing_is_said_behind_a_script_that_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error inside goes on."""
    with pytest.raises(KeyError), telling(tmp_path, tmp_path / "runs"):
        raise KeyError
    assert "meanwhile" not in capsys.readouterr().err


def test_the_command_starts_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Made where it is not there; the script is found from here, and what it writes is listed though it fails."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a failed launch keeps its output for the user
    Path("script.py").write_text(SCRIPT, encoding="utf-8")
    assert main(["tune", "--workdir", "own/place", "--", sys.executable, "script.py"]) == 4
    assert (tmp_path / "own/place/seen").read_text(encoding="utf-8") == f"{tmp_path / 'own/place'} True"
    assert not (tmp_path / "seen").exists()
    said = capsys.readouterr().err
    assert f"1 file in {tmp_path / 'own/place'} was written meanwhile: seen" in said


@pytest.mark.parametrize("command", ["tune", "profile"])
def test_a_folder_without_a_command_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody would be started there."""
    assert main([command, "--workdir", "own"]) == 2
    assert "--workdir: needs a command to start in that folder" in capsys.readouterr().err
