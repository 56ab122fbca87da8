"""Server options: what one server is told by whoever starts it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

AGAIN = "FLEETBENCH_SERVER_AGAIN"
"""Environment variable of a server that its launcher has started again: its trainers are there, or will not come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Of one server."""

    server: int
    servers: int
    trainers: int
    endpoint: str
    """``host:port`` to listen on; the host is an address of this machine or a name that leads to one."""
    token: str
    encrypted: bool = False
    timeout_s: float = 30.0
    """A trainer that is silent for so long is lost."""
    startup_timeout_s: float = 300.0
    """... and one that has never spoken, after so long."""
    round_timeout_s: float = math.inf
    """Synchronous: so long trainers wait for one that lives, but sends no gradient or does not come to their barrier.
    At a barrier and before this process's first update it is ``meeting_timeout_s``, where that is more."""
    meeting_timeout_s: float = 300.0
    record: bool = False
    folder: Path = field(default_factory=Path.cwd)
    """Trainers may have checkpoints written below it, and below the folders that the server's own script names, and nowhere else."""
