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
from real.processes.diagnosis import NOTE_PATH, Suspect, blamed, read_note
from real.processes.place import temporary_folder
from real.processes.roles import JOINED, TUNING
from real.processes.started import QUIET, Kind, Started, end, meeting_variables, start, torchrun_variables, uninterrupted

Echo = Callable[[bytes], object]
GRACE_S = 120.0
"""Seconds for trainers to end when told to, because they may save first. The Slurm script of ``fleetbench launch
--print slurm`` allows the same time."""
SERVER_GRACE_S = 300.0
"""Seconds for servers to write their last checkpoint once all trainers have ended."""
POLL_S = 0.05
_OF_THE_USER = ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL")


def launch_script(
    nproc: int, script: Sequence[str], *, log_dir: Path, echo: Echo = sys.stdout.buffer.write, strategy: Path | None = None
) -> bool:
    """Run ``script`` (a Python file and its arguments) as ``nproc`` trainers; see ``run_processes``.

    Return whether any of them called ``fleet.init``. With ``strategy``, a file, its ``DistributedDataParallel``
    model trains by that strategy; raises ``ConfigError`` if it has no such model. Ranks find each other through
    a file.
    """
    with temporary_folder() as folder:
        common = {**quiet(), **meeting_variables(folder), JOINED: str(folder / "joined")}
        if strategy is not None:
            check_ordered(strategy)
            common |= attached_environment(folder, strategy)
        ranks: list[tuple[Kind, int, Mapping[str, str]]] = [("trainer", rank, torchrun_variables(rank, nproc)) for rank in range(nproc)]
        run_processes(script, ranks, {**os.environ, **common}, folder, log_dir=log_dir, echo=echo)
        if strategy is not None:
            refuse_unattached(folder, strategy)
        return (folder / "joined").exists()


def quiet() -> dict[str, str]:
    """Return ``QUIET`` without the variables that a user may set and has set."""
    return {name: value for name, value in QUIET.items() if name not in _OF_THE_USER or name not in os.environ}


def run_processes(
    script: Sequence[str],
    processes: Sequence[tuple[Kind, int, Mapping[str, str]]],
    environment: Mapping[str, str],
    folder: Path,
    *,
    log_dir: Path,
    echo: Echo,
    located: Callable[[str], str] = str,
    is_spread: bool = False,
) -> None:
    """Run ``script`` once for each process (kind, rank and its own variables), until all have ended or one has failed.

    Trainer N's output is in ``log_dir/workerlog.N``, server N's in ``serverlog.N``; rank 0's is echoed if it runs here.
    ``folder``: the launch's folder, where a process can name another that failed. ``located``: adds the host to a
    process's name. ``is_spread``: whether the job also runs on other machines. Raises ``WorkerFailed`` with the process
    that broke the job.
    """
    note, command = folder / "failure.json", [sys.executable, "-u", *script]
    names = [f"{'server' if kind == 'server' else 'worker'}log.{rank}" for kind, rank, _ in processes]
    started: list[Started] = []
    with logs_in(log_dir, names, is_spread=is_spread):
        try:
            for (kind, rank, own), name in zip(processes, names, strict=True):
                variables = {**environment, **own, NOTE_PATH: str(note)}
                started.append(start(kind, rank, command, variables, log_dir / name))
            follow(started, echo, lambda: _is_over(started, note, is_spread=is_spread))
            _tell_driver(started)
            error = verdict(started, read_note(note), located)
        finally:
            end(started)
    if error is not None:
        raise _shown(error, log_dir, echo)


