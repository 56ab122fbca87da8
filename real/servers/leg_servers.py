"""LegServers: the server processes of one leg, from before its first step until all trainers have left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetbench.children import bound
from fleetbench.errors import WorkerFailed
from fleetbench.staleness import ServerLoad
from real.processes.diagnosis import how_it_ended
from real.servers.addresses import LOCAL, free_ports
from real.servers.process import SPEC, report_path
from real.servers.security import encrypts, new_token

_GRACE_S = 10.0
"""For servers to end behind the last trainer."""
Enter = Callable[[int, Sequence[str]], Sequence[str]]
"""The command by which a process becomes a program on the host of a server, by the server's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the servers of a leg are."""

    endpoints: tuple[str, ...]
    """``host:port`` of each."""
    enter: Enter | None = None
    """None: on the driver's host."""


def local_places(servers: int) -> Places:
    """All on the driver's host, on free ports."""
    return Places(endpoints=tuple(f"{LOCAL}:{port}" for port in free_ports(servers)))


class LegServers:
    """Life cycle: made; ``start``; ``check`` now and then; ``end``, which gives their reports; ``kill``, in whatever state they are.

    Raises ``ConfigError`` for an environment that says neither yes nor no to encryption.
    """

    def __init__(
        self,
        folder: Path,
        log_dir: Path,
        places: Places,
        trainers: int,
        *,
        timeout_s: float,
        startup_timeout_s: float,
        environment: Mapping[str, str],
        record: bool = False,
    ) -> None:
        self._environment = {**os.environ, **environment}
        encrypts(self._environment, ())  # an error of this process, not of all that it starts
        folder.mkdir(parents=True)
        log_dir.mkdir(parents=True, exist_ok=True)
        self.endpoints = places.endpoints
        self.token = new_token()
        self._folder = folder
        self._enter = places.enter
        self._logs = [log_dir / f"serverlog.{server}" for server in range(len(places.endpoints))]
        spec = {
            "endpoints": self.endpoints,
            "token": self.token,
            "trainers": trainers,
            "timeout_s": timeout_s,
            "startup_timeout_s": startup_timeout_s,
            "record": record,
        }
        (folder / SPEC).write_text(json.dumps(spec), encoding="utf-8")
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start them; they end with this process at the latest."""
        for server, path in enumerate(self._logs):
            program = [sys.executable, "-P", "-m", "real.servers.process", str(self._folder), str(server)]
            command = program if self._enter is None else self._enter(server, program)
            with path.open("ab") as log:
                self._processes.append(
                    subprocess.Popen(
                        bound(command),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=self._environment,
                        start_new_session=True,
                    )
                )

    def check(self) -> None:
        """Raise ``WorkerFailed`` naming a server that has not ended well."""
        for server, process in enumerate(self._processes):
            if process.poll() not in (None, 0):
                raise WorkerFailed(how_it_ended(process.returncode), f"server {server}", hint=f"its output: {self._logs[server]}")

    def end(self) -> list[dict[str, Any]]:
        """The servers' reports, once all trainers have left. Raises ``WorkerFailed`` for a server that does not end, or not well."""
        deadline = time.monotonic() + _GRACE_S
        for server, process in enumerate(self._processes):
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise WorkerFailed(
                    "has not ended behind the last trainer", f"server {server}", hint=f"its output: {self._logs[server]}"
                ) from None
        self.check()
        return [json.loads(report_path(self._folder, server).read_text(encoding="utf-8")) for server in range(len(self._processes))]

    def kill(self) -> None:
        """End whatever is left of them."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


def loads_of(reports: Sequence[Mapping[str, Any]]) -> list[ServerLoad]:
    """What the servers had to do while steps counted."""
    return [
        ServerLoad(
            span_s=one["served_s"], busy_s=one["busy_s"], staleness=Counter({int(missed): int(num) for missed, num in one["staleness"]})
        )
        for one in reports
    ]
