"""A process that ends with who started it, also with a wrapper between the two."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from real.processes.orphan import PARENT

CHILD = "import time; from real.processes.orphan import end_with_parent; end_with_parent(); time.sleep(1.2); print('lives', flush=True)"
WRAPPED = ["/bin/sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, CHILD]
"""The shell stays between this process and the child."""


def _run(parent: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(WRAPPED, env={**os.environ, PARENT: str(parent)}, capture_output=True, text=True, timeout=60, check=False)


def test_a_wrapper_may_stand_between() -> None:
    """Who started it lives, and is no parent of its own."""
    assert _run(os.getpid()).stdout == "lives\n"


def test_behind_a_wrapper_it_ends_with_who_started_it() -> None:
    """Killed, reaped or not."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
        assert _run(gone.pid).returncode == 128 + 9
    with subprocess.Popen([sys.executable, "-c", ""]) as zombie:
        time.sleep(0.5)
        assert _run(zombie.pid).returncode == 128 + 9


CLEARS = """
import signal, sys, time
from pathlib import Path
from real.processes.orphan import end_with_parent
if sys.argv[2] == "in order":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
end_with_parent(signal.SIGTERM, Path(sys.argv[1]))
time.sleep(1.2)
"""


@pytest.mark.parametrize("end", ["at once", "in order"])
@pytest.mark.parametrize("lives", [True, False])
def test_it_takes_away_what_a_dead_parent_cannot(end: str, lives: bool, tmp_path: Path) -> None:
    """A folder goes with the process once the parent is gone, whether SIGTERM finds a handler or not; a living parent's stays."""
    folder = tmp_path / "of the parent"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
        environment = {**os.environ, PARENT: str(os.getpid() if lives else gone.pid)}
        wrapped = ["/bin/sh", "-c", '"$0" -c "$1" "$2" "$3"; exit $?', sys.executable, CLEARS, str(folder), end]
        ended = subprocess.run(wrapped, env=environment, timeout=60, check=False)
    assert folder.exists() is lives
    assert ended.returncode == (0 if lives else 1 if end == "in order" else 128 + 15)
