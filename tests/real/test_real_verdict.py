"""Who is named for a launch that did not end well."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from fleetbench.errors import WorkerFailed
from real.job.launcher import verdict
from real.processes.diagnosis import Suspect
from real.processes.started import Started
from real.servers.hosts import Placement

ALONE = Placement(endpoints=("127.0.0.1:1", "127.0.0.1:2"), workers=("127.0.0.1",) * 4, own=frozenset(["127.0.0.1"]))
SPREAD = Placement(endpoints=("a:1", "b:2"), workers=("a", "a", "b", "b"), own=frozenset(["a"]))


STOPPED_PID = 17


@pytest.fixture(autouse=True)
def states(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process of these is stopped; the others run, or have ended."""
    monkeypatch.setattr("real.processes.started.process_state", lambda pid: "T" if pid == STOPPED_PID else "S")


def process(kind: Literal["server", "trainer"], rank: int, code: int | None, *, stopped: bool = False) -> Started:
    """One that ended so, or lives."""
    popen: Any = SimpleNamespace(pid=STOPPED_PID if stopped else 1, poll=lambda: code)
    return Started(kind, rank, Path(f"{kind}{rank}.log"), popen, code)


def servers(*codes: int | None) -> list[Started]:
    """Servers 0, 1, ..."""
    return [process("server", number, code) for number, code in enumerate(codes)]


def trainers(*codes: int | None) -> list[Started]:
    """Ranks 0, 1, ..."""
    return [process("trainer", rank, code) for rank, code in enumerate(codes)]


def failure(processes: Sequence[Started], placement: Placement = SPREAD, noted: Suspect | None = None) -> WorkerFailed | None:
    """What a launcher says that has these processes, one of which has left this note."""
    return verdict(processes, noted, placement.located)


CASES: dict[str, tuple[list[Started], dict[str, Any], str]] = {
    "whom a process names, elsewhere": (
        [*servers(1), *trainers(None, 1)],
        {"noted": Suspect(name="rank 3", says="this trainer has fallen silent")},
        "rank 3 on b: this trainer has fallen silent",
    ),
    "who was killed here, before whom a process names": (
        [*servers(-9), *trainers(1, None)],
        {"noted": Suspect(name="server 0", says="its connection has broken")},
        "server 0 on a: was killed by SIGKILL",
    ),
    "a trainer that ended well here, but too early": (
        trainers(0, 0),
        {"noted": Suspect(name="rank 0", says="ends without fleet.stop_worker(), and the job with it")},
        "rank 0 on a: ends without fleet.stop_worker()",
    ),
    "who was killed, before who was told to end": (
        trainers(1, 0, -signal.SIGTERM, -signal.SIGKILL),
        {"placement": ALONE},
        "rank 3: was killed by SIGKILL",
    ),
    "who failed, before who was told to end": (trainers(-signal.SIGTERM, 1), {"placement": ALONE}, "rank 1: ended with exit code 1"),
    "who is stopped, before who was killed": (
        [*trainers(1, -signal.SIGKILL), process("trainer", 2, None, stopped=True)],
        {"placement": ALONE},
        "rank 2: was stopped and did not answer, until it was killed",
    ),
    "who was killed, before who failed": ([*servers(1), *trainers(1, -9)], {}, "rank 1 on a: was killed by SIGKILL"),
    "who failed here": ([*servers(0), *trainers(0, 7)], {}, "rank 1 on a: ended with exit code 7"),
    "who failed here, of one machine": ([*servers(None, None), *trainers(0, 7)], {"placement": ALONE}, "rank 1: ended with exit code 7"),
    "a server that failed": ([*servers(3), *trainers(None, None)], {}, "server 0 on a: ended with exit code 3"),
    "a server that did not end": ([*servers(None), *trainers(0, 0)], {}, "server 0 on a: did not end"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_one_to_blame_is_named(case: str) -> None:
    """The first cause, not what followed from it."""
    processes, known, expected = CASES[case]
    found = failure(processes, **known)
    assert str(found).startswith(expected)
    assert found is not None
    assert found.hint
