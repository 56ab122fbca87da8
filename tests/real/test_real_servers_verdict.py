"""Who is named for a job with servers that did not end well, and what is said of one that did."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from fleetbench.errors import WorkerFailed
from real.served_verdict import Heard, judge
from real.servers.hosts import Placement
from real.servers.news import Failure, Lost
from real.servers.started import Started

ALONE = Placement(endpoints=("127.0.0.1:1", "127.0.0.1:2"), workers=("127.0.0.1",) * 4, own=frozenset(["127.0.0.1"]))
SPREAD = Placement(endpoints=("a:1", "b:2"), workers=("a", "a", "b", "b"), own=frozenset(["a"]))
STOPPED_PID = 17


@pytest.fixture(autouse=True)
def states(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process of these is stopped; the others run, or have ended."""
    monkeypatch.setattr("real.servers.started.process_state", lambda pid: "T" if pid == STOPPED_PID else "S")


def process(kind: Literal["server", "trainer"], rank: int, code: int | None, *, stopped: bool = False) -> Started:
    """One that ended so, or lives."""
    popen: Any = SimpleNamespace(pid=STOPPED_PID if stopped else 1)
    return Started(kind, rank, [], {}, Path(f"{kind}{rank}.log"), popen, code)


def servers(*codes: int | None) -> list[Started]:
    """Servers 0, 1, ..."""
    return [process("server", number, code) for number, code in enumerate(codes)]


def trainers(*codes: int | None) -> list[Started]:
    """Ranks 0, 1, ..."""
    return [process("trainer", rank, code) for rank, code in enumerate(codes)]


def lost(rank: int, why: str = "has fallen silent", code: int | None = None) -> dict[int, Lost]:
    """As servers say it."""
    return {rank: Lost(rank=rank, why=why, code=code)}


def test_a_job_that_ended_well_is_not_spoken_of() -> None:
    """Here, and on a host that has servers alone or trainers alone."""
    assert judge([*servers(0, 0), *trainers(0, 0, 0, 0)], Heard(left=frozenset(range(4))), ALONE) == []
    assert judge(servers(0), Heard(left=frozenset(range(4))), SPREAD) == []
    assert judge(trainers(0, 0), Heard(left=frozenset(range(4))), SPREAD) == []


def test_a_job_that_went_on_without_a_trainer_names_it() -> None:
    """One that was killed here, one that was killed elsewhere, one that fell silent and still lives."""
    said = judge([*servers(0), *trainers(0, -9)], Heard(left=frozenset([0, 3]), lost=lost(2, "was killed by SIGTERM", -15)), SPREAD)
    assert said == [
        "rank 1 on a was killed by SIGKILL; the others trained on without it",
        "rank 2 on b was killed by SIGTERM; the others trained on without it",
    ]
    said = judge([*servers(0, 0), *trainers(0, None)], Heard(left=frozenset([0]), lost=lost(1)), ALONE)
    assert said == ["rank 1 has fallen silent, did not end and was killed; the others trained on without it"]


def test_a_host_whose_trainers_are_all_lost_ends_well_with_the_others() -> None:
    """Asynchronous training went on elsewhere, to its end."""
    said = judge(trainers(-9), Heard(left=frozenset([1, 2, 3]), lost=lost(0, "was killed by SIGKILL", -9)), SPREAD)
    assert said == ["rank 0 on a was killed by SIGKILL; the others trained on without it"]


CASES = {
    "whom the servers name, elsewhere": (
        [*servers(1), *trainers(1, 1)],
        Heard(failure=Failure(where="rank 3", what="this trainer was killed by SIGKILL, and ...")),
        "rank 3 on b: this trainer was killed by SIGKILL, and ...",
    ),
    "whom the servers name, here, and how it was": (
        [*servers(1), *trainers(1, -9)],
        Heard(failure=Failure(where="rank 1", what="this trainer was killed, and so on")),
        "rank 1 on a: was killed by SIGKILL",
    ),
    "a stopped trainer that the servers name": (
        [*servers(1), process("trainer", 0, None, stopped=True)],
        Heard(failure=Failure(where="rank 0", what="this trainer has fallen silent")),
        "rank 0 on a: was stopped and did not answer, until it was killed",
    ),
    "a host that was interrupted": (
        trainers(1, 1),
        Heard(failure=Failure(where="host b", what="the launch was ended there")),
        "host b: the launch was ended there",
    ),
    "a server that nobody hears, before trainers that failed because of it": (
        trainers(1, -9),
        Heard(silent={1: 25.2}),
        "server 1 on b: has not answered for 25 s at b:2",
    ),
    "a server that never came": (trainers(1, 1), Heard(silent={1: None}), "server 1 on b: has never answered at b:2"),
    "who was killed, before who failed": ([*servers(0), *trainers(1, -9)], Heard(), "rank 1 on a: was killed by SIGKILL"),
    "who failed here": ([*servers(0), *trainers(0, 7)], Heard(left=frozenset([0])), "rank 1 on a: ended with exit code 7"),
    "who failed elsewhere": (servers(0), Heard(left=frozenset([0]), lost=lost(2, "ended with exit code 7", 7)), "rank 2 on b: ended with"),
    "trainers that ended well and never came": (
        [*servers(0), *trainers(0, 0)],
        Heard(left=frozenset(), lost={**lost(0, "has never come"), **lost(1, "has never come")}),
        "rank 0 on a: has never come",
    ),
    "a server that failed": ([*servers(3), *trainers(None, None)], Heard(), "server 0 on a: ended with exit code 3"),
    "nobody left": (servers(0), Heard(lost={**lost(2), **lost(0, "has never come")}), "rank 2 on b: has fallen silent"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_one_to_blame_is_named(case: str) -> None:
    """The first cause, not what followed from it."""
    processes, heard, expected = CASES[case]
    with pytest.raises(WorkerFailed) as raised:
        judge(processes, heard, SPREAD)
    assert str(raised.value).startswith(expected)
    assert raised.value.hint


def test_a_trainer_that_hangs_beside_one_that_failed_is_told_of() -> None:
    """With its log: it was killed."""
    with pytest.raises(WorkerFailed, match=r"(?s)rank 0: ended with exit code 1.*rank 1 did not end at all: trainer1.log"):
        judge([*servers(0), *trainers(1, None)], Heard(), ALONE)
