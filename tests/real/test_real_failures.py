"""A failure on one rank reaches the others within seconds, by rank and message, and no rank that lost its peers ends with success."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from processes import run_python

from fleetbench.errors import WorkerFailed
from real.job.folder import Beat
from real.job.launcher import launch_script
from real.processes import failures
from real.processes.diagnosis import NOTE_PATH, Failure, RankError, Suspect, diagnose, read_note
from real.processes.failures import CollectiveFailed, Failures, is_of_peers, leave_without_success

RANKS = Path(__file__).with_name("failing_ranks.py")
CASES = (
    *("no_fault", "raised", "refused", "exited", "far_apart", "swallowed", "slow_save"),
    *("preempted", "late_evaluation", "left_early"),
)
SOON_S = 35.0
"""By then every rank has ended: all start at the same time on two cores, and the timeout of a collective is 120 s."""
ODD = "ValueError: the third layer is odd"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """How both ranks of every case ended."""
    folder = tmp_path_factory.mktemp("failures")
    done = run_python([RANKS, folder, folder / "ended.json", *CASES], folder)
    assert done.code == 0, done.out
    found: dict[str, list[dict[str, Any]]] = json.loads((folder / "ended.json").read_text(encoding="utf-8"))
    for case in CASES:
        found[case][0]["note"] = read_note(folder / case / "note")
    return found


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("case", ["no_fault", "slow_save", "late_evaluation"])
def test_without_a_failure_both_ranks_end_well(ended: dict[str, list[dict[str, Any]]], case: str) -> None:
    """Also where a save, or what one rank does alone at the end, takes longer than the timeout, while that rank answers."""
    assert [rank["code"] for rank in ended[case]] == [0, 0], ended[case]
    assert ended[case][0]["note"] is None


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("raised", f"failed at step 2: {ODD}"),
        ("refused", "failed at step 3: ConfigError: parameters first.bias, first.weight: got no gradient in this step"),
        ("exited", "has ended while others still train: its script left early, as by sys.exit, or had fewer batches"),
        ("far_apart", f"failed at step 2: {ODD}"),
    ],
)
def test_a_failure_reaches_the_other_rank(ended: dict[str, list[dict[str, Any]]], case: str, says: str) -> None:
    """Although nobody launched them, the failed one lives on, or the other meets nobody; its launcher could read who it was."""
    found = ended[case]
    lives_on = case not in ("exited", "far_apart")
    assert all(rank["code"] > 0 and rank["after_s"] < SOON_S for rank in (found[:1] if lives_on else found))
    assert f"because rank 1 {says}" in found[0]["text"]
    note = found[0]["note"]
    assert note.name == "rank 1"
    assert note.says.startswith(says)


def test_ranks_that_leave_together_keep_their_exit_code(ended: dict[str, list[dict[str, Any]]]) -> None:
    """What ``sys.exit`` was given, as where a job was told to make room."""
    assert [rank["code"] for rank in ended["preempted"]] == [85, 85]


def test_a_rank_that_left_early_is_named_and_does_not_end_well(ended: dict[str, list[dict[str, Any]]]) -> None:
    """Also where its script has destroyed the process group before."""
    assert all(rank["code"] > 0 for rank in ended["left_early"]), ended["left_early"]
    assert "rank 1 has ended while others still train" in ended["left_early"][0]["text"]


def test_no_rank_whose_collective_broke_ends_with_success(ended: dict[str, list[dict[str, Any]]]) -> None:
    """Although the script takes the error for nothing, and both ranks come to its end."""
    assert all(rank["code"] not in (0, -signal.SIGKILL) for rank in ended["swallowed"]), ended["swallowed"]
    assert "rank 0 lost the others at step 3: " in ended["swallowed"][0]["text"]


@pytest.mark.usefixtures("forked_launches")
def test_a_launch_says_what_the_rank_said(tmp_path: Path) -> None:
    """Exit code 4, the rank and its message, and its traceback last; rank 0's log says the same."""
    script = tmp_path / "fails.py"
    script.write_text(
        "import torch\nfrom fleetbench import fleet\nfleet.init()\nmodel = fleet.distributed_model(torch.nn.Linear(4, 1))\n"
        "optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "for step in range(9):\n    if step == 3 and fleet.worker_index() == 1: raise ValueError('the third layer is odd')\n"
        "    model(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
    )
    shown: list[bytes] = []
    with pytest.raises(WorkerFailed, match=f"rank 1: failed at step 3: {ODD}") as caught:
        launch_script(2, [str(script)], log_dir=tmp_path / "log", echo=shown.append)
    last = shown[-1].decode()
    assert last.startswith(f"from {tmp_path / 'log' / 'workerlog.1'}:\nTraceback (most recent call last):\n")
    assert "if step == 3 and fleet.worker_index() == 1" in last
    assert ODD in last
    assert caught.value.exit_code == 4
    assert f"rank 1 failed at step 3: {ODD}" in (tmp_path / "log" / "workerlog.0").read_text()


