"""Stopped: agents, and workers of an agent, that do not run, because they were stopped (SIGSTOP).

A stopped worker makes the others run into their timeout, and hears no SIGTERM: torch's agent would
wait for it for another half minute before it kills it, and its exit code tells of nothing else. A stopped
agent never says that its workers have ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from real.processes.place import process_state

STOPPED = "was stopped and did not answer, until it was killed"
"""What an error says of such a process."""
_PATIENCE_S = 5.0
"""For a stopped agent to go on, and for a stopped worker once another one has ended."""


class StoppedWorkers:
    """Watches the workers of one agent; ``look`` now and then."""

    def __init__(self, agent: int, nproc: int) -> None:
        self.ranks: frozenset[int] = frozenset()
        """Those that were stopped when there were last any workers."""
        self._agent = agent
        self._nproc = nproc
        self._incomplete_since: float | None = None

    def look(self) -> None:
        """See who is stopped, and end those for whom nobody is left to wait."""
        workers = _workers(self._agent)
        if not workers:
            return
        stopped = {rank: pid for rank, pid in workers.items() if process_state(pid) == "T"}
        self.ranks = frozenset(stopped)
        if len(workers) == self._nproc:
            self._incomplete_since = None
        elif self._incomplete_since is None:
            self._incomplete_since = time.monotonic()
        elif time.monotonic() - self._incomplete_since > _PATIENCE_S:
            for pid in stopped.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class StoppedAgent:
    """Watches one agent; ``look`` now and then."""

    def __init__(self, agent: int) -> None:
        self.was_stopped = False
        """Whether it was ended because it was stopped."""
        self._agent = agent
        self._stopped_since: float | None = None

    def look(self) -> None:
        """End an agent that has been stopped for too long; the kernel ends its workers with it."""
        now = time.monotonic()
        if process_state(self._agent) != "T":
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now - self._stopped_since > _PATIENCE_S:
            self.was_stopped = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._agent, signal.SIGKILL)


def _workers(agent: int) -> dict[int, int]:
    """Process numbers of the agent's workers by rank; those that have ended are not among them."""
    try:
        tasks = list(Path(f"/proc/{agent}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text(encoding="ascii").split()]
    except OSError:  # it has ended
        return {}
    return {rank: child for child in children if (rank := _rank(child)) is not None}


def _rank(pid: int) -> int | None:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    values = [entry.removeprefix(b"RANK=") for entry in environment if entry.startswith(b"RANK=")]
    return int(values[0]) if values else None
