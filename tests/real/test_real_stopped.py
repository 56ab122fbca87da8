"""Ranks that are stopped (SIGSTOP)."""

from __future__ import annotations

from real.job.folder import Beat
from real.processes.diagnosis import diagnose


def test_a_rank_that_was_stopped_before_it_began_is_named() -> None:
    """Not one that waits for it: a row of the heartbeats is zeros until its rank has written it."""
    beats = [Beat(pid=11, leg=-1, step=0, time_ns=10**9), Beat(pid=0, leg=0, step=0, time_ns=0)]
    error = diagnose({}, {}, beats, 2 * 10**9, "log")
    assert (error.where, error.what) == ("rank 1", "never joined")
