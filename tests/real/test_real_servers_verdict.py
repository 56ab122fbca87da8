"""Who is named for a job with servers that did not end well, and what is said of one that did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

from fleetbench.errors import WorkerFailed
from real.job.served_launcher import ServedJob
from real.processes.started import Started
from real.servers.board import Board, Entry, Messenger
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
    popen: Any = SimpleNamespace(pid=STOPPED_PID if stopped else 1)
    return Started(kind, rank, [], {}, Path(f"{kind}{rank}.log"), popen, code)


def servers(*codes: int | None) -> list[Started]:
    """Servers 0, 1, ..."""
    return [process("server", number, code) for number, code in enumerate(codes)]


def trainers(*codes: int | None) -> list[Started]:
    """Ranks 0, 1, ..."""
    return [process("trainer", rank, code) for rank, code in enumerate(codes)]


def judge(
    processes: Sequence[Started],
    placement: Placement = SPREAD,
    *,
    lost: Mapping[int, str] | None = None,
    failed: tuple[str, str] | None = None,
    blamed: tuple[str, str] | None = None,
) -> list[str]:
    """What a launcher says that has these processes, and has read the rest."""
    job = ServedJob(placement, cast(Board, None), cast(Messenger, None))
    job.processes = list(processes)
    job.codes = {process.name: process.code for process in processes if process.code is not None}
    for rank, why in (lost or {}).items():
        job.hear(Entry(kind="lost", name=f"rank {rank}", why=why))
    if failed is not None:
        job.hear(Entry(kind="failed", name=failed[0], why=failed[1]))
    if blamed is not None:
        job.hear(Entry(kind="blamed", name=blamed[0], why=blamed[1]))
    return job.judge()


def test_a_job_that_ended_well_is_not_spoken_of() -> None:
    """Here, and on a host that has servers alone or trainers alone."""
    assert judge([*servers(0, 0), *trainers(0, 0, 0, 0)], ALONE) == []
    assert judge(servers(0)) == []
    assert judge([*servers(0), *trainers(0, 0)]) == []


def test_a_job_that_went_on_without_a_trainer_names_it() -> None:
    """One that was killed here, one that was killed elsewhere, one that fell silent and still lives."""
    said = judge([*servers(0), *trainers(0, -9)], lost={2: "was killed by SIGTERM"})
    assert said == [
        "rank 1 on a was killed by SIGKILL; the others trained on without it",
        "rank 2 on b was killed by SIGTERM; the others trained on without it",
    ]
    said = judge([*servers(0, 0), *trainers(0, None)], ALONE, lost={1: "has fallen silent"})
    assert said == ["rank 1 has fallen silent, did not end and was killed; the others trained on without it"]


def test_a_trainer_that_fell_silent_and_came_back_is_not_spoken_of() -> None:
    """It ended well."""
    assert judge([*servers(0), *trainers(0, 0)], lost={1: "has fallen silent"}) == []


def test_a_host_whose_trainers_are_all_lost_ends_well_with_the_others() -> None:
    """Asynchronous training went on elsewhere, to its end: the host's server says so."""
    said = judge([*servers(0), *trainers(-9, -9)], lost={0: "was killed by SIGKILL", 1: "was killed by SIGKILL"})
    assert said == [f"rank {rank} on a was killed by SIGKILL; the others trained on without it" for rank in (0, 1)]


CASES: dict[str, tuple[list[Started], dict[str, Any], str]] = {
    "whom the servers name, elsewhere": (
        [*servers(1), *trainers(1, 1)],
        {"failed": ("rank 3", "this trainer was killed by SIGKILL, and ...")},
        "rank 3 on b: this trainer was killed by SIGKILL, and ...",
    ),
    "whom the servers name, here, and how it was": (
        [*servers(1), *trainers(1, -9)],
        {"failed": ("rank 1", "this trainer was killed, and so on")},
        "rank 1 on a: was killed by SIGKILL",
    ),
    "a stopped trainer that the servers name": (
        [*servers(1), process("trainer", 0, None, stopped=True)],
        {"failed": ("rank 0", "this trainer has fallen silent")},
        "rank 0 on a: was stopped and did not answer, until it was killed",
    ),
    "a host that was interrupted": (
        trainers(1, 1),
        {"failed": ("host b", "the launch was ended there")},
        "host b: the launch was ended there",
    ),
    "whom a trainer names, where servers are elsewhere": (
        trainers(4, 4),
        {"blamed": ("server 1", "has been silent for 30 s")},
        "server 1 on b: has been silent for 30 s",
    ),
    "who was killed here, before whom a trainer names": (
        trainers(4, -9),
        {"blamed": ("rank 1", "this trainer was killed by SIGKILL, and ...")},
        "rank 1 on a: was killed by SIGKILL",
    ),
    "a stopped server, before trainers that failed because of it": (
        [process("server", 0, None, stopped=True), *trainers(1, 1)],
        {},
        "server 0 on a: was stopped and did not answer, until it was killed",
    ),
    "who was killed, before who failed": ([*servers(0), *trainers(1, -9)], {}, "rank 1 on a: was killed by SIGKILL"),
    "who failed here": ([*servers(0), *trainers(0, 7)], {}, "rank 1 on a: ended with exit code 7"),
    "all trainers of a host without servers, who were killed": (trainers(-9, -15), {}, "rank 0 on a: was killed by SIGKILL"),
    "all trainers, who were killed": (
        [*servers(0, 0), *trainers(-9, -15, -9, -9)],
        {"placement": ALONE},
        "rank 0: was killed by SIGKILL",
    ),
    "a server that failed": ([*servers(3), *trainers(None, None)], {}, "server 0 on a: ended with exit code 3"),
    "a server that did not end": ([*servers(None), *trainers(0, 0)], {}, "server 0 on a: did not end"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_one_to_blame_is_named(case: str) -> None:
    """The first cause, not what followed from it."""
    processes, known, expected = CASES[case]
    with pytest.raises(WorkerFailed) as raised:
        judge(processes, **known)
    assert str(raised.value).startswith(expected)
    assert raised.value.hint


def test_a_trainer_that_hangs_beside_one_that_failed_is_told_of() -> None:
    """With its log: it was killed."""
    with pytest.raises(WorkerFailed, match=r"(?s)rank 0: ended with exit code 1.*rank 1 did not end at all: trainer1.log"):
        judge([*servers(0), *trainers(1, None)], ALONE)
