"""A child process that the kernel ends with the process that started it."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleetbench.children import bound
from real.processes.place import process_state

PARENT = """
import os, subprocess, sys, time
from pathlib import Path
from fleetbench.children import bound
command = [sys.executable, "-c", sys.argv[2]]
child = subprocess.Popen(bound(command, gently=sys.argv[3] == "gently") if sys.argv[3] != "unbound" else command, start_new_session=True)
Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(60)
"""
SLEEPS = "import time; time.sleep(60)"


def _lives(pid: int) -> bool:
    return process_state(pid) not in ("", "Z")


def _ended_with_parent(folder: Path, program: str, how: str, wait_s: float, stop: bool = False) -> bool:
    """Whether a child is gone half a second after its parent was killed."""
    file = folder / "pid"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(file), program, how])
    try:
        while not file.exists() or not file.read_text():
            time.sleep(0.01)
        child = int(file.read_text())
        time.sleep(wait_s)
        assert _lives(child)
        if stop:
            os.kill(child, signal.SIGSTOP)
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 5.0
    while _lives(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    if gone := not _lives(child):
        return gone
    os.kill(child, signal.SIGKILL)
    return False


def test_a_launcher_of_others_may_end_what_it_started(tmp_path: Path) -> None:
    """Bound gently, a child hears of its parent's end by SIGTERM: killed as torchrun would be otherwise, it would leave its own."""
    told = tmp_path / "told"
    program = f"import signal, sys; signal.signal(15, lambda *_: sys.exit(open({str(told)!r}, 'w').close())); {SLEEPS}"
    assert _ended_with_parent(tmp_path, program, "gently", 0.5)
    assert told.exists()


@pytest.mark.parametrize("stop", [False, True])
def test_a_child_ends_with_its_killed_parent(tmp_path: Path, stop: bool) -> None:
    """A stopped one, too, which no thread of its own could end."""
    assert _ended_with_parent(tmp_path, SLEEPS, "bound", 0.3, stop)


@pytest.mark.slow
def test_an_unbound_child_outlives_its_parent(tmp_path: Path) -> None:
    """So what is seen above is the binding."""
    assert not _ended_with_parent(tmp_path, SLEEPS, "unbound", 0.3)


def test_a_child_whose_parent_is_gone_already_does_not_begin() -> None:
    """Whoever started it ended before the kernel knew."""
    command = bound([sys.executable, "-c", "print('began')"])
    command[command.index(str(os.getpid()))] = "1"
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_a_program_that_is_not_there_is_an_error_of_who_starts_it() -> None:
    """As it is without the binding."""
    with pytest.raises(FileNotFoundError, match="No such file"):
        bound(["no-such-program"])


def test_every_process_of_ours_is_bound() -> None:
    """Whoever starts a process that continues beside it, in any of the four packages, binds it to itself."""
    root = Path(__file__).parents[2]
    calls = [
        call
        for package in ("fleetbench", "sim", "real", "tuner")
        for path in (root / package).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("Popen")
    ]
    assert len(calls) >= 3
    assert [ast.unparse(call) for call in calls if not ast.unparse(call.args[0]).startswith("bound(")] == []
