"""Started: the servers and trainers that a launcher has started on its machine."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fleetbench.children import bound
from real.processes.fork_server import Forked
from real.processes.place import process_state
from real.servers.server_options import AGAIN


@dataclass(slots=True)
class Started:
    """One process of the job; ``code`` is none while it lives."""

    kind: Literal["server", "trainer"]
    rank: int
    command: list[str]
    environment: dict[str, str]
    log: Path
    popen: subprocess.Popen[bytes] | Forked
    code: int | None = None
    starts: int = 1

    @property
    def name(self) -> str:
        """As errors name it."""
        return f"{'server' if self.kind == 'server' else 'rank'} {self.rank}"

    @property
    def is_stopped(self) -> bool:
        """Whether it lives and does not run, because of a SIGSTOP or a debugger."""
        return self.code is None and process_state(self.popen.pid) == "T"

    def start_again(self) -> None:
        """Once it has ended."""
        self.environment[AGAIN] = "1"
        self.popen, self.code, self.starts = _popen(self.command, self.environment, self.log), None, self.starts + 1


def start(kind: Literal["server", "trainer"], rank: int, command: list[str], environment: dict[str, str], log: Path) -> Started:
    """Start one. Its session is its own, so that Ctrl-C reaches the launcher alone, which ends all in order."""
    return Started(kind, rank, command, environment, log, _popen(command, environment, log))


def _popen(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            bound(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
