"""Launching: ``fleetbench launch --servers S --workers W train.py``, all on this machine.

Every process runs the same script; variables say which of them it is (Paddle's, as its own launchers
set them). Unlike trainers that meet in collectives, these need not all live: a server that dies ends the
job or is started again, a trainer that dies is the servers' to judge.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleetbench.errors import ConfigError, EnvironmentLacks, WorkerFailed
from real.launch import QUIET
from real.processes.diagnosis import how_it_ended
from real.processes.orphan import PARENT, process_state
from real.servers.leg_servers import free_ports
from real.servers.notices import tell_lost
from real.servers.security import TOKEN, encrypts, new_token

_POLL_S = 0.05
_GRACE_S = 5.0
"""For processes that were told to end, and for those that have nothing left to do."""
_SERVER_GRACE_S = 300.0
"""For servers to write their last checkpoint once all trainers have ended; as long as they wait for one that never comes."""
_LOCAL = "127.0.0.1"


@dataclass(slots=True)
class _Process:
    """One process of the job; ``code`` is none while it lives."""

    kind: str
    rank: int
    command: list[str]
    environment: dict[str, str]
    log: Path
    popen: subprocess.Popen[bytes]
    code: int | None = None
    starts: int = 1

    @property
    def name(self) -> str:
        """As errors name it."""
        return f"{'server' if self.kind == 'server' else 'rank'} {self.rank}"


@dataclass(slots=True)
class _Job:
    processes: list[_Process] = field(default_factory=list)
    failed: list[_Process] = field(default_factory=list)
    """Trainers that did not end well, in the order in which that was seen."""

    def of(self, kind: str) -> list[_Process]:
        """All servers, or all trainers."""
        return [process for process in self.processes if process.kind == kind]


def launch_served(
    servers: int,
    workers: int,
    script: Sequence[str],
    *,
    log_dir: Path,
    restarts: int = 0,
    environment: Mapping[str, str] | None = None,
    echo: Callable[[bytes], object] = sys.stdout.buffer.write,
) -> None:
    """Run ``script`` (a Python file and its arguments) as ``servers`` servers and ``workers`` trainers of this machine.

    Server N's output is in ``log_dir/serverlog.N``, trainer N's in ``workerlog.N``; trainer 0's is echoed. A
    server that dies is started again up to ``restarts`` times. Raises ``ConfigError`` for a script that is
    not there, ``WorkerFailed`` naming the server or rank that ended the job; trainers that were killed
    in a job that went on without them are named on stderr.
    """
    if min(servers, workers) < 1:
        raise ConfigError("must be at least 1", "--servers, --workers", f"{servers}, {workers}", "for example --servers 1 --workers 2")
    if not Path(script[0]).is_file():
        raise ConfigError("no such script", script[0], hint="give a Python file")
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentLacks(f"logs cannot be written: {error.strerror}", "--log-dir", str(log_dir), "name another folder") from error
    for old in (*log_dir.glob("serverlog.*"), *log_dir.glob("workerlog.*")):
        old.unlink(missing_ok=True)
    endpoints = tuple(f"{_LOCAL}:{port}" for port in free_ports(servers))
    token = new_token()
    own = {name: value for name, value in QUIET.items() if name not in os.environ}
    common = {**os.environ, **own, TOKEN: token, PARENT: str(os.getpid()), **(environment or {})}
    common |= {"PADDLE_PSERVERS_IP_PORT_LIST": ",".join(endpoints), "PADDLE_TRAINERS_NUM": str(workers)}
    command = [sys.executable, "-u", *script]
    job = _Job()
    try:
        for rank, endpoint in enumerate(endpoints):
            port = {"TRAINING_ROLE": "PSERVER", "POD_IP": _LOCAL, "PADDLE_PORT": endpoint.rpartition(":")[2]}
            job.processes.append(_start("server", rank, command, {**common, **port}, log_dir / f"serverlog.{rank}"))
        for rank in range(workers):
            which = {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": str(rank)}
            job.processes.append(_start("trainer", rank, command, {**common, **which}, log_dir / f"workerlog.{rank}"))
        _watch(job, endpoints, token, restarts, echo, encrypted=encrypts(common))
    finally:
        _end(job.processes)


def _watch(job: _Job, endpoints: tuple[str, ...], token: str, restarts: int, echo: Callable[[bytes], object], *, encrypted: bool) -> None:
    """Until all have ended, or those that have not will not. Raises what became of a job that did not end well."""
    since: dict[str, float] = {}
    with job.of("trainer")[0].log.open("rb") as source:
        while True:
            for process in job.processes:
                if process.code is None and process.popen.poll() is not None:
                    _ended(job, process, endpoints, token, restarts, encrypted=encrypted)
            if text := source.read():
                echo(text)
            if _is_over(job, since):
                break
            time.sleep(_POLL_S)
    _judge(job)


def _is_over(job: _Job, since: dict[str, float]) -> bool:
    """Whether there is nothing left to wait for. ``since`` keeps when that began for which there is a grace."""
    now = time.monotonic()
    servers, trainers = job.of("server"), job.of("trainer")
    holds = {
        "no server lives": all(process.code is not None for process in servers),
        "no trainer lives": all(process.code is not None for process in trainers),
        "a server has failed": any(process.code for process in servers),
    }
    for what in (what for what, is_so in holds.items() if is_so):
        since.setdefault(what, now)
    if holds["no trainer lives"]:
        return holds["no server lives"] or now - since["no trainer lives"] > _SERVER_GRACE_S
    if holds["a server has failed"]:
        return now - since["a server has failed"] > _GRACE_S  # its trainers may still tell what happened
    if not holds["no server lives"] or now - since["no server lives"] <= _GRACE_S:
        return False
    # Servers that ended well need no trainer any more, but a trainer may have work of its own behind its leave; one that had not
    # left raises by itself, unless it was stopped.
    return all(process_state(process.popen.pid) == "T" for process in trainers if process.code is None)


def _ended(job: _Job, process: _Process, endpoints: tuple[str, ...], token: str, restarts: int, *, encrypted: bool) -> None:
    process.code = process.popen.returncode
    if process.code == 0:
        return
    if process.kind == "trainer":
        job.failed.append(process)
        print(f"{process.name} {how_it_ended(process.code)}", file=sys.stderr, flush=True)  # noqa: T201  # the launcher's word
        if all(server.popen.poll() is None for server in job.of("server")):
            tell_lost(endpoints, token, process.rank, encrypted=encrypted)
    elif process.code < 0 and process.starts <= restarts and any(trainer.code is None for trainer in job.of("trainer")):
        print(f"{process.name} {how_it_ended(process.code)}, and is started again", file=sys.stderr, flush=True)  # noqa: T201  # the launcher's word
        again = _start(process.kind, process.rank, process.command, process.environment, process.log)
        process.popen, process.code, process.starts = again.popen, None, process.starts + 1
    elif process.code < 0:
        hint = f"its output: {process.log}; fleetbench launch --restart-servers 3 starts it again, from its checkpoint"
        raise WorkerFailed(how_it_ended(process.code), process.name, hint=hint)


def _judge(job: _Job) -> None:
    """Raise what ended the job, or say who was left behind."""
    killed = [process for process in job.failed if process.code is not None and process.code < 0]
    raised = [process for process in job.failed if process not in killed]
    left = [process for process in job.of("trainer") if process.code is None]
    bad_servers = sorted((process for process in job.of("server") if process.code != 0), key=lambda process: process.code is None)
    well = [process for process in job.of("trainer") if process.code == 0]
    stopped = [process for process in left if process_state(process.popen.pid) == "T"]
    if bad_servers or not well or raised:
        if killed:
            raise WorkerFailed(how_it_ended(killed[0].code or 0), killed[0].name, hint=f"its output: {killed[0].log}")
        if stopped:
            hint = "look for a SIGSTOP or a debugger"
            raise WorkerFailed("was stopped and answered nobody, until it was killed", stopped[0].name, hint=hint)
        guilty = next(iter((*raised, *bad_servers, *left)))
        how = "did not end" if guilty.code is None else how_it_ended(guilty.code)
        others = "".join(f"; {process.name} did not end at all: {process.log}" for process in left if guilty in raised)
        raise WorkerFailed(how, guilty.name, hint=f"its output: {guilty.log}{others}")
    for process in (*killed, *left):
        how = "did not end and was killed" if process.code is None else how_it_ended(process.code)
        print(f"{process.name} {how}; the others trained on without it", file=sys.stderr, flush=True)  # noqa: T201  # the launcher's word


def _start(kind: str, rank: int, command: list[str], environment: dict[str, str], log: Path) -> _Process:
    with log.open("ab") as output:
        popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment)
    return _Process(kind, rank, command, environment, log, popen)


def _end(processes: Sequence[_Process]) -> None:
    """End what still lives."""
    living = [process.popen for process in processes if process.popen.poll() is None]
    for popen in living:
        popen.terminate()
    deadline = time.monotonic() + _GRACE_S
    for popen in living:
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(max(0.0, deadline - time.monotonic()))
    for popen in living:
        if popen.poll() is None:
            popen.send_signal(signal.SIGKILL)
            popen.wait()
