"""Fork servers and ranks that are stopped (SIGSTOP)."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from real.job import workers
from real.job.workers import Workers
from real.processes import fork_server
from real.processes.beats import Beat
from real.processes.diagnosis import diagnose
from real.processes.fork_server import ForkServer
from real.processes.place import process_state


def _becomes(pid: int, state: str) -> None:
    while process_state(pid) != state:
        time.sleep(0.01)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_fork_server_that_stays_stopped_is_ended(monkeypatch: pytest.MonkeyPatch, goes_on: bool) -> None:
    """One that goes on in time is not."""
    monkeypatch.setattr(fork_server, "_STOPPED_S", 0.5)
    server = ForkServer(os.environ)
    for _ in range(2):
        os.kill(server.pid, signal.SIGSTOP)
        _becomes(server.pid, "T")
        server.look()
        if goes_on:
            time.sleep(0.3)
            os.kill(server.pid, signal.SIGCONT)
            while process_state(server.pid) == "T":
                time.sleep(0.01)
            server.look()
        else:
            time.sleep(0.6)
            server.look()
            break
    assert server.was_stopped is not goes_on
    server.close()
    assert server.code == -signal.SIGKILL


def test_a_stopped_worker_is_ended_once_another_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody else would; it is known as stopped, and not as killed. While all live it is waited for."""
    monkeypatch.setattr(workers, "_PATIENCE_S", 0.3)
    script = tmp_path / "script.py"
    script.write_text("import os, sys, time\nwhile os.environ['RANK'] == '1' or not os.path.exists(sys.argv[1]): time.sleep(0.01)\n")
    launched = Workers(tmp_path, 2)
    launched.start([sys.executable, str(script), str(tmp_path / "end")], {})
    try:
        pid = launched._processes[1].pid
        os.kill(pid, signal.SIGSTOP)
        _becomes(pid, "T")
        for _ in range(2):
            launched.look()
            time.sleep(0.4)
        assert (launched.codes(), launched.stopped) == ({}, {1})
        (tmp_path / "end").touch()
        deadline = time.monotonic() + 10.0
        while len(launched.codes()) < 2:
            assert time.monotonic() < deadline
            launched.look()
            time.sleep(0.01)
        assert (launched.codes(), launched.stopped) == ({0: 0, 1: -signal.SIGKILL}, {1})
    finally:
        launched.end()


def test_a_rank_that_was_stopped_before_it_began_is_named() -> None:
    """Not one that waits for it: a row of the heartbeats is zeros until its rank has written it."""
    beats = [Beat(pid=11, leg=-1, step=0, time_ns=10**9), Beat(pid=0, leg=0, step=0, time_ns=0)]
    error = diagnose({}, {}, beats, 2 * 10**9, "log")
    assert (error.where, error.what) == ("rank 1", "never joined")
