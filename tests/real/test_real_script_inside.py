"""The driver inside: every process of the job was started by somebody else, and rank 0 drives."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from real.processes.roles import STORE
from real.script import inside

JOB = Path(__file__).with_name("inside_job.py")


@pytest.mark.timeout(300)
def test_a_job_under_plain_torchrun_runs_legs(tmp_path: Path) -> None:
    """One launch of torchrun carries legs, a leg whose trainer is killed again, and a leg from the initial parameters; nothing stays."""
    notes = tmp_path / "notes"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(JOB),
        str(tmp_path / "runs"),
        str(notes),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert (found["trainers"], found["trainers_per_node"]) == (2, 2)
    assert found["hosts"] == [socket.gethostname()] * 2
    assert found["steps"] == [[[0, 10], [1, 10]], [[0, 12], [1, 12]], [[0, 8], [1, 8]]]
    assert found["strategies"] == [32.0, 1.0, 1.0]
    assert sorted(notes.read_text().splitlines()) == ["0 of 2"] * 3 + ["1 of 2"] * 3
    assert list((tmp_path / "runs").iterdir()) == []


def test_one_process_drives_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher of one process has no others to serve; nor has a process that nobody launched."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PADDLE_TRAINER_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert inside.role_inside() is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert inside.role_inside() is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    role = inside.role_inside()
    assert role is not None
    assert role.trainers == 2


def test_trainers_of_a_launch_meet_in_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever started the job, its trainers are told torchrun's variables and a file; from outside nothing is told."""
    slurm = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_STEP_NODELIST": "a,b",
    }
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RANK", raising=False)
    assert inside.trainer_environment(tmp_path / "1") == {}
    monkeypatch.setenv(inside.SHARED, str(tmp_path))
    told = inside.trainer_environment(tmp_path / "1")
    assert told == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        STORE: str(tmp_path / "1" / "store"),
        "FLEETBENCH_PARENT": str(os.getpid()),
    }