def test_a_rank_with_an_error_of_its_own_is_named_and_not_one_that_repeats_it() -> None:
    """In a tuning each rank reports what ended it, and the others' collectives say what the failed rank has said."""
    text = "RuntimeError: can't allocate memory"
    errors = {
        0: RankError(f"CollectiveFailed: rank 1 failed at step 3: {text}", collective=True, time_ns=1),
        1: RankError(text, collective=False, time_ns=2),
    }
    found = diagnose({}, errors, [Beat(11, 0, 3, 1), Beat(12, 0, 3, 1)], 3, "log")
    assert (found.where, found.what) == ("rank 1", f"failed at step 3: {text}")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Failures]]:
    """Three ranks of one job in this process, none of which watches yet; none leaves it, but watches no more where it would."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(failures, "leave_without_success", lambda: None)
    monkeypatch.setattr(Failures, "grace_s", 0.1)
    store = dist.HashStore()  # type: ignore[attr-defined]  # missing from __all__ only
    monkeypatch.setenv(NOTE_PATH, str(tmp_path / "note"))
    made = [Failures(store, rank, 3, step=lambda: 7) for rank in range(3)]
    yield made
    for one in made:
        one.end()


def _until(happens: Any) -> None:
    deadline = time.monotonic() + 10
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_all_ranks_hear_of_the_first_failure(ranks: list[Failures], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second rank to fail did so for the first one's sake; each says so, and leaves after its grace; their launcher reads it."""
    for one in ranks:
        one.start()
    ranks[1].announce(ValueError("odd"))
    ranks[2].announce(ValueError("even"))
    _until(lambda: not any(one._thread.is_alive() for one in (ranks[0], ranks[2])))
    expected = Failure(rank=1, what="failed at step 7: ValueError: odd")
    assert [one.failure for one in ranks] == [expected] * 3
    assert read_note(tmp_path / "note") == Suspect(name="rank 1", says=expected.what)
    assert "rank 2 ends, because rank 1 failed at step 7: ValueError: odd" in capsys.readouterr().err


def test_who_does_not_answer_is_named(ranks: list[Failures]) -> None:
    """A collective broke, and rank 2 watches no more; a rank's own failure, told late, goes before that."""
    for one in ranks[:2]:
        one.grace_s = 60.0
        one.start()
    with pytest.raises(CollectiveFailed, match="rank 2 does not answer"), ranks[0].broken():
        raise RuntimeError("closed")
    assert ranks[0].has_failed
    ranks[2].announce(ValueError("odd"))
    _until(lambda: ranks[1].failure == Failure(rank=2, what="failed at step 7: ValueError: odd"))


def test_a_rank_that_waits_for_one_that_never_joins_is_not_to_blame(tmp_path: Path) -> None:
    """What torch's store in a file says then tells of another rank."""
    store = dist.FileStore(str(tmp_path / "store"), 2)  # type: ignore[attr-defined]  # missing from __all__ only
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(RuntimeError) as caught:
        dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=timedelta(seconds=0.1))
    assert is_of_peers(caught.value)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("hangs", [False, True])
def test_on_nccl_communicators_are_aborted_before_the_process_leaves(monkeypatch: pytest.MonkeyPatch, backend: str, hangs: bool) -> None:
    """Not destroyed, and an abort that hangs does not keep the process; on gloo there is nothing to abort."""
    calls: list[str] = []

    def abort() -> None:
        calls.append("abort")
        if hangs:
            time.sleep(0.3)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: {"nccl": "cpu:gloo,cuda:nccl", "gloo": "cpu:gloo"}[backend])
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroy"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", abort)
    monkeypatch.setattr(os, "_exit", lambda code: calls.append(f"exit {code}"))
    leave_without_success(0.1)
    assert calls == (["abort", "exit 4"] if backend == "nccl" else ["exit 4"])
    time.sleep(0.4 * hangs)  # for the thread
