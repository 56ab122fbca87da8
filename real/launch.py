"""Launch: one set of worker processes of this machine, watched until it ends.

The agent runs in a session of its own, so that Ctrl-C reaches the driver alone, and the driver
ends agent and workers in order. A rank that dies, raises, or falls silent past the timeout ends
the launch with an error that names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fleetbench.children import bound
from fleetbench.errors import EnvironmentLacks, FleetbenchError, WorkerFailed
from real.processes.agent_config import AgentConfig
from real.processes.diagnosis import RankError, diagnose, how_it_ended
from real.processes.fork_server import Forked, fork_server
from real.processes.heartbeat import Heartbeats
from real.processes.stopped import STOPPED, StoppedAgent
from real.worker import JOINED

GRACE_S = 8.0
"""For the agent to end its workers, the SIGKILL to stopped ones included."""
_POLL_S = 0.01
_MARGIN_S = 15.0  # a collective's own timeout comes first and says more

QUIET = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Environment of a launch on one machine: nothing listens on other interfaces, no thread too many."""


class Launch:
    """Processes of one launch. Life cycle: ``start``; ``check`` now and then; ``end`` or ``kill``."""

    def __init__(self, folder: Path, trainers: int, *, startup_timeout_s: float, timeout_s: float) -> None:
        self.folder = folder
        self._trainers = trainers
        self._startup_timeout_s = startup_timeout_s
        self._timeout_s = timeout_s
        self._agent: subprocess.Popen[bytes] | Forked | None = None
        self._stopped: StoppedAgent | None = None
        self._begin = time.monotonic()
        self._first_error: float | None = None
        self._alive: set[int] = set()
        self._owed: tuple[int, int] | None = None
        self.heartbeats = Heartbeats(folder / "heartbeats", trainers, create=True)

    @property
    def log(self) -> Path:
        """Where the workers' output is."""
        return self.folder / "log"

    def start(self, command: Sequence[str], environment: Mapping[str, str], port: int | None = None, *, forks: bool = False) -> None:
        """Start agent and workers, by this process's fork server if ``forks``. Raises ``EnvironmentLacks`` when the port is taken."""
        if port is not None:
            require_free(port)
        (self.folder / "errors").mkdir()
        config = AgentConfig(
            nproc=self._trainers,
            command=list(command),
            forks=forks,
            log_dir=str(self.log),
            failure=str(self.folder / "failure.json"),
            port=port,
            environment={**QUIET, **environment},
        )
        self._agent = start_agent(config, self.folder)
        self._stopped = StoppedAgent(self._agent.pid)

    def joined(self) -> bool:
        """Whether all ranks have met."""
        return all(beat.pid and (beat.leg, beat.step) >= (-1, JOINED) for beat in self.heartbeats.read())

    def expect(self, leg: int) -> None:
        """From now on the ranks owe the results of ``leg``."""
        self._owed = (leg, time.monotonic_ns())

    def check(self) -> None:
        """Raise ``WorkerFailed`` if a worker has died, raised, or been silent for too long."""
        assert self._agent is not None
        assert self._stopped is not None
        self._stopped.look()
        ended = self._agent.poll() is not None
        now = time.monotonic()
        if self._first_error is None and (ended or any((self.folder / "errors").glob("rank*.json"))):
            self._first_error = now
            self._alive = {rank for rank, beat in enumerate(self.heartbeats.read()) if beat.pid and _is_worker(beat.pid)}
        overdue = self._first_error is not None and now - self._first_error > GRACE_S
        if ended or overdue or self._silent():
            raise self._failure()

    def end(self) -> None:
        """Wait for workers that were told to stop. Raises ``WorkerFailed`` if they do not end well."""
        assert self._agent is not None
        assert self._stopped is not None
        deadline = time.monotonic() + self._timeout_s + _MARGIN_S
        while (code := self._agent.poll()) is None and time.monotonic() < deadline:
            self._stopped.look()
            time.sleep(_POLL_S)
        if code != 0:
            raise self._failure()

    def kill(self) -> None:
        """End agent and workers, whatever state they are in; returns when they are gone."""
        if self._agent is None:
            return
        end_agent(self._agent)
        for beat in self.heartbeats.read():
            if beat.pid and _is_worker(beat.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(beat.pid, signal.SIGKILL)

    def _silent(self) -> bool:
        beats = self.heartbeats.read()
        if not self.joined():
            return time.monotonic() - self._begin > self._startup_timeout_s
        if self._owed is None:
            return False
        leg, since_ns = self._owed
        latest = max(since_ns, *(beat.time_ns for beat in beats))
        return (time.monotonic_ns() - latest) * 1e-9 > self._timeout_s + _MARGIN_S and self._owes_results(leg)

    def _owes_results(self, leg: int) -> bool:
        return len(list((self.folder / "results" / str(leg)).glob("rank*.json"))) < self._trainers

    def _failure(self) -> FleetbenchError:
        assert self._agent is not None
        assert self._stopped is not None
        beats, now, agent_code = self.heartbeats.read(), time.monotonic_ns(), self._agent.poll()
        self.kill()
        codes = {rank: code for rank, code in exit_codes(self.folder / "failure.json").items() if rank not in self._alive}
        errors = {
            int(path.stem.removeprefix("rank")): RankError(**json.loads(path.read_text(encoding="utf-8")))
            for path in (self.folder / "errors").glob("rank*.json")
        }
        if agent_code and not errors and not (self.folder / "failure.json").exists():
            return agent_failure(self.folder, str(self.log), agent_code, self._stopped)
        return diagnose(codes, errors, beats, now, str(self.log))


def start_agent(config: AgentConfig, folder: Path) -> subprocess.Popen[bytes] | Forked:
    """Start an agent in a session of its own, which ends with this process; its output goes to ``agent.log`` below ``folder``."""
    path = folder / "agent.json"
    path.write_text(json.dumps(dataclasses.asdict(config)), encoding="utf-8")
    program, environment = ["-m", "real.processes.agent", str(path)], {**os.environ, **config.environment}
    if config.forks:
        return fork_server(environment).fork(program, folder / "agent.log")
    with (folder / "agent.log").open("wb") as log:
        return subprocess.Popen(
            bound([sys.executable, "-P", *program]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )


def end_agent(agent: subprocess.Popen[bytes] | Forked) -> None:
    """Tell an agent to end its workers and itself, and make sure of it."""
    if agent.poll() is None:
        agent.send_signal(signal.SIGTERM)
        try:
            agent.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


def agent_failure(folder: Path, log: str, code: int, stopped: StoppedAgent) -> WorkerFailed:
    """The error of a launch whose agent has ended without a word about its workers."""
    text = (folder / "agent.log").read_text(encoding="utf-8", errors="replace").strip()
    how = STOPPED if stopped.was_stopped else how_it_ended(code)
    return WorkerFailed(f"the launcher of its workers {how}", "this node", text[-500:] or None, hint=f"the workers' output: {log}")


def exit_codes(path: Path) -> dict[int, int]:
    """What the agent wrote about the ranks that failed first: rank to exit code, negative for a signal."""
    if not path.exists():
        return {}
    return {int(rank): code for rank, code in json.loads(path.read_text(encoding="utf-8")).items()}


def require_free(port: int, where: str = "run.port") -> None:
    """Raise ``EnvironmentLacks`` if something listens on ``port`` of the loopback interface."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise EnvironmentLacks(f"the port cannot be taken: {error.strerror}", where, str(port), "choose another port") from None


def _is_worker(pid: int) -> bool:
    """Whether ``pid`` is still one of our workers, started or forked, and not a stranger that got its number."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"real.worker" in command or b"real.processes.fork_server" in command
