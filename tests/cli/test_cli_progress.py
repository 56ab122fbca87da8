"""Progress goes to a terminal on stderr, and nowhere else."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetbench.cli import progress


def test_nobody_watches_a_stderr_that_is_no_terminal() -> None:
    """The callback is none, so executors do not even call it."""
    assert not sys.stderr.isatty()
    with progress.steps("simulate") as advance:
        assert advance is None


def test_numbered_stages_are_told_when_they_end(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the last title and the seconds; an earlier stage that comes again, and another one, belong to the one under way."""
    clock = iter([0.0, 12.0, 12.0, 43.0, 43.0, 101.0])
    monkeypatch.setattr("fleetbench.cli.progress.time.monotonic", lambda: next(clock))
    with progress.numbered("profile", "search", "run", "verify") as advance:
        assert advance is not None
        for stage in (
            "profile the script",
            "search 83 strategies",
            "virtual trainers",
            "verify: 1 seed",
            "run the best 6",
            "verify: 5 seeds, 8 pairs",
        ):
            advance(stage, 0, 1)
    assert capsys.readouterr().err.splitlines() == [
        "[1/4] profile the script ........... 12 s",
        "[2/4] search 83 strategies ......... 31 s",
        "[4/4] verify: 5 seeds, 8 pairs ..... 58 s",
    ]
    monkeypatch.setenv("RANK", "1")
    with progress.numbered("profile") as advance:
        assert advance is None


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, rank 0 alone reports."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.steps("simulate") as advance:
        assert advance is not None
    monkeypatch.setenv("RANK", "1")
    with progress.steps("simulate") as advance:
        assert advance is None


def test_a_terminal_gets_bars_and_stdout_stays_clean(experiment: Callable[..., Path], tmp_path: Path) -> None:
    """With stderr on a terminal, the bar names what is done, and stdout is still the summary alone."""
    leader, follower = pty.openpty()
    try:
        command = [sys.executable, "-m", "fleetbench", "sim", str(experiment(steps=50)), "--json", "--out", str(tmp_path / "runs")]
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=follower, timeout=60, check=True, env=environment)
        shown = os.read(leader, 100_000).decode()
    finally:
        os.close(follower)
        os.close(leader)
    assert "simulate" in shown
    assert "50/50" in shown
    assert done.stdout.startswith(b"{")
    assert b"\x1b" not in done.stdout
