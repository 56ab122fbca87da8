"""A whole tuning in which somebody is killed at every place: it says who and by what, leaves nothing, and ends with a whole table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

SCRIPT = Path(__file__).parents[1] / "real" / "struck_tuning.py"
PLACES = {"start", "averaging", "save", "bucket", "change"}
BY = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "launch": [sys.executable, "-m", "fleetbench", "launch", "--nproc", "2", "--log-dir", "log"],
}
TUNE = [sys.executable, "-m", "fleetbench", "tune", "--set", "tune.pairs=2", "--set", "tune.trials=8", "--set", "tune.finalists=1"]
SAYS = {
    ("worker", "torchrun"): "rank 1 was killed by SIGKILL at step ",
    ("worker", "launch"): "rank 1 was killed by SIGKILL at step ",
    ("agent", "torchrun"): "the command was killed by SIGKILL",
    ("agent", "launch"): "the command was killed by SIGKILL",
}
SAMPLE = (("worker", "torchrun"),)


def _processes(marks: Path) -> list[psutil.Process]:
    """Trainers, and what started them: those with that folder in their command line."""
    return [process for process in psutil.process_iter(["cmdline"]) if str(marks) in (process.info["cmdline"] or ())]


def _tune(folder: Path, victim: str, by: str) -> subprocess.CompletedProcess[str]:
    """One attempt at the tuning, whose trainers and launchers are gone when this returns."""
    temporary = folder / "tmp"
    for path in (folder / "marks", temporary):
        path.mkdir(exist_ok=True)
    script = [str(SCRIPT), victim, str(folder / "runs"), str(folder / "marks")]
    command = [*TUNE, "--set", "tune.leg_steps=20", "--out", str(folder / "runs"), "--", *BY[by], *script]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False)
    deadline = time.monotonic() + 30.0
    while left := _processes(folder / "marks"):
        assert time.monotonic() < deadline, f"left over: {[process.cmdline() for process in left]}"
        time.sleep(0.05)
    assert len(list(temporary.glob("fleetbench-*"))) == (done.returncode == -9), "a killed driver's goes with the next start"
    return done


def _struck(folder: Path) -> set[str]:
    """The places at which somebody was killed."""
    return PLACES & {path.name for path in (folder / "marks").iterdir()}


def _legs(folder: Path) -> set[str]:
    """Runs that a tuning has kept so far."""
    kept = [json.loads(path.read_text())["outcomes"] for path in folder.glob("runs/resume-*/evidence.json")]
    return {outcome["run"] for outcomes in kept for outcome in outcomes if "run" in outcome}


def _found(folder: Path, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The recommendation, in which every arm has all of its legs, as if nothing had happened; nothing else of the tuning is left."""
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "runs").glob("*-tune-*/recommendation.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert [arm.get("rejected") for arm in found["arms"]] == [None] * len(found["arms"])
    (default, *others) = (len(arm["measured_s"]) for arm in found["arms"])
    assert others == [2] * len(others)
    assert default in range(2, 2 * len(others) + 1, 2)  # again beside each arm that the first legs named
    own, *compared = (arm["measured_runs"][len(arm["measured_s"]) :] for arm in found["arms"])  # after the legs that rank the arms
    assert {len(legs) for legs in compared} <= {0, 2}  # another is compared after one that gains nothing
    assert len(own) == sum(map(len, compared))
    finalist = [legs for arm, legs in zip(found["arms"][1:], compared, strict=True) if arm["name"] == found.get("finalist")]
    assert [len(legs) for legs in finalist] == ([2] if own else [])
    runs = [run for arm in found["arms"] for run in arm["measured_runs"]]
    assert len(set(runs)) == len(runs)
    void = {run for arm in found["arms"] for run in arm.get("void_runs", ())}
    beside = [own[first : first + 2] for first in range(0, len(own), 2)]  # one of these pairs of legs is beside the finalist's
    counted = {sum(void.isdisjoint(pair) for pair in zip(legs, finalist[0], strict=True)) for legs in beside}
    assert len(found["pairs"]) in (counted or {0})
    assert not list((folder / "runs").glob("resume-*"))
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("victim", "by"), [pytest.param(*one, marks=() if one in SAMPLE else pytest.mark.whole) for one in SAYS])
def test_a_killed_worker_or_agent_costs_a_leg_each_time(victim: str, by: str, tmp_path: Path) -> None:
    """At the start, in an averaging, a save, a bucket and a change of legs: the leg is run again, and a note has rank and signal."""
    found = _found(tmp_path, _tune(tmp_path, victim, by))
    assert _struck(tmp_path) == PLACES
    broken = [note for note in found["notes"] if note.startswith("a launch broke, and its leg was run again by another: ")]
    assert [note.partition(": ")[2].startswith(SAYS[victim, by]) for note in broken] == [True] * len(PLACES), broken


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_a_killed_driver_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed at the same places, one attempt after another: each goes on with what the one before has kept, and the last has it all."""
    kept: set[str] = set()
    for _ in PLACES:
        done = _tune(tmp_path, "driver", "torchrun")
        assert done.returncode == -9, done.stderr
        assert kept <= _legs(tmp_path)
        kept = _legs(tmp_path)
    assert _struck(tmp_path) == PLACES
    assert len(kept) == 2
    found = _found(tmp_path, _tune(tmp_path, "driver", "torchrun"))
    assert kept <= {run for arm in found["arms"] for run in arm["measured_runs"]}
    assert "before an interruption it had run 2 legs" in found["notes"][-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_where_nobody_is_struck_nothing_is_noted(tmp_path: Path) -> None:
    """The same script in peace: the table is as whole, and who asserts that somebody was struck fails."""
    found = _found(tmp_path, _tune(tmp_path, "nobody", "torchrun"))
    assert _struck(tmp_path) == set()
    assert not [note for note in found["notes"] if "broke" in note or "interruption" in note]
