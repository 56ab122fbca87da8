"""Launching a job with parameter servers, on this host or on one of several.

The command is ``fleetbench launch --servers ... --workers ... train.py``. Every process runs the same script;
variables say which role it has (Paddle's, as its own launchers set them). The job fails with the first
process that fails. A launcher stays until its own processes have ended; if they fail, it tells the servers of
all hosts.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fleetbench.errors import FleetbenchError
from real.job.launcher import POLL_S, Echo, follow, logs_in, verdict
from real.processes.diagnosis import read_note
from real.processes.joining import GLOO
from real.processes.place import temporary_folder
from real.processes.roles import STARTUP
from real.processes.started import QUIET, Started, end, start
from real.servers.hosts import Placement, require_addresses
from real.servers.launcher_messages import NOTE, tell_servers

ENDED_THERE = "the launch was ended there"
_OTHER_ROLES = ("RANK", "PADDLE_TRAINER_ENDPOINTS")
"""Variables of other launchers that would hide a process's role given by us."""
_SERVER_GRACE_S = 300.0
"""Seconds for servers to write their last checkpoint after all trainers have ended."""
_PARTING_S = 3.0
"""Seconds for servers of this host to tell trainers of other hosts why the job ends."""


def launch_placed(
    placement: Placement,
    script: Sequence[str],
    *,
    log_dir: Path,
    startup_timeout_s: float = 300.0,
    echo: Echo = sys.stdout.buffer.write,
) -> None:
    """Run ``script`` (a Python file and its arguments) as this machine's servers and trainers.

    It returns after they have ended.

    Server N's output is in ``log_dir/serverlog.N``, trainer N's in ``workerlog.N``; trainer 0's is echoed if
    it runs here. ``startup_timeout_s``: seconds for servers and trainers to join. Raises ``EnvironmentLacks``
    for a server's address that is in use, and ``WorkerFailed`` naming the server, rank or host that ended the
    job.
    """
    require_addresses(placement)
    quiet = {name: value for name, value in QUIET.items() if name not in os.environ and not (placement.is_spread and name == GLOO)}
    inherited = {name: value for name, value in os.environ.items() if name not in _OTHER_ROLES}
    common = {**inherited, **quiet, STARTUP: str(startup_timeout_s)}
    common |= {"PADDLE_PSERVERS_IP_PORT_LIST": ",".join(placement.endpoints), "PADDLE_TRAINERS_NUM": str(len(placement.workers))}
    own = [f"workerlog.{rank}" for rank in placement.own_trainers] + [f"serverlog.{number}" for number in placement.own_servers]
    with logs_in(log_dir, own, is_spread=placement.is_spread), temporary_folder() as folder:
        job = ServedJob(placement, folder / "failure")
        try:
            job.run([sys.executable, "-u", *script], common, log_dir, echo)
        finally:
            end(job.processes)


class ServedJob:
    """A job with servers, as one host sees it: ``run``, to the end of its processes.

    Raises ``WorkerFailed`` with the process that ended it.
    """

    def __init__(self, placement: Placement, note: Path) -> None:
        self.processes: list[Started] = []
        """Processes of this machine."""
        self._placement, self._note = placement, note
        self._trained_at: float | None = None  # since when no trainer of a job of this machine alone lives

    def run(self, command: list[str], common: Mapping[str, str], log_dir: Path, echo: Echo) -> None:
        """Start this machine's processes, and follow them to their end."""
        common = {**common, NOTE: str(self._note)}
        for number in self._placement.own_servers:
            host, _, port = self._placement.endpoints[number].rpartition(":")
            which = {"TRAINING_ROLE": "PSERVER", "POD_IP": host, "PADDLE_PORT": port}
            self.processes.append(start("server", number, command, {**common, **which}, log_dir / f"serverlog.{number}"))
        for rank in self._placement.own_trainers:
            which = {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": str(rank)}
            self.processes.append(start("trainer", rank, command, {**common, **which}, log_dir / f"workerlog.{rank}"))
        try:
            follow(self.processes, echo, lambda _: None, self._is_over)
        except BaseException as error:
            self._part(error)
            raise
        if (failure := verdict(self.processes, read_note(self._note), self._placement.located)) is not None:
            self._part(failure)
            raise failure

    def _is_over(self) -> bool:
        """Whether all have ended, one has failed or blamed another, or the servers' time after the last trainer is over."""
        living = [process for process in self.processes if process.code is None]
        if not living or any(process.code for process in self.processes) or self._note.exists():
            return True
        if self._placement.is_spread or any(process.kind == "trainer" for process in living):
            return False
        self._trained_at = self._trained_at or time.monotonic()
        return all(process.is_stopped for process in living) or time.monotonic() - self._trained_at > _SERVER_GRACE_S

    def _part(self, error: BaseException) -> None:
        """Tell servers of other hosts that this host's part has ended, and why; they tell all trainers."""
        if not self._placement.is_spread:
            return
        where, what = f"host {self._placement.own_name}", ENDED_THERE
        if isinstance(error, FleetbenchError) and error.where is not None:
            where, what = error.where.partition(" on ")[0], error.what
        tell_servers(self._placement.endpoints, where, what)
        deadline = time.monotonic() + _PARTING_S
        servers = [process.popen for process in self.processes if process.kind == "server"]
        while time.monotonic() < deadline and any(popen.poll() is None for popen in servers):  # they first tell all who train
            time.sleep(POLL_S)
