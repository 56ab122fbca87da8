"""Launching elastic workers: ``fleetbench launch --restarts N`` of a user's script on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fleetbench.errors import ConfigError, EnvironmentLacks
from real.elastic.gathering import LIGHTHOUSE, RESTARTS, lighthouse
from real.job.launcher import Echo, follow, logs_in, quiet, verdict
from real.processes.diagnosis import how_it_ended
from real.processes.place import temporary_folder
from real.processes.roles import JOINED
from real.processes.started import LOCAL, Started, end, start, torchrun_variables

_PAUSE_S = 1.0
"""Seconds from a worker's death to its next start."""
_FOR_GOOD = (ConfigError.exit_code, EnvironmentLacks.exit_code)
"""Exit codes of errors that would come again."""


def launch_elastic(nproc: int, script: Sequence[str], *, restarts: int, log_dir: Path, echo: Echo, say: Callable[[str], None]) -> None:
    """Run ``script`` (a Python file and its arguments) as ``nproc`` elastic workers, which find each other by torchft.

    A worker that dies is named by ``say``, and started again, until there were ``restarts`` of all workers together,
    or until one has ended well. The job ends when no worker is left. Raises ``WorkerFailed`` if none has ended well.
    """
    command, names = [sys.executable, "-u", *script], [f"workerlog.{rank}" for rank in range(nproc)]
    with temporary_folder() as folder, lighthouse(LOCAL) as address, logs_in(log_dir, names):
        common = {**os.environ, **quiet(), JOINED: str(folder / "joined"), LIGHTHOUSE: address}
        workers = _Workers(
            lambda rank, life: start(
                "trainer", rank, command, {**common, **torchrun_variables(rank, nproc), RESTARTS: str(life)}, log_dir / names[rank]
            ),
            nproc,
            restarts,
            say,
        )
        try:
            follow(workers.started, echo, workers.are_over)
        finally:
            end(workers.started)
    if not any(worker.code == 0 for worker in workers.started) and (error := verdict(workers.started, None)) is not None:
        raise error


class _Workers:
    """The processes of a launch, the earlier ones of a rank among them."""

    def __init__(self, start_rank: Callable[[int, int], Started], nproc: int, restarts: int, say: Callable[[str], None]) -> None:
        self._start, self._left, self._restarts, self._say = start_rank, restarts, restarts, say
        self.started = [start_rank(rank, 0) for rank in range(nproc)]
        self._known: set[int] = set()
        """Places in ``started`` whose end was seen."""
        self._due: list[tuple[float, int]] = []
        """Times of starts to come, on the monotonic clock, with their ranks."""

    def are_over(self) -> bool:
        """Name workers that have died since the last call, start those that are due, and return whether none is left."""
        for place, worker in enumerate(self.started):
            if worker.code is not None and place not in self._known:
                self._known.add(place)
                self._see_end(worker)
        is_ending = any(worker.code == 0 for worker in self.started)
        for due in [] if is_ending else [due for due in self._due if due[0] <= time.monotonic()]:
            self._due.remove(due)
            life = sum(worker.rank == due[1] for worker in self.started)
            self.started.append(self._start(due[1], life))
        return all(worker.code is not None for worker in self.started) and (is_ending or not self._due)

    def _see_end(self, worker: Started) -> None:
        if not worker.code:
            return
        again = "is not started again"
        if worker.code not in _FOR_GOOD and self._left:
            self._left -= 1
            self._due.append((time.monotonic() + _PAUSE_S, worker.rank))
            again = f"is started again ({self._restarts - self._left} of {self._restarts})"
        self._say(f"note: {worker.name} {how_it_ended(worker.code)}, and {again}; its output: {worker.log}")
