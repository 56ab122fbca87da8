"""``fleetbench launch`` that is told to end lets its trainers end first; and a folder of logs is one launch's."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from fork_server import Forked
from processes import fork_command

from fleetbench.errors import EnvironmentLacks
from real.job.launcher import logs_in

BEGIN = """
import os, pathlib, signal, sys, time
told, folder, rank = [], pathlib.Path(sys.argv[1]), os.environ.get("RANK", "0")
signal.signal(signal.SIGTERM, lambda *_: told.append(time.monotonic()))
"""
SAVES = (
    BEGIN
    + """
(folder / f"ready{rank}").touch()
while not told: time.sleep(0.01)
time.sleep(4)
(folder / f"saved{rank}").touch()
print("saved after 4 s", flush=True)
"""
)
DEAF = BEGIN + "(folder / f'ready{rank}').touch()\nwhile True: time.sleep(0.1)\n"
LOADS = (
    BEGIN
    + """
pid = os.fork()
if not pid:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(600)
(folder / f"child{rank}").write_text(str(pid))
(folder / f"ready{rank}").touch()
while not told: time.sleep(0.01)
time.sleep(0.5)
(folder / f"ended{rank}").write_text(str(os.waitpid(pid, os.WNOHANG)[0]))
"""
)
SERVED = (
    BEGIN
    + """
import torch
from fleetbench import DistributedStrategy, fleet
fleet.init(DistributedStrategy(mode="ps", a_sync=True), timeout_s=60)
if fleet.is_server():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    fleet.init_server()
    fleet.run_server()
else:
    model = fleet.distributed_model(torch.nn.Linear(4, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fleet.init_worker()
    (folder / "ready0").touch()
    while not told:
        model(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()
    time.sleep(4)
    fleet.save_persistables(folder / "checkpoint")
    fleet.stop_worker()
"""
)


@contextmanager
def launched(text: str, folder: Path, *processes: str) -> Iterator[Forked]:
    """A launch of this script in its own process, once all its ranks are ready."""
    script = folder / "script.py"
    script.write_text(text)
    (folder / "tmp").mkdir()
    words = ["launch", *processes, "--log-dir", folder / "log", script, folder]
    launch = fork_command(words, folder / "out", folder / "tmp")
    num = int(processes[1]) if processes[0] == "--nproc" else 1
    try:
        while len(list(folder.glob("ready*"))) < num:
            assert launch.poll() is None, (folder / "out").read_text()
            time.sleep(0.01)
        yield launch
    finally:
        launch.kill()
        launch.wait()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_save_is_completed_before_the_launch_ends(how: signal.Signals, tmp_path: Path) -> None:
    """Its trainers hear of it, take four seconds, and are still shown; a second SIGTERM changes nothing."""
    with launched(SAVES, tmp_path, "--nproc", "2") as launch:
        os.kill(launch.pid, how)
        time.sleep(0.5)
        os.kill(launch.pid, signal.SIGTERM)
        assert launch.wait(60) == 130
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1"}
    out = (tmp_path / "out").read_text()
    assert out.endswith("saved after 4 s\ninterrupted: all trainers were stopped\n")


@pytest.mark.slow
def test_a_second_ctrl_c_ends_trainers_that_do_not_listen(tmp_path: Path) -> None:
    """The first leaves them their time."""
    with launched(DEAF, tmp_path, "--nproc", "1") as launch:
        (rank,) = psutil.Process(launch.pid).children()
        os.kill(launch.pid, signal.SIGINT)
        time.sleep(1)
        assert rank.is_running()
        begin = time.monotonic()
        os.kill(launch.pid, signal.SIGINT)
        assert launch.wait(60) == 130
        assert time.monotonic() - begin < 10
        assert not rank.is_running()


@pytest.mark.slow
def test_what_a_trainer_has_started_ends_after_it(tmp_path: Path) -> None:
    """Such as workers that load its data: it needs them for its last steps, and none is left over."""
    with launched(LOADS, tmp_path, "--nproc", "2") as launch:
        os.kill(launch.pid, signal.SIGTERM)
        assert launch.wait(60) == 130
    for rank in range(2):
        assert (tmp_path / f"ended{rank}").read_text() == "0"  # it still ran half a second later
        child = int((tmp_path / f"child{rank}").read_text())
        deadline = time.monotonic() + 5
        while psutil.pid_exists(child):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.slow
def test_servers_serve_trainers_that_were_told_to_end(tmp_path: Path) -> None:
    """They write the checkpoint that a trainer asks for before it leaves."""
    with launched(SERVED, tmp_path, "--servers", "1", "--workers", "1") as launch:
        os.kill(launch.pid, signal.SIGTERM)
        assert launch.wait(60) == 130, (tmp_path / "out").read_text()
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["shard-00000-of-00001.npz"]


@pytest.mark.slow
def test_a_launch_beside_another_needs_a_folder_of_its_own(tmp_path: Path) -> None:
    """It says so, and hurts no log of the first."""
    with launched(SAVES, tmp_path, "--nproc", "1") as first:
        script = tmp_path / "other.py"
        script.write_text("print('the second')\n")
        words = ["launch", "--nproc", "1", "--log-dir", tmp_path / "log", script]
        second = fork_command(words, tmp_path / "out2", tmp_path / "tmp")
        try:
            assert second.wait(60) == 3
        finally:
            second.kill()
            second.wait()
        assert "another launch writes its logs there" in (tmp_path / "out2").read_text()
        os.kill(first.pid, signal.SIGTERM)
        assert first.wait(60) == 130
    assert (tmp_path / "log" / "workerlog.0").read_text() == "saved after 4 s\n"


def test_two_launches_do_not_write_to_one_folder(tmp_path: Path) -> None:
    """The second is refused, and hurts no log; logs of a launch that has ended go."""
    names = ["workerlog.0", "workerlog.1"]
    with logs_in(tmp_path, names):
        (tmp_path / "workerlog.0").write_text("one")
        (tmp_path / "workerlog.7").write_text("one")
        with pytest.raises(EnvironmentLacks, match="another launch writes its logs there"), logs_in(tmp_path, names):
            raise AssertionError
    assert (tmp_path / "workerlog.0").read_text() == "one"
    with logs_in(tmp_path, names):
        assert (tmp_path / "workerlog.0").read_text() == ""
        assert not (tmp_path / "workerlog.7").exists()
