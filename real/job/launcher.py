"""Launching: ``fleetbench launch`` of a user's script on this machine.

A launcher starts its processes, follows them and ends them. Jobs with parameter servers are in ``real.job.served_launcher``; trainers on
several nodes are started by torchrun, srun or an operator.
"""

import os
import re
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from fleetbench.errors import EnvironmentLacks, WorkerFailed
from real.job.folder import RankSide
from real.processes.diagnosis import STOPPED, Failure, first_to_blame, how_it_ended, read_note
from real.processes.place import temporary_folder
from real.processes.roles import JOINED, TUNING
from real.processes.started import QUIET, Started, end, meeting_variables, start, torchrun_variables, uninterrupted
from real.servers.hosts import Placement

Echo = Callable[[bytes], object]
POLL_S = 0.05
_OF_THE_USER = ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL")


class Job(ABC):
    """What one launcher knows of a job. Life cycle: made; ``processes`` started; ``follow``, until the job is over; judged."""

    def __init__(self) -> None:
        self.processes: list[Started] = []
        """This machine's."""
        self.codes: dict[str, int] = {}
        """Exit codes by name, in the order in which they were heard of."""

    def follow(self, echo: Echo) -> None:
        """Until the job is over here. ``echo`` gets the output of rank 0, where it runs here."""
        with ExitStack() as stack:
            logs = [stack.enter_context(process.log.open("rb")) for process in self.processes if process.name == "rank 0"]
            is_over = False
            while not is_over:
                self.turn()
                for process in self.processes:
                    if process.code is None and (code := process.popen.poll()) is not None:
                        self.see_end(process, code)
                is_over = self.is_over()
                for log in logs:
                    if text := log.read():
                        echo(text)
                time.sleep(POLL_S)

    def turn(self) -> None:  # noqa: B027  # a job of this machine's trainers hears no other host
        """Read what others have told."""

    def see_end(self, process: Started, code: int) -> None:
        """A process of this machine has ended."""
        process.code = self.codes[process.name] = code

    @abstractmethod
    def is_over(self) -> bool:
        """Whether there is nothing left to wait for."""


class CollectiveJob(Job):
    """Ranks that meet in collectives: where one fails, all end."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped: set[int] = set()
        """Ranks that did not run (SIGSTOP) when the launcher ended them."""

    def see_end(self, process: Started, code: int) -> None:
        """See ``Job``; a driver that has started this launcher is told, too."""
        super().see_end(process, code)
        if code and TUNING in os.environ:
            side = RankSide(Path(os.environ[TUNING]))
            with suppress(OSError):  # the folder may be gone
                if not side.is_aborted():  # what ends of an abort is not to blame
                    side.ended(process.rank, code)

    def is_over(self) -> bool:
        """Whether a rank has failed, or all have ended."""
        return any(self.codes.values()) or len(self.codes) == len(self.processes)

    def judge(self, log_dir: Path, noted: Failure | None = None) -> WorkerFailed | None:
        """The error of a launch that did not end well. ``noted``: what a rank has said of its failure.

        Named is who was stopped, then who was killed, then who failed.
        """
        for rank in sorted(self.stopped):
            return WorkerFailed(STOPPED, f"rank {rank}", hint="look for a SIGSTOP or a debugger")
        failed = {int(name.removeprefix("rank ")): code for name, code in self.codes.items() if code}
        if not failed:
            return None
        rank = first_to_blame(failed)
        how = how_it_ended(failed[rank])
        if noted is not None and (failed[rank] >= 0 or failed[rank] == -signal.SIGTERM):  # not where it was killed
            rank, how = noted.rank, noted.what.partition("\n")[0]
        return WorkerFailed(how, f"rank {rank}", hint=f"its output: {log_dir / f'workerlog.{rank}'}")


def launch_script(nproc: int, script: Sequence[str], *, log_dir: Path, echo: Echo = sys.stdout.buffer.write) -> bool:
    """Run ``script`` (a Python file and its arguments) as ``nproc`` trainers; whether any of them called ``fleet.init``.

    Worker N's output is in ``log_dir/workerlog.N``; rank 0's is echoed. Ranks find each other through a file. Raises ``WorkerFailed``
    naming the rank that failed first.
    """
    job = CollectiveJob()
    prepare_logs(log_dir, Placement(endpoints=(), workers=("",) * nproc, own=frozenset([""])))
    with temporary_folder() as folder:
        common = {**os.environ, **_own(QUIET), **meeting_variables(folder), JOINED: str(folder / "joined")}
        try:
            for rank in range(nproc):
                variables, log = {**common, **torchrun_variables(rank, nproc)}, log_dir / f"workerlog.{rank}"
                job.processes.append(start("trainer", rank, [sys.executable, "-u", *script], variables, log))
            job.follow(echo)
        finally:
            with uninterrupted():
                job.stopped = {process.rank for process in job.processes if process.is_stopped}
                end(job.processes)
        if (error := job.judge(log_dir, read_note(folder))) is not None:
            raise _shown(error, log_dir, echo)
        return (folder / "joined").exists()


def _own(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables without those that the user has set, where that is the user's to decide."""
    return {name: value for name, value in variables.items() if name not in _OF_THE_USER or name not in os.environ}


def prepare_logs(log_dir: Path, placement: Placement) -> None:
    """Make the folder, and remove an earlier launch's logs, where other hosts may see the same disk those of this one's processes alone.

    Raises ``EnvironmentLacks`` where there can be no folder.
    """
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentLacks(f"logs cannot be written: {error.strerror}", "--log-dir", str(log_dir), "name another folder") from error
    own = {f"serverlog.{number}" for number in placement.own_servers} | {f"workerlog.{rank}" for rank in placement.own_trainers}
    for old in (*log_dir.glob("serverlog.*"), *log_dir.glob("workerlog.*")):
        if not placement.is_spread or old.name in own:
            old.unlink(missing_ok=True)


def _shown(error: WorkerFailed, log_dir: Path, echo: Echo) -> WorkerFailed:
    """The error, once the traceback of the rank to blame is shown, if its output is here and has not been echoed, as rank 0's has."""
    found = re.match(r"rank ([1-9]\d*)", error.where or "")
    log = log_dir / f"workerlog.{found[1]}" if found is not None else None
    text = log.read_bytes() if log is not None and log.is_file() else b""
    begin = text.find(b"Traceback (most recent call last):\n")
    if begin >= 0:
        echo(f"from {log}:\n".encode() + text[begin:])
    return error
