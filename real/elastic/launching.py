"""Launching elastic workers: ``fleetbench launch --restarts N`` of a user's script on this machine."""

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
_FOR_GOOD = (0, ConfigError.exit_code, EnvironmentLacks.exit_code)
"""Exit codes after which a worker is not started again: of a good end, and of errors that would come again."""


def launch_elastic(nproc: int, script: Sequence[str], *, restarts: int, log_dir: Path, echo: Echo, say: Callable[[str], None]) -> None:
    """Run ``script`` (a Python file and its arguments) as ``nproc`` elastic workers, which find each other by torchft.

    A worker that dies is named by ``say``, and started again while others are alive, at most ``restarts`` times in all,
    until one has ended well. The job ends when no worker is left. Raises ``WorkerFailed`` if none has ended well.
    """
    command, names = [sys.executable, "-u", *script], [f"workerlog.{rank}" for rank in range(nproc)]
    started: list[Started] = []
    due: list[tuple[float, int]] = []  # times of starts to come, on the monotonic clock, and ranks
    seen = 0  # of ``started``, in the order of ends
    with temporary_folder() as folder, lighthouse(LOCAL) as address, logs_in(log_dir, names):
        common = {**os.environ, **quiet(), JOINED: str(folder / "joined"), LIGHTHOUSE: address}

        def begin(rank: int) -> None:
            life = sum(worker.rank == rank for worker in started)
            variables = {**common, **torchrun_variables(rank, nproc), RESTARTS: str(life)}
            started.append(start("trainer", rank, command, variables, log_dir / names[rank]))

        def is_over() -> bool:
            nonlocal seen
            ended = sorted((worker for worker in started if worker.code is not None), key=lambda worker: worker.ended_s)
            is_well = any(worker.code == 0 for worker in ended)
            is_lost = len(ended) == len(started)  # and with the last worker, what the job has learnt
            for worker in ended[seen:]:
                may = not is_well and worker.code not in _FOR_GOOD and len(started) + len(due) < nproc + restarts
                again = "is not started again" + (", as no other is left" if may else "")
                if may and not is_lost:
                    due.append((time.monotonic() + _PAUSE_S, worker.rank))
                    again = f"is started again ({len(started) + len(due) - nproc} of {restarts})"
                if worker.code:
                    say(f"note: {worker.name} {how_it_ended(worker.code)}, and {again}; its output: {worker.log}")
            seen = len(ended)
            if is_well or is_lost:
                due.clear()
            while due and due[0][0] <= time.monotonic():
                begin(due.pop(0)[1])
            return not due and all(worker.code is not None for worker in started)

        try:
            for rank in range(nproc):
                begin(rank)
            follow(started, echo, is_over)
        finally:
            end(started)
    if all(worker.code for worker in started) and (error := verdict(started, None)) is not None:
        raise error
