"""Workers: the processes of a launch on this machine, which end with it and of which one that fails or is stopped is known by rank."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fleetbench.children import bound
from fleetbench.errors import EnvironmentLacks, WorkerFailed
from real.processes.diagnosis import STOPPED, how_it_ended
from real.processes.fork_server import Forked, ForkServer, fork_server
from real.processes.place import process_state

QUIET = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Environment of a launch on one machine: nothing listens on other interfaces, no thread too many."""

_POLL_S = 0.02
_END_S = 3.0
"""For a worker to end after SIGTERM, which one that is stopped does not hear; then for the kernel, after SIGKILL."""
_PATIENCE_S = 5.0
"""For a stopped worker once another one has ended."""


class Workers:
    """Life cycle: made; ``start``; ``codes`` and ``look`` now and then; ``end``, in whatever state they are.

    Each has a session of its own, so that Ctrl-C reaches the launcher alone.
    """

    def __init__(self, log_dir: Path, num: int) -> None:
        self.log_dir = log_dir
        self.stopped: frozenset[int] = frozenset()
        """Ranks that were stopped (SIGSTOP) when they were last seen alive."""
        self.num = num
        self._processes: dict[int, subprocess.Popen[bytes] | Forked] = {}
        self._server: ForkServer | None = None
        self._given_up: frozenset[int] = frozenset()
        self._incomplete_since: float | None = None

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], *, port: int | None = None, forks: bool = False, first: int = 0
    ) -> None:
        """Start ranks ``first`` and those that follow; rank N's output goes to ``workerlog.N``.

        They get torchrun's variables, and ``environment`` goes before these. ``port``: where rank 0 listens if they meet over TCP,
        a free one of this machine by default. ``forks``: they are forks of this process's fork server; ``command`` has ``-m MODULE``.
        """
        self.log_dir.mkdir(parents=True, exist_ok=True)
        base = {**os.environ, **environment}
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or _free_port()), "TORCHELASTIC_RUN_ID": "fleetbench"}
        shared |= {"ROLE_NAME": "trainer", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": str(self.num)}
        shared |= dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), str(self.num))
        shared["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        if forks:
            self._server = fork_server(base)
        for local in range(self.num):
            rank = first + local
            own = {"RANK": str(rank), "ROLE_RANK": str(rank), "LOCAL_RANK": str(local)}
            variables, log = {**shared, **own, **environment}, self.log_dir / f"workerlog.{rank}"
            if self._server is not None:
                self._processes[rank] = self._server.fork(command[command.index("-m") :], log, variables)
            else:
                self._processes[rank] = start_process(command, log, {**base, **variables})

    def codes(self) -> dict[int, int]:
        """Exit codes of those that have ended, negative for a signal. Raises ``WorkerFailed`` where they ended with their fork server."""
        if self._server is not None:
            self._server.look()
        found = {rank: code for rank, process in self._processes.items() if (code := process.poll()) is not None}
        if self._server is not None and self._server.code is not None and any(found.values()):
            how = STOPPED if self._server.was_stopped else how_it_ended(self._server.code)
            raise WorkerFailed(f"the launcher of its workers {how}", "this node", hint=f"the workers' output: {self.log_dir}")
        return found

    def is_over(self, codes: Mapping[int, int]) -> bool:
        """Whether one has failed, or all have ended."""
        return any(codes.values()) or len(codes) == self.num

    def look(self) -> None:
        """See who is stopped, and end those for whom nobody is left to wait."""
        living = {rank: process.pid for rank, process in self._processes.items() if process.poll() is None}
        if not living:
            return
        stopped = frozenset(rank for rank, pid in living.items() if process_state(pid) == "T")
        self.stopped = stopped | self._given_up
        if len(living) == len(self._processes):
            self._incomplete_since = None
        elif self._incomplete_since is None:
            self._incomplete_since = time.monotonic()
        elif time.monotonic() - self._incomplete_since > _PATIENCE_S:
            self._given_up |= stopped
            for rank in stopped:
                _signal(living[rank], signal.SIGKILL)

    def end(self) -> None:
        """End those that live, and what they have started: told first, then killed."""
        with uninterrupted():
            for how in (signal.SIGTERM, signal.SIGKILL):
                deadline = time.monotonic() + _END_S
                for process in self._living():
                    _signal(process.pid, how)
                while self._living() and time.monotonic() < deadline:
                    time.sleep(_POLL_S)

    def _living(self) -> list[subprocess.Popen[bytes] | Forked]:
        if self._server is not None:
            self._server.look()  # one that is stopped tells of no end
        return [process for process in self._processes.values() if process.poll() is None]


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A clean-up that neither a second Ctrl-C nor a batch system's SIGTERM breaks off; it must be bounded in time.

    A thread other than the main one hears no signal anyway.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {which: signal.signal(which, signal.SIG_IGN) for which in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, signal.SIG_DFL if handler is None else handler)


def require_free(port: int, where: str = "run.port") -> None:
    """Raise ``EnvironmentLacks`` if something listens on ``port`` of the loopback interface."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise EnvironmentLacks(f"the port cannot be taken: {error.strerror}", where, str(port), "choose another port") from None


def start_process(
    command: Sequence[str], log: Path, environment: Mapping[str, str], *, gently: bool = False, workdir: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own, which ends with this process (``gently``: see ``bound``); its output goes to ``log``."""
    with log.open("wb") as output:
        return subprocess.Popen(
            bound(command, gently=gently),
            cwd=workdir,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )


def _signal(pid: int, how: signal.Signals) -> None:
    """To a worker's group; to itself alone, where it has not come to lead one yet."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            send(pid, how)
            return


def _free_port() -> int:
    """For a script that calls ``init_process_group`` by itself; nothing of ours listens there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
