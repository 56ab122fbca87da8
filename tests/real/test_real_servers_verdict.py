"""Who is named for a job with servers that did not end well, and what is said of one that did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from fleetbench.errors import WorkerFailed
from real.job.served_launcher import ServedJob
from real.processes.started import Started
from real.servers.board import Entry
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
    elsewhere: Mapping[str, int] | None = None,
    lost: Mapping[int, str] | None = None,
    failed: tuple[str, str] | None = None,
    gone: Sequence[str] = (),
) -> list[str]:
    """What a launcher says that has these processes, and has read the rest. Servers of other hosts have ended well."""
    job = ServedJob(placement, None)
    job.processes = list(processes)
    job.codes = {f"server {number}": 0 for number in range(2) if placement.places[f"server {number}"] not in (*placement.own, *gone)}
    job.codes |= {process.name: process.code for process in processes if process.code is not None} | dict(elsewhere or {})
    job.lost = {f"rank {rank}": Entry(kind="lost", name=f"rank {rank}", why=why) for rank, why in (lost or {}).items()}
    job.failure = None if failed is None else Entry(kind="failed", name=failed[0], why=failed[1])
    job.gone = set(gone)
    return job.judge()


def test_a_job_that_ended_well_is_not_spoken_of() -> None:
    """Here, and on a host that has servers alone or trainers alone."""
    assert judge([*servers(0, 0), *trainers(0, 0, 0, 0)], ALONE) == []
    assert judge(servers(0)) == []
    assert judge([*servers(0), *trainers(0, 0)]) == []


def test_a_job_that_went_on_without_a_trainer_names_it() -> None:
    """One that was killed here, one that was killed elsewhere, one that fell silent and still lives."""
    said = judge([*servers(0), *trainers(0, -9)], elsewhere={"rank 2": -15}, lost={2: "was killed by SIGTERM"})
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
    """Asynchronous training went on elsewhere, to its end."""
    said = judge([*servers(0), *trainers(-9, -9)], lost={0: "was killed by SIGKILL", 1: "was killed by SIGKILL"})
    assert said == [f"rank {rank} on a was killed by SIGKILL; the others trained on without it" for rank in (0, 1)]


CASES: dict[str, tuple[list[Started], dict[str, Any], str]] = {
    "whom the servers name, elsewhere": (
        [*servers(1), *trainers(1, 1)],
        {"failed": ("rank 3", "this trainer was killed by SIGKILL, and ..."), "elsewhere": {"rank 3": -9}},
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
    "a server whose launcher is gone, before trainers that failed because of it": (
        [*servers(0), *trainers(1, -9)],
        {"gone": ["b"]},
        "server 1 on b: has not answered at b:2, nor has its launcher",
    ),
    "a stopped server, before trainers that failed because of it": (
        [process("server", 0, None, stopped=True), *trainers(1, 1)],
        {},
        "server 0 on a: was stopped and did not answer, until it was killed",
    ),
    "who was killed, before who failed": ([*servers(0), *trainers(1, -9)], {}, "rank 1 on a: was killed by SIGKILL"),
    "who failed here": ([*servers(0), *trainers(0, 7)], {}, "rank 1 on a: ended with exit code 7"),
    "who failed elsewhere": (servers(0), {"elsewhere": {"rank 2": 7}}, "rank 2 on b: ended with exit code 7"),
    "all trainers, who were killed": (
        [*servers(0), *trainers(-9, -15)],
        {"elsewhere": {"rank 2": -9, "rank 3": -9}},
        "rank 0 on a: was killed by SIGKILL",
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
