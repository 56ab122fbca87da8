"""``fleetbench launch --servers S --workers W``: a user's script on real processes, some of which are killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file
from server_desk import Clock

from fleetbench.errors import ConfigError, WorkerFailed
from real.processes.roles import role_of
from real.served_launching import launch_served

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
    restarts: int = 0,
) -> str:
    """Launch the script; trainer 0's output."""
    lines: list[bytes] = []
    arguments = [SCRIPT, *map(str, (k_steps, steps, folder, suicide, pause, tmp_path))]
    launch_served(servers, workers, arguments, log_dir=tmp_path / "log", restarts=restarts, echo=lines.append)
    return b"".join(lines).decode()


def weights(folder: Path) -> list[float]:
    """What the servers saved."""
    parts = [load_file(path)["parameters.0"] for path in sorted(folder.glob("shard-*"))]
    return [float(value) for part in parts for value in part]


@pytest.mark.slow
def test_a_script_trains_on_servers_and_trainers(tmp_path: Path) -> None:
    """Two servers and two trainers: logs lie where they belong, everybody knows who it is, and every gradient of both arrived."""
    text = run(tmp_path, 2, 2, 0, 40, folder=str(tmp_path / "saved"))
    assert "trainer 0 of 2" in text
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["serverlog.0", "serverlog.1", "workerlog.0", "workerlog.1"]
    assert "server 1 of 2" in (tmp_path / "log" / "serverlog.1").read_text()
    assert weights(tmp_path / "saved") == [-80.0] * 3
    assert {path.name for path in tmp_path.glob("done.*")} == {"done.0", "done.1"}


@pytest.mark.slow
def test_a_killed_trainer_does_not_end_asynchronous_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 1 kills itself at half time: the launcher and the server say so, and rank 0 trains to its end."""
    run(tmp_path, 1, 2, 0, 60, folder=str(tmp_path / "saved"), suicide=1, pause=0.01)
    assert (tmp_path / "done.0").exists()
    assert "rank 1 was killed by SIGKILL; the others trained on without it" in capfd.readouterr().err
    assert "trainer 1 is lost" in (tmp_path / "log" / "serverlog.0").read_text()
    (first, second, third) = weights(tmp_path / "saved")
    assert first == second == third
    assert -90 <= first <= -60


@pytest.mark.slow
def test_a_killed_trainer_ends_synchronous_training_by_name(tmp_path: Path) -> None:
    """Nobody can close a round without it: the launch fails and names rank 1, and rank 0 was told so by its server."""
    with pytest.raises(WorkerFailed, match="rank 1: was killed by SIGKILL"):
        run(tmp_path, 1, 2, -2, 60, suicide=1, pause=0.01)
    assert "rank 1: this trainer has ended" in (tmp_path / "log" / "workerlog.0").read_text()


@pytest.mark.slow
def test_a_stopped_trainer_does_not_end_asynchronous_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is stopped and answers nobody: servers drop it once it has been silent, rank 0 ends, and the launcher kills and names it."""
    monkeypatch.setenv("SERVED_SIGNAL", "SIGSTOP")
    monkeypatch.setenv("SERVED_TIMEOUT_S", "40")
    run(tmp_path, 1, 2, 0, 60, folder=str(tmp_path / "saved"), suicide=1, pause=0.01)
    assert (tmp_path / "done.0").exists()
    assert "rank 1 did not end and was killed; the others trained on without it" in capfd.readouterr().err
    assert "trainer 1 is lost" in (tmp_path / "log" / "serverlog.0").read_text()


