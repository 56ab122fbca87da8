"""A tuning whose driver is killed: the same command goes on, and what was measured before stands in its final table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_digits.py"
FILE = EXAMPLE.with_name("planted_gain.toml")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TUNE = ["-m", "fleetbench", "tune", "--set", "tune.pairs=2", "--set", "tune.trials=8", "--set", "tune.finalists=1"]
KILLED_BEHIND = 3
"""Legs that are on disk as the driver is killed."""


def _command(where: str, out: Path) -> list[str]:
    """A whole tuning, with its driver outside of the trainers, or one of them; or that of an experiment file."""
    tune = [*TUNE, "--set", "tune.leg_steps=20", "--out", str(out), "--"]
    if where == "file":
        return [sys.executable, *tune[:-1], str(FILE)]
    if where == "outside":
        return [sys.executable, *tune, *TORCHRUN, str(EXAMPLE)]
    return [*TORCHRUN, *tune, sys.executable, str(EXAMPLE)]


def _legs(out: Path) -> list[str]:
    """Runs of the legs that a tuning has kept so far, in the order in which they were run."""
    kept = [json.loads(path.read_text())["outcomes"] for path in out.glob("resume-*/evidence.json")]
    return [outcome["run"] for outcomes in kept for outcome in outcomes if "run" in outcome]


def _driver(job: subprocess.Popen[bytes], where: str) -> psutil.Process:
    """The process that drives."""
    own = psutil.Process(job.pid)
    if where != "inside":
        return own
    ranks = [child for child in own.children() if child.is_running() and child.environ().get("RANK") == "0"]
    assert len(ranks) == 1, ranks
    return ranks[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "where", [pytest.param("outside", marks=pytest.mark.whole), pytest.param("inside", marks=pytest.mark.whole), "file"]
)
def test_a_killed_tuning_ends_with_what_it_had_measured(where: str, tmp_path: Path) -> None:
    """Its legs stand in the final table as they were, the others are measured, and nothing of the first attempt is left."""
    with (tmp_path / "first").open("wb") as output:
        job = subprocess.Popen(_command(where, tmp_path / "runs"), stdout=output, stderr=subprocess.STDOUT)
    family: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 240.0
        while len(_legs(tmp_path / "runs")) < KILLED_BEHIND:
            assert job.poll() is None, (tmp_path / "first").read_text()
            assert time.monotonic() < deadline, (tmp_path / "first").read_text()
            time.sleep(0.02)
        family = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
        os.kill(_driver(job, where).pid, signal.SIGKILL)
        gone, alive = psutil.wait_procs(family[1:], timeout=40.0)
        assert job.wait(timeout=40.0) != 0
        assert gone
        assert not alive
    finally:
        for process in family:
            if process.is_running():
                process.kill()
        job.kill()
        job.wait()
    measured = _legs(tmp_path / "runs")
    assert len(measured) >= KILLED_BEHIND

    done = subprocess.run(_command(where, tmp_path / "runs"), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").glob("*-tune-*")
    found = json.loads((folder / "recommendation.json").read_text())
    final = [run for arm in found["arms"] for run in arm["measured_runs"]]
    assert set(measured) <= set(final) | {path.name for path in (folder / "runs").iterdir()}
    assert [run for run in final if run in measured], "the table has nothing of what was measured before"
    assert len(final) > len(measured)
    assert len(found["pairs"]) in (0, 2)  # none where no finalist was ahead of the default
    assert {arm["name"] for arm in found["arms"] if arm["measured_s"]} >= {"default", "candidate 1" if where == "file" else "advice"}
    assert not list((tmp_path / "runs").glob("resume-*"))
    assert not list((tmp_path / "runs").glob("fleetbench-*"))
