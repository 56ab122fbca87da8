"""Stopped: which workers of an agent do not run because somebody stopped them (SIGSTOP, a debugger).

A stopped worker makes the others run into their timeout, and hears no SIGTERM: in the end the agent
kills it, and its exit code tells of nothing else.
"""

from __future__ import annotations

from pathlib import Path

_STOPPED = ("T", "t")  # by a signal, by a tracer: proc(5)


def stopped_ranks(agent: int) -> frozenset[int] | None:
    """Ranks of the stopped children of the process ``agent``; none where it has no workers (any more)."""
    found = {rank: state for child in _children(agent) if (rank := _rank(child)) is not None and (state := _state(child)) is not None}
    return frozenset(rank for rank, state in found.items() if state in _STOPPED) if found else None


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    try:
        return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text(encoding="ascii").split()]
    except OSError:  # it has ended
        return []


def _rank(pid: int) -> int | None:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    values = [entry.removeprefix(b"RANK=") for entry in environment if entry.startswith(b"RANK=")]
    return int(values[0]) if values else None


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2][:1]
    except OSError:
        return None
