"""How a launch of a command ends, without a command."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from real.job import launch
from real.job.launch import CommandLaunch


@pytest.fixture
def started(tmp_path: Path) -> CommandLaunch:
    """A launch whose directory is there."""
    found = CommandLaunch(["train"], tmp_path, startup_timeout_s=1.0, timeout_s=1.0)
    found._folder.make()
    return found


def test_all_that_a_command_has_started_is_killed(started: CommandLaunch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what a process has started between the look and its end: it is looked until nobody is left."""
    looks = iter([[11], [11, 12], [12], []])
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(launch, "started_with", lambda _: next(looks))
    monkeypatch.setattr(os, "kill", lambda pid, which: killed.append((pid, which)))
    started.kill()
    assert killed == [(pid, signal.SIGKILL) for pid in (11, 11, 12, 12)]
    assert next(looks, None) is None


def test_what_cannot_be_killed_is_not_waited_for_without_end(started: CommandLaunch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that hangs in the kernel outlives the deadline."""
    monkeypatch.setattr(launch, "_KILL_S", 0.0)
    monkeypatch.setattr(launch, "started_with", lambda _: [11])
    monkeypatch.setattr(os, "kill", lambda *_: None)
    started.kill()
    assert started._folder.path.joinpath("abort").exists()


def test_what_a_launcher_says_of_its_own_end_is_nobodys_fault(started: CommandLaunch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver ends a command whose rank was killed, and what that says then does not stand before the rank."""
    agent: Any = SimpleNamespace(poll=lambda: None)
    started._process = agent
    started.log.write_text("error: rank 1: was killed by SIGKILL\n")

    def kill() -> None:
        with started.log.open("a") as log:
            log.write("error: node 1: the launcher of its workers was killed by SIGTERM\n")

    monkeypatch.setattr(started, "kill", kill)
    found = started._failure()
    assert (found.where, found.what) == ("rank 1", "was killed by SIGKILL at step 0")


def test_what_was_seen_is_not_overruled(started: CommandLaunch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher ends the others once one has failed, and blames whom it met first."""
    agent: Any = SimpleNamespace(poll=lambda: 1)
    started._process = agent
    started._codes = {0: 7}
    started.log.write_text("error: rank 0: was killed by SIGTERM\n")
    monkeypatch.setattr(started, "kill", lambda: None)
    found = started._failure()
    assert (found.where, found.what) == ("rank 0", "ended with exit code 7 at step 0")


@pytest.mark.parametrize(
    ("said", "quoted"),
    [
        (
            '  File "/x/train.py", line 3\n    x = = 3\n        ^\nSyntaxError: invalid syntax\n',
            "SyntaxError: invalid syntax (/x/train.py, line 3)",
        ),
        ('[rank1]:   File "/x/a.py", line 7, in f\n[rank1]: my.OwnError: odd: 3\n', "my.OwnError: odd: 3 (/x/a.py, line 7)"),
        ("ValueError: first\nRuntimeError: of a peer\n", "ValueError: first"),
        ("loading\nno such option\nusage\nbye\n", "no such option | usage | bye"),
        ("", "none"),
    ],
)
def test_the_first_error_is_quoted_and_not_the_launchers_box(started: CommandLaunch, said: str, quoted: str) -> None:
    """A launcher's summary follows it; where there is no error at all, the last lines."""
    started.log.write_text(said + ("  error_file: <N/A>\n  time: 12:00\n====\n" if "Error" in said else ""))
    assert started._last_lines() == quoted
