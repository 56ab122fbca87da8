"""The driver inside: every process of the job was started by somebody else, and rank 0 drives."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fleetbench.errors import EnvironmentLacks
from real.job import inside
from real.job.folder import DriverSide
from real.processes.place import make_folder
from real.processes.roles import Role

JOB = Path(__file__).with_name("inside_job.py")
ENDLESS = Path(__file__).with_name("endless_script.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def _await(folder: Path, job: subprocess.Popen[bytes]) -> dict[str, list[int]]:
    """Process numbers of the trainers, once both train, and of those who started them."""
    deadline = time.monotonic() + 90.0
    files = [folder / f"pid.{rank}" for rank in range(2)]
    while not all(file.exists() for file in files):
        assert job.poll() is None, "the job has ended"
        assert time.monotonic() < deadline, "the trainers did not begin"
        time.sleep(0.05)
    numbers = [[int(text) for text in file.read_text().split()] for file in files]
    return {"trainers": [pid for pid, _ in numbers], "drivers": [parent for _, parent in numbers]}


def _await_end(pids: list[int], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while living := [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, f"left over: {living}"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_under_plain_torchrun_runs_legs(tmp_path: Path) -> None:
    """One launch of torchrun carries legs, a leg whose trainer is killed again, and a leg from the initial parameters; nothing stays."""
    notes = tmp_path / "notes"
    command = [*TORCHRUN, str(JOB), str(tmp_path / "runs"), str(notes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert (found["trainers"], found["trainers_per_node"]) == (2, 2)
    assert found["hosts"] == [socket.gethostname()] * 2
    assert found["steps"] == [[[0, 10], [1, 10]], [[0, 12], [1, 12]], [[0, 8], [1, 8]]]
    assert found["strategies"] == [32.0, 1.0, 1.0]
    assert sorted(notes.read_text().splitlines()) == ["0 of 2, false"] * 3 + ["1 of 2, false"] * 3
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["driver", *(pytest.param(other, marks=pytest.mark.whole) for other in ("server", "agent", "job"))])
def test_a_job_that_is_struck_leaves_nothing(victim: str, tmp_path: Path) -> None:
    """Whoever is killed, or the whole job told to end: all end, the folder goes, and torchrun names rank and signal."""
    command = [*TORCHRUN, "-m", "fleetbench", "profile", "--out", str(tmp_path / "runs"), "--"]
    command += [sys.executable, str(ENDLESS), str(tmp_path)]
    with (tmp_path / "output").open("wb") as output:
        job = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        found = _await(tmp_path, job)
        pid = {"driver": found["drivers"][0], "server": found["drivers"][1]}.get(victim, job.pid)
        os.kill(pid, signal.SIGTERM if victim == "job" else signal.SIGKILL)
        _await_end([job.pid, *found["drivers"], *found["trainers"]], 40.0)
    finally:
        job.kill()
        job.wait()
    text = (tmp_path / "output").read_text()
    if victim in ("driver", "server"):
        assert re.search(rf"rank\s*: {0 if victim == 'driver' else 1} .*\n\s*exitcode\s*: -9", text), text
    assert list((tmp_path / "runs").iterdir()) == []


FAILS = """
import os, sys
import torch
from fleetbench import fleet
rank = os.environ["RANK"]
print("said by", rank, flush=True)
if rank == "1" and sys.argv[1] == "exit":
    os._exit(7)
fleet.init(timeout_s=30)
model = fleet.distributed_model(torch.nn.Linear(4, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
for step in range(20):
    if rank == "1" and step == 5:
        os.kill(os.getpid(), 9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        pytest.param("exit", "ended with exit code 7 at step 0", marks=pytest.mark.whole),
        ("kill", "was killed by SIGKILL at step "),
    ],
)
def test_a_lasting_failure_is_named_and_explained(how: str, said: str, tmp_path: Path) -> None:
    """A trainer that fails in every launch: its rank, and how it ended, at once; the hint's folder holds each rank's output."""
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    began = time.monotonic()
    command = [*TORCHRUN, "-m", "fleetbench", "profile", "--out", str(tmp_path / "runs"), "--", sys.executable, str(script), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 1
    assert f"error: rank 1: {said}" in done.stderr, done.stderr
    assert time.monotonic() - began < 90.0
    (log,) = [path for path in (tmp_path / "runs").glob("fleetbench-*/*/*/rank1.log") if str(path.parent) in done.stderr]
    assert log.read_text().startswith("said by 1")
    make_folder(tmp_path / "runs")
    assert log.exists(), "a later start removes it"


ROLE = Role(launcher="torchrun", rank=3, trainers=4, local_rank=1, trainers_per_node=2)


def test_a_program_that_a_node_lacks_is_named_with_its_rank(tmp_path: Path) -> None:
    """The others may have it."""
    driver = DriverSide(tmp_path / "1")
    driver.make()
    watch: Any = SimpleNamespace(must_end=lambda: False)
    with pytest.raises(EnvironmentLacks, match=r"rank 3.*no-such-program"):
        inside._train(ROLE, ["no-such-program"], {}, driver.path, watch)
