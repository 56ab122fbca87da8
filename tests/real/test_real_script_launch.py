"""How a launch of a command ends, without a command."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fleetbench.experiment import Run
from fleetbench.quantities import Nanoseconds
from real.job import launch
from real.job.folder import RankSide
from real.job.launch import CommandLaunch, codes_of_agent

REPORT = "  rank      : {} (local_rank: {})\n  exitcode  : {} (pid: 11)\n"
"""As torch's agent reports a failed rank."""


@pytest.fixture
def started(tmp_path: Path) -> CommandLaunch:
    """A launch whose directory is there."""
    found = CommandLaunch(["train"], tmp_path, Run(startup_timeout=Nanoseconds(10**9), timeout=Nanoseconds(10**9)))
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


@pytest.fixture
def failed(started: CommandLaunch, monkeypatch: pytest.MonkeyPatch) -> CommandLaunch:
    """A launch of two ranks, whose command has ended with exit code 1."""
    command: Any = SimpleNamespace(popen=SimpleNamespace(poll=lambda: 1, pid=10))
    started._processes = [command]
    started.log.write_text("")
    started.ranks = {0: "here", 1: "here"}
    monkeypatch.setattr(started, "kill", lambda: None)
    return started


def test_a_launchers_word_names_the_rank_that_was_killed(failed: CommandLaunch) -> None:
    """``fleetbench launch`` writes it into the job's folder before it ends the others."""
    RankSide(failed._folder.path).ended(1, -signal.SIGKILL)
    found = failed._failure()
    assert (found.where, found.what) == ("rank 1", "was killed by SIGKILL at step 0")


def test_the_report_of_torchs_agent_names_the_rank_that_was_killed(failed: CommandLaunch) -> None:
    """Not one that the agent has ended itself."""
    failed.log.write_text("".join(REPORT.format(rank, rank, code) for rank, code in ((0, -15), (1, -9))))
    found = failed._failure()
    assert (found.where, found.what) == ("rank 1", "was killed by SIGKILL at step 0")


def test_what_was_seen_is_not_overruled(failed: CommandLaunch) -> None:
    """Who has started a rank knows better than a report."""
    RankSide(failed._folder.path).ended(0, 7)
    failed.log.write_text(REPORT.format(0, 0, 1))
    found = failed._failure()
    assert (found.where, found.what) == ("rank 0", "ended with exit code 7 at step 0")


def test_an_exit_code_before_any_rank_has_joined_explains_nothing(failed: CommandLaunch) -> None:
    """The script's own error does, which is quoted."""
    failed.ranks = {}
    failed.log.write_text("ImportError: no such module\n" + REPORT.format(0, 0, 1))
    found = failed._failure()
    assert (found.where, found.what.partition(",")[0]) == ("the command", "ended with exit code 1")
    assert "it said: ImportError: no such module" in (found.hint or "")
    RankSide(failed._folder.path).ended(1, -signal.SIGKILL)
    assert failed._failure().where == "rank 1", "one that was killed cannot say so"


@pytest.mark.parametrize(
    ("said", "quoted"),
    [
        (
            '  File "/x/train.py", line 3\n    x = = 3\n        ^\nSyntaxError: invalid syntax\n',
            "SyntaxError: invalid syntax",
        ),
        ('[rank1]:   File "/x/a.py", line 7, in f\n[rank1]: my.OwnError: odd: 3\n', "my.OwnError: odd: 3"),
        ("ValueError: first\nRuntimeError: of a peer\n", "ValueError: first"),
        ("loading\nno such option\nusage\nbye\n", "no such option | usage | bye"),
        ("", "none"),
    ],
)
def test_the_first_error_is_quoted_and_not_the_launchers_box(started: CommandLaunch, said: str, quoted: str) -> None:
    """A launcher's summary follows it; where there is no error at all, the last lines."""
    started.log.write_text(said + ("  error_file: <N/A>\n  time: 12:00\n====\n" if "Error" in said else ""))
    assert started._last_lines() == quoted


def test_the_report_of_torchs_agent_is_read_by_rank() -> None:
    """As torch itself writes it: a killed rank and one that raised; the agent ended the third itself, which is not to blame."""
    codes = {5: -signal.SIGKILL, 3: 1, 4: -signal.SIGTERM}
    failures = {rank: ProcessFailure(local_rank=rank % 2, pid=100 + rank, exitcode=code, error_file="") for rank, code in codes.items()}
    said = f"[rank3]: Traceback (most recent call last):\n{ChildFailedError('train.py', failures)}"
    assert codes_of_agent(said) == {5: -signal.SIGKILL, 3: 1}
