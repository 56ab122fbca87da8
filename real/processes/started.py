"""Processes that a launch has started on this machine: named servers and trainers, which end with the launch."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fleetbench.children import bound
from fleetbench.errors import EnvironmentLacks
from real.processes.place import process_state
from real.processes.roles import STORE

LOCAL = "127.0.0.1"
_PORTS = range(20_000, 32_000)
"""Ports that a launch on this machine may use."""
QUIET = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Environment of a launch on one machine: no listeners on other interfaces, no unnecessary threads."""

_POLL_S = 0.02
_END_S = 3.0
"""Seconds for processes to end after SIGTERM, which a stopped process does not handle; then again after
SIGKILL."""


Kind = Literal["server", "trainer"]


@dataclass(slots=True)
class Started:
    """One process of the job."""

    kind: Kind
    rank: int
    log: Path
    popen: subprocess.Popen[bytes]
    code: int | None = None
    """Exit code, negative for a signal; ``None`` until ``look`` has seen the end."""
    ended_s: float = 0.0
    """Time in s, on the monotonic clock, at which ``look`` has seen the end."""

    @property
    def name(self) -> str:
        """Name of the process in errors, such as ``rank 1``."""
        return f"{'server' if self.kind == 'server' else 'rank'} {self.rank}"

    def look(self) -> None:
        """Record the exit code if the process has ended."""
        if self.code is None and (code := self.popen.poll()) is not None:
            self.code, self.ended_s = code, time.monotonic()

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped by SIGSTOP or a debugger."""
        return self.code is None and process_state(self.popen.pid) == "T"


def start(kind: Kind, rank: int, command: list[str], environment: Mapping[str, str], log: Path) -> Started:
    """Start a server or trainer, with its output in ``log``."""
    return Started(kind, rank, log, start_process(command, log, environment))


def start_process(
    command: Sequence[str], log: Path, environment: Mapping[str, str], *, gently: bool = False, workdir: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a child that ends with this process (``gently``: see ``bound``), and append its output to ``log``.

    The child has its own session, so Ctrl-C reaches only the launcher, which ends all processes in order.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            bound(command, gently=gently),
            cwd=workdir,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )


@contextlib.contextmanager
def users_launcher(command: Sequence[str], grace_s: float, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Yield a user's command, such as torchrun, started with ``options`` of ``Popen``; it is killed after the ``with``.

    If interrupted, the command has ``grace_s`` seconds to end. Raises ``EnvironmentLacks`` if there is no such program.
    """
    try:
        process = subprocess.Popen(bound(command, gently=True), **options)
    except OSError as error:
        what, hint = f"cannot be started: {error.strerror}", "what follows -- is a program with its arguments"
        raise EnvironmentLacks(what, "the command", command[0], hint) from None
    try:
        yield process
    except KeyboardInterrupt:
        with uninterrupted(), contextlib.suppress(subprocess.TimeoutExpired):
            process.send_signal(signal.SIGTERM)  # a terminal has only sent SIGINT
            process.wait(grace_s)
        raise
    finally:
        process.kill()
        process.wait()


def meeting_variables(folder: Path) -> dict[str, str]:
    """Return variables by which ranks of this machine meet: a file in ``folder``, and torch's address for scripts."""
    return {"MASTER_ADDR": LOCAL, "MASTER_PORT": str(free_ports(1)[0]), STORE: str(folder / "store")}


def torchrun_variables(rank: int, trainers: int) -> dict[str, str]:
    """Return torchrun's variables for a rank of a single node, without those by which ranks meet."""
    numbers = {"RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    numbers |= {"WORLD_SIZE": trainers, "ROLE_WORLD_SIZE": trainers, "LOCAL_WORLD_SIZE": trainers}
    named = {"ROLE_NAME": "trainer", "TORCHELASTIC_RUN_ID": "fleetbench"}
    named["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    return named | {name: str(value) for name, value in numbers.items()}


def end(processes: Sequence[Started]) -> None:
    """End the processes that still run, and their child processes: first by SIGTERM, then by SIGKILL."""
    with uninterrupted():
        for how in (signal.SIGTERM, signal.SIGKILL):
            living = [process.popen for process in processes if process.popen.poll() is None]
            for popen in living:
                _signal(popen.pid, how)
            deadline = time.monotonic() + _END_S
            while any(popen.poll() is None for popen in living) and time.monotonic() < deadline:
                time.sleep(_POLL_S)


def _signal(pid: int, how: signal.Signals) -> None:
    """Signal a process's group; only the process itself if it does not lead a group yet."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            send(pid, how)
            return


@contextlib.contextmanager
def uninterrupted(*signals: signal.Signals) -> Iterator[None]:
    """Ignore ``signals`` during a clean-up; by default SIGINT, SIGTERM and SIGHUP.

    In other threads than the main one, which receive no signals anyway, do nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ignored = signals or (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {which: signal.signal(which, signal.SIG_IGN) for which in ignored}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, signal.SIG_DFL if handler is None else handler)


def free_ports(num: int) -> list[int]:
    """Return ``num`` free ports of this machine, below those that the system gives to outgoing connections.

    An outgoing connection could take a higher port before a server binds it.
    """
    found: list[int] = []
    with contextlib.ExitStack() as opened:
        for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
            if len(found) == num:
                break
            probe = opened.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # the port is taken
                probe.bind((LOCAL, port))
                found.append(port)
    return found


def require_free(port: int, where: str, host: str = LOCAL) -> None:
    """Raise ``EnvironmentLacks`` if something listens on ``port`` of this machine's address ``host``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            what = f"the port cannot be taken: {error.strerror}"
            raise EnvironmentLacks(what, where, f"{host}:{port}", "choose another port, or address of this machine") from None