def kill_server(tmp_path: Path, when: object) -> threading.Thread:
    """Kill server 0 once ``when`` comes true."""

    def kill() -> None:
        deadline = time.monotonic() + 60
        while not when() and time.monotonic() < deadline:  # type: ignore[operator]  # a condition
            time.sleep(0.02)
        for child in psutil.Process().children():
            try:
                if child.environ().get("TRAINING_ROLE") == "PSERVER" and str(tmp_path) in " ".join(child.cmdline()):
                    os.kill(child.pid, signal.SIGKILL)
                    return
            except psutil.Error:
                continue

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_killed_server_is_started_again_from_its_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Trainers go on with its next life; what was pushed behind the checkpoint is lost and counted, and nothing comes twice."""
    saved = tmp_path / "saved"
    killer = kill_server(tmp_path, lambda: any(saved.glob("shard-*.safetensors")) and time.sleep(0.5) is None)
    run(tmp_path, 1, 2, 0, 150, folder=str(saved), pause=0.02, restarts=1)
    killer.join()
    assert "server 0 was killed by SIGKILL, and is started again" in capfd.readouterr().err
    log = (tmp_path / "log" / "serverlog.0").read_text()
    assert "restored: True" in log
    told = "".join((tmp_path / "log" / f"workerlog.{rank}").read_text() for rank in (0, 1))
    assert told.count("server 0 has begun again from its checkpoint") >= 2
    (first, second, third) = weights(saved)
    assert first == second == third
    assert -300 <= first < -150
    assert {path.name for path in tmp_path.glob("done.*")} == {"done.0", "done.1"}


@pytest.mark.slow
def test_a_killed_server_ends_the_job_where_it_is_not_started_again(tmp_path: Path) -> None:
    """Without a restart the launch fails at once, names the server, and says how it might have gone on."""
    killer = kill_server(
        tmp_path, lambda: (tmp_path / "log" / "workerlog.0").exists() and "trainer 0" in (tmp_path / "log" / "workerlog.0").read_text()
    )
    with pytest.raises(WorkerFailed, match=r"(?s)server 0: was killed by SIGKILL.*--restart-servers"):
        run(tmp_path, 1, 1, 0, 1000, pause=0.02)
    killer.join()


ROLE = "import os, sys, time\nis_server = os.environ['TRAINING_ROLE'] == 'PSERVER'\n"


def run_text(tmp_path: Path, text: str, servers: int, workers: int) -> None:
    """Launch a script that needs nothing of this package."""
    script = tmp_path / "script.py"
    script.write_text(ROLE + text)
    launch_served(servers, workers, [str(script)], log_dir=tmp_path / "log", echo=lambda _text: None)


def test_a_server_that_ends_with_an_error_ends_the_job_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two servers finds its port taken; trainers, who would look for it for minutes, are ended, and the launch names the server."""
    monkeypatch.setattr("real.served_launching._GRACE_S", 0.2)
    text = """
port = os.environ['PADDLE_PSERVERS_IP_PORT_LIST'].rpartition(':')[2]
sys.exit(3) if is_server and os.environ['PADDLE_PORT'] == port else time.sleep(60)
"""
    with pytest.raises(WorkerFailed, match="server 1: ended with exit code 3"):
        run_text(tmp_path, text, 2, 1)


def test_a_server_may_take_long_to_write_its_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the launcher's clock it takes a minute after the last trainer's end; the launcher waits for it, and all is well."""
    clock = Clock()
    monkeypatch.setattr("real.served_launching.time", clock)
    begun = time.monotonic()

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        clock.now = 1000.0 + 60.0 * (time.monotonic() - begun)

    monkeypatch.setattr(clock, "sleep", sleep, raising=False)
    run_text(tmp_path, f"if is_server:\n    time.sleep(1)\n    open({str(tmp_path / 'saved')!r}, 'w').close()\n", 1, 1)
    assert (tmp_path / "saved").exists()


def test_a_trainer_may_work_on_behind_its_leave(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers have ended well long before rank 0 has evaluated; the launcher waits for it, and then kills rank 1, which is stopped."""
    monkeypatch.setattr("real.served_launching._GRACE_S", 0.2)
    text = f"""
import signal
if not is_server and os.environ['PADDLE_TRAINER_ID'] == '0':
    time.sleep(1.5)
    open({str(tmp_path / "evaluated")!r}, 'w').close()
elif not is_server:
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    run_text(tmp_path, text, 1, 2)
    assert (tmp_path / "evaluated").exists()
    assert "rank 1 did not end and was killed" in capfd.readouterr().err


@pytest.mark.slow
def test_a_launch_without_servers_or_trainers_is_refused(tmp_path: Path) -> None:
    """Both numbers are at least 1, and the script is a file."""
    with pytest.raises(ConfigError, match="--servers, --workers"):
        launch_served(0, 1, [SCRIPT], log_dir=tmp_path)
    with pytest.raises(ConfigError, match="no such script"):
        launch_served(1, 1, ["nowhere.py"], log_dir=tmp_path)


@pytest.mark.slow
def test_trainers_of_servers_need_not_find_each_other() -> None:
    """Paddle's variables without the trainers' endpoints make a role where there are servers, and only there."""
    shared = {"PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "2", "TRAINING_ROLE": "TRAINER"}
    role = role_of({**shared, "PADDLE_PSERVERS_IP_PORT_LIST": "a:1"})
    assert (role.kind, role.rank, role.trainers, role.servers, role.rendezvous) == ("trainer", 1, 2, ("a:1",), None)
    with pytest.raises(ConfigError, match="PADDLE_TRAINER_ENDPOINTS"):
        role_of(shared)
