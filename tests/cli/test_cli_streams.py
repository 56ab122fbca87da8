"""Where results cannot go: a full stdout, a reader that left, a disk that is full."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

RUN = f'exec "{sys.executable}" -m fleetbench sim "$0" --out "$1"'


def _bash(script: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    words = ["bash", "-c", script, *map(str, arguments)]
    return subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=100)


def test_a_full_stdout_is_said(experiment: Callable[..., Path], tmp_path: Path) -> None:
    """Exit code 3 and one sentence, though the interpreter flushes once more at its end; the run is stored."""
    done = _bash(f"{RUN} >/dev/full", experiment(), tmp_path / "runs")
    assert done.returncode == 3
    assert "HINT: " in done.stderr
    assert "Traceback" not in done.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_reader_that_never_reads_changes_nothing(experiment: Callable[..., Path], tmp_path: Path) -> None:
    """As ``head -0``: exit code 0, and no word of a broken pipe."""
    done = _bash(f"set -o pipefail; ({RUN}) | head -0", experiment(), tmp_path / "runs")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


LIMITED = """
import resource, sys
from fleetbench.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""
"""The command with files of so many bytes at most; in a process of its own, because the limit holds for a log of the tests, too."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("size", [100, 700, 5000])
def test_a_run_that_does_not_fit_is_the_environments_fault(size: int, experiment: Callable[..., Path], tmp_path: Path) -> None:
    """Exit code 3 whichever of its files is refused, and nothing stays of the run."""
    command = [sys.executable, "-c", LIMITED, str(size), "sim", str(experiment()), "--out", str(tmp_path / "runs")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 3
    assert "File too large" in done.stderr
    assert "HINT: " in done.stderr
    assert not (tmp_path / "runs").exists()  # what was made for the run goes with it


@pytest.mark.root
def test_a_full_file_system_is_the_environments_fault(command: Callable, experiment: Callable[..., Path], tmp_path: Path) -> None:
    """Of 16 KiB: exit code 3, and nothing of the run stays there."""
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["/bin/mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(small)], check=True)
    try:
        ended = command("sim", experiment(), "--out", small / "runs")
        left = list(small.iterdir())
    finally:
        subprocess.run(["/bin/umount", str(small)], check=True)
    assert ended.code == 3
    assert "No space left" in ended.err
    assert left == []
