"""Fork servers and ranks that are stopped (SIGSTOP)."""

from __future__ import annotations

import os
import signal
import time

import pytest

from real.job.folder import Beat
from real.processes import fork_server
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


def test_a_rank_that_was_stopped_before_it_began_is_named() -> None:
    """Not one that waits for it: a row of the heartbeats is zeros until its rank has written it."""
    beats = [Beat(pid=11, leg=-1, step=0, time_ns=10**9), Beat(pid=0, leg=0, step=0, time_ns=0)]
    error = diagnose({}, {}, beats, 2 * 10**9, "log")
    assert (error.where, error.what) == ("rank 1", "never joined")
