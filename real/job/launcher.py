"""Launching: ``fleetbench launch`` of a user's script on this machine.

A launcher starts its processes, follows them and ends them. Jobs with parameter servers are in
``real.job.served_launcher``; trainers on several nodes are started by torchrun, srun or an operator.
"""

import fcntl
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fleetbench.errors import EnvironmentLacks, FleetbenchError, WorkerFailed
from real.job.folder import RankSide
from real.processes.attached import attached_environment, check_ordered, refuse_unattached
from real.processes.diagnosis import NOTE, STOPPED, how_it_ended, read_note
from real.processes.place import temporary_folder
from real.processes.roles import JOINED, TUNING
from real.processes.started import QUIET, Started, end, meeting_variables, start, torchrun_variables, uninterrupted

Echo = Callable[[bytes], object]
GRACE_S = 120.0
"""Seconds for trainers to end when told to, because they may save first. A printed Slurm job allows as
much."""
POLL_S = 0.05
_OF_THE_USER = ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL")


def follow(
    processes: Sequence[Started],
    echo: Echo,
    see_end: Callable[[Started], object],
    is_over: Callable[[], bool],
) -> None:
    """Follow the processes until ``is_over``. ``echo`` gets the output of rank 0, if it runs here.

    ``see_end`` is called once for each process of this machine that has ended, with its exit code set. If
    interrupted, it lets the trainers end first.
    """
    with ExitStack() as stack:
        logs = [stack.enter_context(process.log.open("rb")) for process in processes if process.name == "rank 0"]

        def look(see_end: Callable[[Started], object], is_over: Callable[[], bool]) -> None:
            has_ended = False
            while not has_ended:
                for process in processes:
                    if process.code is None and (code := process.popen.poll()) is not None:
                        process.code = code
                        see_end(process)
                has_ended = is_over()
                for log in logs:
                    if text := log.read():
                        echo(text)
                time.sleep(POLL_S)

        try:
            look(see_end, is_over)
        except KeyboardInterrupt:
            echo = _unheard(echo)
            with uninterrupted(signal.SIGTERM, signal.SIGHUP):  # a second Ctrl-C ends all at once
                _let_end(processes, look)
            raise


def _unheard(echo: Echo) -> Echo:
    """Return an ``echo`` that continues when nothing reads it: the terminal may be gone."""

    def hear(text: bytes) -> None:
        with suppress(OSError, FleetbenchError):
            echo(text)

    return hear


def _let_end(processes: Sequence[Started], look: Callable[[Callable[[Started], object], Callable[[], bool]], None]) -> None:
    """Tell trainers to end; call ``look`` until they and then the servers have ended or their time is over.

    Only the trainer itself is told, and its own child processes after it has ended: workers that load its
    data must not end before it.
    """
    trainers = [process for process in processes if process.kind == "trainer"]
    told = [process for process in trainers if process.code is None]
    deadline = time.monotonic() + GRACE_S

    def is_over() -> bool:
        living = [process for process in processes if process.code is None and not process.is_stopped]
        waits = living if all(process.code == 0 for process in trainers) else [process for process in living if process.kind == "trainer"]
        return not waits or time.monotonic() > deadline

    for process in told:
        with suppress(ProcessLookupError):
            os.kill(process.popen.pid, signal.SIGTERM)
    if trainers:  # servers of a host without trainers wait for nobody
        look(lambda _: None, is_over)
    for process in told:
        with suppress(ProcessLookupError):
            os.killpg(process.popen.pid, signal.SIGTERM)


def _note_end(rank: Started) -> None:
    """Record that a rank has ended; a driver that has started this launcher is told about a failure."""
    if rank.code and TUNING in os.environ:
        RankSide(Path(os.environ[TUNING])).ended(rank.rank, rank.code)


