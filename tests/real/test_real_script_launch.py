"""How a launch of a command ends, without a command."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fleetbench.experiment import Run
from fleetbench.quantities import Nanoseconds
from real.job.launch import CommandLaunch, codes_of_agent


@pytest.fixture
def started(tmp_path: Path) -> CommandLaunch:
    """A launch whose directory is there."""
    found = CommandLaunch(["train"], tmp_path, Run(startup_timeout=Nanoseconds(10**9), timeout=Nanoseconds(10**9)))
    found._folder.make()
    return found


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