def follow(processes: Sequence[Started], echo: Echo, is_over: Callable[[], bool]) -> None:
    """Follow the processes until ``is_over``, and pass rank 0's output to ``echo``.

    If interrupted, let the trainers end first.
    """
    with ExitStack() as stack:
        logs = [stack.enter_context(process.log.open("rb")) for process in processes if process.name == "rank 0"]

        def look_until(is_over: Callable[[], bool], echo: Echo) -> None:
            has_ended = False
            while not has_ended:
                for process in processes:
                    process.look()
                has_ended = is_over()
                for log in logs:
                    if text := log.read():
                        echo(text)
                time.sleep(POLL_S)

        try:
            look_until(is_over, echo)
        except KeyboardInterrupt:
            with uninterrupted(signal.SIGTERM, signal.SIGHUP):  # a second Ctrl-C ends all at once
                _let_end(processes, lambda is_over: look_until(is_over, _unheard(echo)))
            raise


def _is_over(processes: Sequence[Started], note: Path, *, is_spread: bool) -> bool:
    """Whether the launch is over: all have ended, one has failed, or only servers are left and their time is up.

    Servers get ``SERVER_GRACE_S`` after the last trainer has ended, unless all of them are suspended. If the job also
    runs on other machines (``is_spread``), they are not timed.
    """
    living = [process for process in processes if process.code is None]
    has_failed = any(process.code for process in processes) or (len(living) < len(processes) and note.exists())
    if has_failed or not living:
        return True
    if is_spread or any(process.kind == "trainer" for process in living):
        return False
    last_s = max(process.ended_s for process in processes if process.kind == "trainer")
    return all(process.is_stopped for process in living) or time.monotonic() - last_s > SERVER_GRACE_S


def _let_end(processes: Sequence[Started], look_until: Callable[[Callable[[], bool]], None]) -> None:
    """Tell trainers to end, and wait until they and then the servers have ended, or ``GRACE_S`` is over.

    At first only the trainer itself gets SIGTERM. Its child processes get it after the trainer has ended, because
    workers that load its data must not end earlier.
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
        look_until(is_over)
    for process in told:
        with suppress(ProcessLookupError):
            os.killpg(process.popen.pid, signal.SIGTERM)


def _tell_driver(processes: Sequence[Started]) -> None:
    """Report the exit codes of failed processes to the driver that has started this launcher, if any."""
    for process in processes:
        if process.code and TUNING in os.environ:
            RankSide(Path(os.environ[TUNING])).ended(process.rank, process.code)


def _unheard(echo: Echo) -> Echo:
    """Return an ``echo`` that ignores errors of writing: the terminal may be gone."""

    def hear(text: bytes) -> None:
        with suppress(OSError, FleetbenchError):
            echo(text)

    return hear


def verdict(processes: Sequence[Started], noted: Suspect | None, located: Callable[[str], str] = str) -> WorkerFailed | None:
    """Return the error of a launch that failed; ``None`` if it ended well.

    ``noted``: the process that another one has named. ``located``: adds the host to a process's name.
    """
    suspects = [Suspect(name=process.name, code=process.code, is_stopped=process.is_stopped) for process in processes if process.code != 0]
    suspects += [] if noted is None else [noted]
    if not suspects:
        return None
    found = blamed(suspects)
    log = next((process.log for process in processes if process.name == found.name), "in the log folder of its host")
    return WorkerFailed(found.how, located(found.name), hint=f"its output: {log}")


@contextmanager
def logs_in(log_dir: Path, own: Sequence[str], *, is_spread: bool = False) -> Iterator[None]:
    """Lock ``log_dir`` for a launch's logs with the names ``own``, and remove an earlier launch's.

    If other hosts may use the same disk (``is_spread``), only logs with those names are removed. Raises
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
    """Echo the blamed rank's traceback if its log is here and was not echoed, and return the error."""
    found = re.match(r"rank ([1-9]\d*)", error.where or "")
    log = log_dir / f"workerlog.{found[1]}" if found is not None else None
    text = log.read_bytes() if log is not None and log.is_file() else b""
    begin = text.find(b"Traceback (most recent call last):\n")
    if begin >= 0:
        echo(f"from {log}:\n".encode() + text[begin:])
    return error