def verdict(processes: Sequence[Started], noted: tuple[str, str] | None, located: Callable[[str], str] = str) -> WorkerFailed | None:
    """Return the error of a launch that did not end well.

    ``noted``: the process that another one blamed, and why.

    It names a stopped process (SIGSTOP) first, then a killed one, then one that another process blamed, then
    one that failed, then one that did not end. ``located``: the name with its host.
    """
    failed = sorted(((process.name, process.code) for process in processes if process.code), key=lambda item: item[1] == -signal.SIGTERM)
    living = [process for process in processes if process.code is None]
    found = [(process.name, STOPPED) for process in living if process.is_stopped]
    found += [(name, how_it_ended(code)) for name, code in failed if code < 0 and code != -signal.SIGTERM]
    found += [] if noted is None else [noted]
    found += [(name, how_it_ended(code)) for name, code in failed]
    found += [(process.name, "did not end") for process in living]
    if not found:
        return None
    name, how = found[0]
    log = next((process.log for process in processes if process.name == name), "in the log folder of its host")
    hint = "look for a SIGSTOP or a debugger" if how == STOPPED else f"its output: {log}"
    return WorkerFailed(how, located(name), hint=hint)


def launch_script(
    nproc: int, script: Sequence[str], *, log_dir: Path, echo: Echo = sys.stdout.buffer.write, strategy: Path | None = None
) -> bool:
    """Run ``script`` (a Python file and its arguments) as ``nproc`` trainers.

    Return whether any of them called ``fleet.init``.

    With ``strategy``, a file, its ``DistributedDataParallel`` model trains by that strategy; raises
    ``ConfigError`` if it has no such model. Worker N's output is in ``log_dir/workerlog.N``; rank 0's is
    echoed. Ranks find each other through a file. Raises ``WorkerFailed`` with the rank that failed first.
    """
    ranks: list[Started] = []
    with logs_in(log_dir, [f"workerlog.{rank}" for rank in range(nproc)]), temporary_folder() as folder:
        common = {**os.environ, **_own(QUIET), **meeting_variables(folder), JOINED: str(folder / "joined")}
        if strategy is not None:
            check_ordered(strategy)
            common |= attached_environment(folder, strategy)
        try:
            for rank in range(nproc):
                variables, log = {**common, **torchrun_variables(rank, nproc)}, log_dir / f"workerlog.{rank}"
                ranks.append(start("trainer", rank, [sys.executable, "-u", *script], variables, log))
            follow(ranks, echo, _note_end, lambda: any(rank.code for rank in ranks) or all(rank.code == 0 for rank in ranks))
            error = verdict(ranks, read_note(folder / NOTE))
        finally:
            with uninterrupted():
                end(ranks)
        if error is not None:
            raise _shown(error, log_dir, echo)
        if strategy is not None:
            refuse_unattached(folder, strategy)
        return (folder / "joined").exists()


def _own(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that the user may and did set."""
    return {name: value for name, value in variables.items() if name not in _OF_THE_USER or name not in os.environ}


@contextmanager
def logs_in(log_dir: Path, own: Sequence[str], *, is_spread: bool = False) -> Iterator[None]:
    """Hold ``log_dir`` for a launch's logs with these names, and remove an earlier launch's.

    If other hosts may use the same disk (``is_spread``), only logs with these names are removed. Raises
    ``EnvironmentLacks`` if the folder cannot be created, and while another launch writes there.
    """
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        first = (log_dir / own[0]).open("ab")
    except OSError as error:
        what = f"logs cannot be written: {error.strerror}"
        raise EnvironmentLacks(what, "--log-dir", str(log_dir), "name another folder") from error
    with first:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EnvironmentLacks("another launch writes its logs there", "--log-dir", str(log_dir), "name another folder") from None
        except OSError:  # a file system without locks
            pass
        for old in (*log_dir.glob("serverlog.*"), *log_dir.glob("workerlog.*")):
            if old.name != own[0] and (old.name in own or not is_spread):
                old.unlink(missing_ok=True)
        first.truncate(0)
        yield


def _shown(error: WorkerFailed, log_dir: Path, echo: Echo) -> WorkerFailed:
    """Show the traceback of the blamed rank if its output is here and not echoed; return the error."""
    found = re.match(r"rank ([1-9]\d*)", error.where or "")
    log = log_dir / f"workerlog.{found[1]}" if found is not None else None
    text = log.read_bytes() if log is not None and log.is_file() else b""
    begin = text.find(b"Traceback (most recent call last):\n")
    if begin >= 0:
        echo(f"from {log}:\n".encode() + text[begin:])
    return error
