"""Fork servers and ranks that are stopped (SIGSTOP)."""

from __future__ import annotations

import os
import signal
import time

import pytest

from real.job.folder import Beat
from real.processes.diagnosis import diagnose
from real.processes.fork_server import ForkServer
from real.processes.place import process_state


@pytest.mark.parametrize("stops", [False, True])
def test_a_fork_server_that_is_stopped_is_ended(stops: bool) -> None:
    """One that runs is not."""
    server = ForkServer(os.environ)
    if stops:
        os.kill(server.pid, signal.SIGSTOP)
        while process_state(server.pid) != "T":
            time.sleep(0.01)
    server.look()
    assert server.code == (-signal.SIGKILL if stops else None)
    server.close()


def test_a_rank_that_was_stopped_before_it_began_is_named() -> None:
    """Not one that waits for it: a row of the heartbeats is zeros until its rank has written it."""
    beats = [Beat(pid=11, leg=-1, step=0, time_ns=10**9), Beat(pid=0, leg=0, step=0, time_ns=0)]
    error = diagnose({}, {}, beats, 2 * 10**9, "log")
    assert (error.where, error.what) == ("rank 1", "never joined")
