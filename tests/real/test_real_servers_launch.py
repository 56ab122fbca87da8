"""``fleetbench launch --servers S --workers W``: a user's script on real processes, some of which are killed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import ForkedLaunches

from fleetbench.errors import WorkerFailed
from real.job.launcher import logs_in
from real.job.served_launcher import launch_placed
from real.servers.hosts import Placement, on_this_machine

pytestmark = pytest.mark.usefixtures("forked_launches")
SCRIPT = str(Path(__file__).with_name("served_script.py"))


def run(
    tmp_path: Path,
    servers: int,
    workers: int,
    k_steps: int,
    steps: int,
    *,
    folder: str = "-",
    suicide: int = -1,
    pause: float = 0.0,
) -> str:
    """Launch the script; trainer 0's output."""
    lines: list[bytes] = []
    arguments = [SCRIPT, *map(str, (k_steps, steps, folder, suicide, pause, tmp_path))]
    launch_placed(on_this_machine(servers, workers), arguments, log_dir=tmp_path / "log", echo=lines.append)
    return b"".join(lines).decode()


def weights(folder: Path) -> list[float]:
    """What the servers saved."""
    parts = [np.load(path)["parameters.0"] for path in sorted(folder.glob("shard-*"))]
    return [float(value) for part in parts for value in part]


def test_a_script_trains_on_servers_and_trainers(tmp_path: Path) -> None:
    """Two servers and two trainers: logs lie where they belong, everybody knows who it is, and every gradient of both arrived."""
    text = run(tmp_path, 2, 2, 0, 40, folder=str(tmp_path / "saved"))
    assert "trainer 0 of 2" in text
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["serverlog.0", "serverlog.1", "workerlog.0", "workerlog.1"]
    assert "server 1 of 2" in (tmp_path / "log" / "serverlog.1").read_text()
    assert weights(tmp_path / "saved") == [-80.0] * 3
    assert {path.name for path in tmp_path.glob("done.*")} == {"done.0", "done.1"}


MODES = {"asynchronous": 0, "geo_sgd": 4, "synchronous": -2}


@pytest.mark.sample(2)
@pytest.mark.parametrize("k_steps", MODES.values(), ids=MODES)
def test_a_killed_trainer_ends_the_job_by_name(k_steps: int, tmp_path: Path) -> None:
    """Rank 1 kills itself at half time: the launch fails at once, names it, and leaves nothing; the last checkpoint is there."""
    begin = time.monotonic()
    with pytest.raises(WorkerFailed, match="rank 1: was killed by SIGKILL"):
        run(tmp_path, 1, 2, k_steps, 60, folder=str(tmp_path / "saved"), suicide=1, pause=0.02)
    assert time.monotonic() - begin < 20.0  # a quarter of the script's timeout
    assert not list(tmp_path.glob("done.*"))
    assert weights(tmp_path / "saved") != []


@pytest.mark.slow
def test_a_killed_job_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Launched again without the fault, it begins from what its server had written."""
    with pytest.raises(WorkerFailed, match="rank 1: was killed by SIGKILL"):
        run(tmp_path, 1, 2, 0, 60, folder=str(tmp_path / "saved"), suicide=1, pause=0.02)
    (before, *_) = weights(tmp_path / "saved")
    run(tmp_path, 1, 2, 0, 10, folder=str(tmp_path / "saved"))
    assert "restored: True" in (tmp_path / "log" / "serverlog.0").read_text()
    assert weights(tmp_path / "saved") == [before - 20.0] * 3


@pytest.mark.slow
@pytest.mark.parametrize("k_steps", MODES.values(), ids=MODES)
def test_a_stopped_trainer_ends_the_job_by_name(k_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is stopped and answers nobody: after a quarter of the timeout the server ends the job by its name."""
    monkeypatch.setenv("SERVED_SIGNAL", "SIGSTOP")
    monkeypatch.setenv("SERVED_TIMEOUT_S", "40")
    with pytest.raises(WorkerFailed, match="rank 1: was stopped and did not answer"):
        run(tmp_path, 1, 2, k_steps, 2000, suicide=1, pause=0.01)
    assert "rank 1: its connection has broken, or it was silent for 10 s" in (tmp_path / "log" / "serverlog.0").read_text()


def kill_server(forks: ForkedLaunches, when: object) -> threading.Thread:
    """Kill the server once ``when`` comes true."""

    def kill() -> None:
        deadline = time.monotonic() + 60
        while not when() and time.monotonic() < deadline:  # type: ignore[operator]  # a condition
            time.sleep(0.02)
        next(fork for fork, environment in forks.started if environment["TRAINING_ROLE"] == "PSERVER").kill()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


def test_a_killed_server_ends_the_job_by_name(tmp_path: Path, forked_launches: ForkedLaunches) -> None:
    """The launch fails at once and names the server, whose trainers end because of it."""
    log = tmp_path / "log" / "workerlog.0"
    killer = kill_server(forked_launches, lambda: log.exists() and "trainer 0" in log.read_text())
    with pytest.raises(WorkerFailed, match="server 0: was killed by SIGKILL"):
        run(tmp_path, 1, 1, 0, 1000, pause=0.02)
    killer.join()


ROLE = "import os, sys, time\nis_server = os.environ['TRAINING_ROLE'] == 'PSERVER'\n"


