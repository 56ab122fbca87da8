"""AgentConfig: what a driver asks of an agent. Apart from the agent, because that imports torch, and a driver need not."""

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
    store: str
    """File of the agent's rendezvous, for a launch that opens no port."""
    port: int | None = None
    """Rendezvous over TCP on this port instead; torch's store listens on every interface."""
    nodes: dict[str, Any] | None = None
    """``Nodes`` as plain data, for a launch on several machines; ``port`` and ``store`` are not used then."""
    environment: dict[str, str] = field(default_factory=dict)
