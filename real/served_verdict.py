"""Verdict: what became of a job with servers, from what its launcher here saw of its own processes and heard of the others.

Who ended the job comes first: whom the servers name; then a server that nobody hears any more; then, of the trainers, who was
killed, who was stopped, who failed, who fell silent. Every launcher of a job names the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fleetbench.errors import WorkerFailed
from real.processes.diagnosis import how_it_ended
from real.processes.stopped import STOPPED
from real.servers.hosts import Placement
from real.servers.news import Failure, Lost
from real.servers.started import Started


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What servers have said, and which of them say nothing any more."""

    failure: Failure | None = None
    left: frozenset[int] | None = None
    """None where no server has said anything."""
    lost: Mapping[int, Lost] = field(default_factory=dict)
    silent: Mapping[int, float | None] = field(default_factory=dict)
    """Servers that are gone without a word, with the seconds since their last; none for those that never spoke."""


def judge(processes: Sequence[Started], heard: Heard, placement: Placement) -> list[str]:
    """Sentences on trainers without which the job went on. Raises ``WorkerFailed`` naming whoever ended a job that did not end well."""
    own = {process.name: process for process in processes}
    trainers = [process for process in processes if process.kind == "trainer"]
    has_gone_well = any(process.code == 0 for process in trainers) if heard.left is None else bool(heard.left)
    bad_servers = [process for process in processes if process.kind == "server" and process.code != 0]
    has_raised = any((code or 0) > 0 for code in (*(process.code for process in trainers), *(one.code for one in heard.lost.values())))
    if heard.failure or heard.silent or bad_servers or has_raised or not has_gone_well:
        name, how = next(_blamed(own, heard, placement))
        raise WorkerFailed(how, placement.located(name), hint=_hint(name, own, heard))
    return [f"{placement.located(name)} {how}; the others trained on without it" for name, how in _left_behind(trainers, heard)]


def _blamed(own: Mapping[str, Started], heard: Heard, placement: Placement) -> Iterator[tuple[str, str]]:
    """Names, and how it went with them, the first to blame first."""
    trainers = [process for process in own.values() if process.kind == "trainer"]
    elsewhere = {f"rank {rank}": one for rank, one in heard.lost.items() if f"rank {rank}" not in own}
    if heard.failure is not None:
        process = own.get(heard.failure.where)
        has_own_cause = process is not None and (process.is_stopped or (process.code or 0) < 0)
        yield heard.failure.where, _how(process) if process is not None and has_own_cause else heard.failure.what
    for server, silent_s in heard.silent.items():
        process = own.get(f"server {server}")
        how = "has never answered" if silent_s is None else f"has not answered for {silent_s:.0f} s"
        yield f"server {server}", STOPPED if process is not None and process.is_stopped else f"{how} at {placement.endpoints[server]}"
    yield from ((process.name, _how(process)) for process in trainers if (process.code or 0) < 0)
    yield from ((name, one.why) for name, one in elsewhere.items() if (one.code or 0) < 0)
    yield from ((process.name, STOPPED) for process in trainers if process.is_stopped)
    yield from ((process.name, _how(process)) for process in trainers if (process.code or 0) > 0)
    yield from ((name, one.why) for name, one in elsewhere.items() if (one.code or 0) > 0)
    yield from ((process.name, _how(process)) for process in own.values() if process.kind == "server" and process.code)
    yield from ((name, one.why) for name, one in elsewhere.items())
    yield from ((process.name, "did not end") for process in own.values() if process.code is None)
    yield from ((f"rank {rank}", one.why) for rank, one in heard.lost.items())
    yield "this host", "nobody has trained"


def _how(process: Started) -> str:
    """How a process of this machine ended by itself, in words; empty for one that lives, unless it is stopped."""
    if process.is_stopped:
        return STOPPED
    return how_it_ended(process.code) if process.code else ""


def _hint(name: str, own: Mapping[str, Started], heard: Heard) -> str:
    process = own.get(name)
    if process is None and name.startswith("host "):
        return "start it again on every host"
    if process is None:
        return "its output is in the log folder of its host"
    if process.is_stopped:
        return "look for a SIGSTOP or a debugger"
    unended = [other for other in own.values() if other.kind == "trainer" and other.code is None and other is not process]
    others = "".join(f"; {other.name} did not end at all: {other.log}" for other in unended if process.code and heard.failure is None)
    return f"its output: {process.log}{others}"


def _left_behind(trainers: Sequence[Started], heard: Heard) -> Iterator[tuple[str, str]]:
    """Trainers that were killed, here or elsewhere, fell silent or did not end."""
    for process in trainers:
        why = f"{heard.lost[process.rank].why}, " if process.rank in heard.lost else ""
        if process.code is None:
            yield process.name, f"{why}did not end and was killed"
        elif process.code < 0:
            yield process.name, how_it_ended(process.code)
    own = {process.rank for process in trainers}
    yield from ((f"rank {rank}", one.why) for rank, one in heard.lost.items() if rank not in own)