def run_text(tmp_path: Path, text: str, servers: int, workers: int) -> None:
    """Launch a script that needs nothing of this package."""
    script = tmp_path / "script.py"
    script.write_text(ROLE + text)
    launch_placed(on_this_machine(servers, workers), [str(script)], log_dir=tmp_path / "log", echo=lambda _text: None)


def test_a_server_that_ends_with_an_error_ends_the_job_by_name(tmp_path: Path) -> None:
    """One of two servers finds its port taken; trainers, who would look for it for minutes, are ended, and the launch names the server."""
    text = """
port = os.environ['PADDLE_PSERVERS_IP_PORT_LIST'].rpartition(':')[2]
sys.exit(3) if is_server and os.environ['PADDLE_PORT'] == port else time.sleep(60)
"""
    with pytest.raises(WorkerFailed, match="server 1: ended with exit code 3"):
        run_text(tmp_path, text, 2, 1)


def test_a_trainer_may_work_on_behind_its_leave(tmp_path: Path) -> None:
    """The servers and rank 1 have ended well long before rank 0 has evaluated; the launcher waits for it."""
    text = f"""
if not is_server and os.environ['PADDLE_TRAINER_ID'] == '0':
    time.sleep(1.5)
    open({str(tmp_path / "evaluated")!r}, 'w').close()
"""
    run_text(tmp_path, text, 1, 2)
    assert (tmp_path / "evaluated").exists()


@pytest.mark.timeout(60)
def test_a_trainer_that_returns_before_it_has_joined_ends_the_launch_by_name(tmp_path: Path) -> None:
    """Rank 1 finds nothing to do and ends with code 0: the others do not wait for it until their timeout."""
    script = tmp_path / "script.py"
    text = Path(SCRIPT).read_text(encoding="utf-8")
    script.write_text(text.replace("    fleet.init_worker()", "    if fleet.worker_index():\n        sys.exit()\n    fleet.init_worker()"))
    arguments = [str(script), *map(str, (0, 5, tmp_path / "saved", -1, 0.0, tmp_path))]
    with pytest.raises(WorkerFailed, match=r"rank 1: ends without fleet\.stop_worker\(\)"):
        launch_placed(on_this_machine(1, 2), arguments, log_dir=tmp_path / "log", echo=lambda _text: None)


@pytest.mark.timeout(90)
def test_synchronous_training_does_not_go_on_without_a_trainer_that_ended_in_the_middle(tmp_path: Path) -> None:
    """Rank 1 calls ``sys.exit()``, which is exit code 0, at its third step: the job ends with an error that names it."""
    script = tmp_path / "script.py"
    text = Path(SCRIPT).read_text(encoding="utf-8")
    script.write_text(
        text.replace(
            "        optimizer.zero_grad()",
            "        if step == 2 and fleet.worker_index():\n            sys.exit()\n        optimizer.zero_grad()",
        )
    )
    arguments = [str(script), *map(str, (-1, 20, "-", -1, 0.0, tmp_path))]
    with pytest.raises(WorkerFailed, match=r"rank 1: ends without fleet\.stop_worker\(\)"):
        launch_placed(on_this_machine(1, 2), arguments, log_dir=tmp_path / "log", echo=lambda _text: None)
    assert "rank 1: ends without fleet.stop_worker(), and the job with it" in (tmp_path / "log" / "workerlog.1").read_text()


def spread(**parts: Any) -> Placement:
    """A job over several hosts, of which this machine is the loopback."""
    return Placement(**{"own": frozenset(["127.0.0.1"]), **parts})


def launch_here(tmp_path: Path, placement: Placement, text: str, monkeypatch: pytest.MonkeyPatch, startup_timeout_s: float = 1.0) -> None:
    """This machine's part of it, for which its own loopback will do."""
    monkeypatch.setattr("real.job.served_launcher.require_addresses", lambda _: None)
    script = tmp_path / "script.py"
    script.write_text(ROLE + text)
    launch_placed(placement, [str(script)], log_dir=tmp_path / "log", startup_timeout_s=startup_timeout_s, echo=lambda _text: None)


@pytest.mark.timeout(30)
def test_a_trainer_names_the_server_of_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended it stands in its note."""
    text = """
from real.processes.diagnosis import note_failure
note_failure("server 0", "its connection has broken")
note_failure("server 1", "later")
sys.exit(1)
"""
    with pytest.raises(WorkerFailed, match=r"server 0 on 10\.0\.0\.9: its connection has broken"):
        launch_here(tmp_path, spread(endpoints=("10.0.0.9:1",), workers=("127.0.0.1",)), text, monkeypatch)


def test_a_host_removes_its_own_logs_alone(tmp_path: Path) -> None:
    """On a shared disk others write theirs."""
    for name in ("serverlog.0", "serverlog.1", "serverlog.5", "workerlog.0", "workerlog.1", "workerlog.9"):
        (tmp_path / name).write_text("old")
    with logs_in(tmp_path, ["workerlog.1", "serverlog.0"], is_spread=True):
        kept = {path.name for path in tmp_path.iterdir() if path.read_text() == "old"}
    assert kept == {"serverlog.1", "serverlog.5", "workerlog.0", "workerlog.9"}
    assert not (tmp_path / "serverlog.0").exists()
