"""AgentConfig: what a driver asks of an agent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """What the agent launches, and how its workers find each other."""

    nproc: int
    command: list[str]
    """Program and arguments of a worker."""
    log_dir: str
    """Worker N writes to ``workerlog.N`` there."""
    failure: str
    """File that receives ``{rank: exit code}`` of the workers that failed first; on several machines a ``Verdict``."""
    forks: bool = False
    """Workers are forks of the agent, which is one of a fork server's; their program is ``-m MODULE ...``."""
    port: int | None = None
    """They meet over TCP on this port, not through a file; torch's store listens on every interface."""
    nodes: dict[str, Any] | None = None
    """``Nodes`` as plain data, for a launch on several machines; ``port`` is not used then."""
    environment: dict[str, str] = field(default_factory=dict)
