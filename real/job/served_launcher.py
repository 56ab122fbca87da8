"""Launching a job with parameter servers: ``fleetbench launch --servers ... --workers ... train.py``.

Every process runs the same script; variables say which of them it is (Paddle's, as its own launchers set them). The job fails with
the first process that fails. A launcher follows its own processes and ends all if one fails; servers and trainers of other hosts then
find their connections broken.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from real.job.launcher import Echo, follow, logs_in, verdict
from real.processes.diagnosis import NOTE_PATH, read_note
from real.processes.joining import GLOO
from real.processes.place import temporary_folder
from real.processes.roles import STARTUP
from real.processes.started import QUIET, Started, end, start
from real.servers.hosts import Placement, require_addresses

_OTHER_ROLES = ("RANK", "PADDLE_TRAINER_ENDPOINTS")
"""Variables of other launchers that would hide a process's role given by us."""
_SERVER_GRACE_S = 300.0
"""Seconds for servers to write their last checkpoint once all trainers have ended."""


def launch_placed(
    placement: Placement,
    script: Sequence[str],
    *,
    log_dir: Path,
    startup_timeout_s: float = 300.0,
    echo: Echo = sys.stdout.buffer.write,
) -> None:
    """Run ``script`` (a Python file and its arguments) as this machine's servers and trainers to their end.

    Server N's output is in ``log_dir/serverlog.N``, trainer N's in ``workerlog.N``; trainer 0's is echoed where it runs.
    ``startup_timeout_s``: for servers and trainers to come. Raises ``EnvironmentLacks`` for a server's address that is taken,
    ``WorkerFailed`` naming the server or rank that ended the job.
    """
    require_addresses(placement)
    quiet = {name: value for name, value in QUIET.items() if name not in os.environ and not (placement.is_spread and name == GLOO)}
    inherited = {name: value for name, value in os.environ.items() if name not in _OTHER_ROLES}
    common = {**inherited, **quiet, STARTUP: str(startup_timeout_s)}
    common |= {"PADDLE_PSERVERS_IP_PORT_LIST": ",".join(placement.endpoints), "PADDLE_TRAINERS_NUM": str(len(placement.workers))}
    own = [f"workerlog.{rank}" for rank in placement.own_trainers] + [f"serverlog.{number}" for number in placement.own_servers]
    processes: list[Started] = []
    trained_at: float | None = None  # since when no trainer of a job of this machine alone lives

    def is_over() -> bool:
        """Whether all have ended, one has failed or named another, or servers have had their time since the last trainer's end."""
        nonlocal trained_at
        living = [process for process in processes if process.code is None]
        if not living or any(process.code for process in processes) or note.exists():
            return True
        if placement.is_spread or any(process.kind == "trainer" for process in living):
            return False
        trained_at = trained_at or time.monotonic()
        return all(process.is_stopped for process in living) or time.monotonic() - trained_at > _SERVER_GRACE_S

    with logs_in(log_dir, own, is_spread=placement.is_spread), temporary_folder() as folder:
        note, command = folder / "failure", [sys.executable, "-u", *script]
        common[NOTE_PATH] = str(note)
        try:
            for number in placement.own_servers:
                host, _, port = placement.endpoints[number].rpartition(":")
                which = {"TRAINING_ROLE": "PSERVER", "POD_IP": host, "PADDLE_PORT": port}
                processes.append(start("server", number, command, {**common, **which}, log_dir / f"serverlog.{number}"))
            for rank in placement.own_trainers:
                which = {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": str(rank)}
                processes.append(start("trainer", rank, command, {**common, **which}, log_dir / f"workerlog.{rank}"))
            follow(processes, echo, lambda _: None, is_over)
            if (failure := verdict(processes, read_note(note), placement.located)) is not None:
                raise failure
        finally:
            end(processes)
