"""``fleetbench launch --servers S --workers W``: a user's script on real processes, some of which are killed."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
from processes import ForkedLaunches
from safetensors.numpy import load_file
from server_desk import Clock

from fleetbench.errors import ConfigError, WorkerFailed
from real.job.launcher import logs_in
from real.job.served_launcher import launch_placed
from real.processes.roles import role_of
from real.servers.board import Entry
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
    restarts: int = 0,
) -> str:
    """Launch the script; trainer 0's output."""
    lines: list[bytes] = []
    arguments = [SCRIPT, *map(str, (k_steps, steps, folder, suicide, pause, tmp_path))]
    launch_placed(on_this_machine(servers, workers), arguments, log_dir=tmp_path / "log", restarts=restarts, echo=lines.append)
    return b"".join(lines).decode()


def weights(folder: Path) -> list[float]:
    """What the servers saved."""
    parts = [load_file(path)["parameters.0"] for path in sorted(folder.glob("shard-*"))]
    return [float(value) for part in parts for value in part]


def test_a_script_trains_on_servers_and_trainers(tmp_path: Path) -> None:
    """Two servers and two trainers: logs lie where they belong, everybody knows who it is, and every gradient of both arrived."""
    text = run(tmp_path, 2, 2, 0, 40, folder=str(tmp_path / "saved"))
    assert "trainer 0 of 2" in text
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["serverlog.0", "serverlog.1", "workerlog.0", "workerlog.1"]
    assert "server 1 of 2" in (tmp_path / "log" / "serverlog.1").read_text()
    assert weights(tmp_path / "saved") == [-80.0] * 3
    assert {path.name for path in tmp_path.glob("done.*")} == {"done.0", "done.1"}


def test_a_script_trains_by_geo_sgd(tmp_path: Path) -> None:
    """Two trainers count down by 40 each: servers have that of both but for the last rests, and a trainer all of its own."""
    text = run(tmp_path, 2, 2, 4, 40, folder=str(tmp_path / "saved"), pause=0.01)
    first, second, third = weights(tmp_path / "saved")
    assert first == second == third
    assert -80.0 < first < -60.0
    (own,) = re.findall(r"weight \[(-[0-9.]+), \1, \1\]", text)
    assert -80.0 <= float(own) <= -40.0


@pytest.mark.parametrize("k_steps", [0, 4], ids=["asynchronous", "geo_sgd"])
def test_a_killed_trainer_does_not_end_asynchronous_training(k_steps: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 1 kills itself at half time: the launcher and the server say so, and rank 0 trains to its end."""
    run(tmp_path, 1, 2, k_steps, 60, folder=str(tmp_path / "saved"), suicide=1, pause=0.01)
    assert (tmp_path / "done.0").exists()
    assert "rank 1 was killed by SIGKILL; the others trained on without it" in capfd.readouterr().err
    assert "trainer 1 is lost" in (tmp_path / "log" / "serverlog.0").read_text()
    (first, second, third) = weights(tmp_path / "saved")
    assert first == second == third
    assert -90 <= first <= (-50 if k_steps else -60)


@pytest.mark.slow
def test_a_stopped_trainer_ends_synchronous_training_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is stopped and answers nobody: once it has been silent, the server ends the job by its name, and rank 0 was told so."""
    monkeypatch.setenv("SERVED_SIGNAL", "SIGSTOP")
    monkeypatch.setenv("SERVED_TIMEOUT_S", "40")
    with pytest.raises(WorkerFailed, match="rank 1: was stopped and did not answer"):
        run(tmp_path, 1, 2, -2, 60, suicide=1, pause=0.01)
    assert "rank 1: this trainer has fallen silent" in (tmp_path / "log" / "workerlog.0").read_text()


def test_a_killed_trainer_ends_synchronous_training_by_name(tmp_path: Path) -> None:
    """Nobody can close a round without it: the launch fails and names rank 1, and rank 0 was told so by its server."""
    with pytest.raises(WorkerFailed, match="rank 1: was killed by SIGKILL"):
        run(tmp_path, 1, 2, -2, 60, suicide=1, pause=0.01)
    assert "rank 1: this trainer was killed by SIGKILL" in (tmp_path / "log" / "workerlog.0").read_text()


@pytest.mark.slow
def test_a_stopped_trainer_does_not_end_asynchronous_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is stopped and answers nobody: servers drop it once it has been silent, rank 0 ends, and the launcher kills and names it."""
    monkeypatch.setenv("SERVED_SIGNAL", "SIGSTOP")
    monkeypatch.setenv("SERVED_TIMEOUT_S", "40")
    run(tmp_path, 1, 2, 0, 60, folder=str(tmp_path / "saved"), suicide=1, pause=0.01)
    assert (tmp_path / "done.0").exists()
    assert "rank 1 has fallen silent, did not end and was killed; the others trained on without it" in capfd.readouterr().err
    assert "trainer 1 is lost" in (tmp_path / "log" / "serverlog.0").read_text()


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


def test_a_killed_server_is_started_again_from_its_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], forked_launches: ForkedLaunches
) -> None:
    """Trainers go on with its next life; what was pushed after the checkpoint is lost and counted, and nothing comes twice."""
    saved = tmp_path / "saved"
    killer = kill_server(forked_launches, lambda: any(saved.glob("shard-*.safetensors")) and time.sleep(0.5) is None)
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


def test_a_killed_server_ends_the_job_where_it_is_not_started_again(tmp_path: Path, forked_launches: ForkedLaunches) -> None:
    """Without a restart the launch fails at once, names the server, and says how it might have gone on."""
    log = tmp_path / "log" / "workerlog.0"
    killer = kill_server(forked_launches, lambda: log.exists() and "trainer 0" in log.read_text())
    with pytest.raises(WorkerFailed, match=r"(?s)server 0: was killed by SIGKILL.*--restart-servers"):
        run(tmp_path, 1, 1, 0, 1000, pause=0.02)
    killer.join()


ROLE = "import os, sys, time\nis_server = os.environ['TRAINING_ROLE'] == 'PSERVER'\n"


def run_text(tmp_path: Path, text: str, servers: int, workers: int) -> None:
    """Launch a script that needs nothing of this package."""
    script = tmp_path / "script.py"
    script.write_text(ROLE + text)
    launch_placed(on_this_machine(servers, workers), [str(script)], log_dir=tmp_path / "log", echo=lambda _text: None)


def test_a_server_that_ends_with_an_error_ends_the_job_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two servers finds its port taken; trainers, who would look for it for minutes, are ended, and the launch names the server."""
    monkeypatch.setattr("real.job.served_launcher._GRACE_S", 0.2)
    text = """
port = os.environ['PADDLE_PSERVERS_IP_PORT_LIST'].rpartition(':')[2]
sys.exit(3) if is_server and os.environ['PADDLE_PORT'] == port else time.sleep(60)
"""
    with pytest.raises(WorkerFailed, match="server 1: ended with exit code 3"):
        run_text(tmp_path, text, 2, 1)


def test_a_server_may_take_long_to_write_its_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the launcher's clock it takes a minute after the last trainer's end; the launcher waits for it, and all is well."""
    clock = Clock()
    monkeypatch.setattr("real.job.launcher.time", clock)
    monkeypatch.setattr("real.job.served_launcher.time", clock)
    begun = time.monotonic()

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        clock.now = 1000.0 + 60.0 * (time.monotonic() - begun)

    monkeypatch.setattr(clock, "sleep", sleep, raising=False)
    run_text(tmp_path, f"if is_server:\n    time.sleep(1)\n    open({str(tmp_path / 'saved')!r}, 'w').close()\n", 1, 1)
    assert (tmp_path / "saved").exists()


def test_a_trainer_may_work_on_behind_its_leave(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers have ended well long before rank 0 has evaluated; the launcher waits for it, and then kills rank 1, which is stopped."""
    monkeypatch.setattr("real.job.served_launcher._GRACE_S", 0.2)
    monkeypatch.setattr("real.processes.started._END_S", 0.2)
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


def test_variables_of_another_launcher_do_not_reach_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch inside of a pod or a step that has a rank of its own: who a process is, this launch says."""
    for name, value in {"RANK": "3", "PADDLE_TRAINER_ENDPOINTS": "a:1,b:2", "KEPT": "1"}.items():
        monkeypatch.setenv(name, value)
    run_text(tmp_path, "sys.exit('RANK' in os.environ or 'PADDLE_TRAINER_ENDPOINTS' in os.environ or 'KEPT' not in os.environ)", 1, 1)


def test_processes_are_told_how_long_they_may_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as this launch says, whatever a launch around it said."""
    monkeypatch.setenv("FLEETBENCH_STARTUP_TIMEOUT", "7")
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nsys.exit(os.environ['FLEETBENCH_STARTUP_TIMEOUT'] != '900.0')\n")
    launch_placed(on_this_machine(1, 1), [str(script)], log_dir=tmp_path / "log", startup_timeout_s=900.0, echo=lambda _text: None)


class Known:
    """Stands for the host's board: what a launcher reads there, and what it writes."""

    def __init__(self, *entries: Entry) -> None:
        self.entries = list(entries)
        self.told: list[Entry] = []

    def __call__(self, _path: Path) -> Self:
        """Made by the launch."""
        return self

    def write(self, entry: Entry) -> None:
        """Keep it."""
        self.told.append(entry)

    def turn(self) -> list[Entry]:
        """All of them once."""
        new, self.entries = self.entries, []
        return new


def lost(rank: int, seconds: float = 0.2) -> Entry:
    """Servers have given it up."""
    return Entry(kind="lost", name=f"rank {rank}", why="has fallen silent", seconds=seconds)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Known]:
    """Let this stand on the board, and nobody wait long."""

    def make(*entries: Entry) -> Known:
        made = Known(*entries)
        monkeypatch.setattr("real.job.served_launcher._GRACE_S", 0.2)
        monkeypatch.setattr("real.job.served_launcher.Board", made)
        return made

    return make


HANGS = "if not is_server and os.environ['PADDLE_TRAINER_ID'] == '1':\n    time.sleep(60)\n"


@pytest.mark.timeout(30)
def test_servers_are_told_of_all_ends(tmp_path: Path, board: Callable[..., Known]) -> None:
    """Also of good ones: trainers may have left unheard, or never have joined."""
    told = board().told
    run_text(tmp_path, "", 1, 2)
    assert sorted((entry.kind, entry.name, entry.code) for entry in told) == [
        ("ended", name, 0) for name in ("rank 0", "rank 1", "server 0")
    ]


@pytest.mark.timeout(60)
def test_a_script_that_returns_early_keeps_no_launch_open(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 1 finds nothing to do and ends with code 0 before it has joined: rank 0 trains, past its barriers, and the launch ends well."""
    script = tmp_path / "script.py"
    text = Path(SCRIPT).read_text(encoding="utf-8")
    script.write_text(text.replace("    fleet.init_worker()", "    if fleet.worker_index():\n        sys.exit()\n    fleet.init_worker()"))
    arguments = [str(script), *map(str, (0, 5, tmp_path / "saved", -1, 0.0, tmp_path))]
    launch_placed(on_this_machine(1, 2), arguments, log_dir=tmp_path / "log", echo=lambda _text: None)
    assert weights(tmp_path / "saved") == [-5.0] * 3
    assert "AssertionError" not in (tmp_path / "log" / "workerlog.1").read_text() + capfd.readouterr().err


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
    with pytest.raises(WorkerFailed, match="rank 1"):
        launch_placed(on_this_machine(1, 2), arguments, log_dir=tmp_path / "log", echo=lambda _text: None)
    assert "rank 1 ends without fleet.stop_worker(), and is lost to synchronous training" in (tmp_path / "log" / "workerlog.1").read_text()


@pytest.mark.timeout(30)
def test_a_lost_trainer_that_hangs_does_not_keep_a_launch_open(
    tmp_path: Path, board: Callable[..., Known], capfd: pytest.CaptureFixture[str]
) -> None:
    """Servers have ended well, and rank 1, which they gave up, neither leaves nor raises: it is killed and named."""
    board(lost(1))
    run_text(tmp_path, HANGS, 1, 2)
    assert "rank 1 has fallen silent, did not end and was killed; the others trained on without it" in capfd.readouterr().err


@pytest.mark.timeout(30)
def test_a_trainer_that_is_not_lost_is_waited_for(tmp_path: Path, board: Callable[..., Known], capfd: pytest.CaptureFixture[str]) -> None:
    """It works for five times as long as a lost one may hang, and ends by itself."""
    board()
    run_text(tmp_path, HANGS.replace("60", "2"), 1, 2)
    assert "rank 1" not in capfd.readouterr().err


STOPS = "import signal\nif is_server:\n    os.kill(os.getpid(), signal.SIGSTOP)\n"


@pytest.mark.timeout(30)
def test_a_stopped_server_whose_trainers_have_ended_is_named(
    tmp_path: Path, board: Callable[..., Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher does not wait for its five minutes."""
    monkeypatch.setattr("real.processes.started._END_S", 0.2)
    board()
    with pytest.raises(WorkerFailed, match="server 0: was stopped"):
        run_text(tmp_path, STOPS, 1, 1)


@pytest.mark.timeout(30)
def test_a_server_that_serves_nobody_is_named(tmp_path: Path, board: Callable[..., Known], monkeypatch: pytest.MonkeyPatch) -> None:
    """It lives, and its trainers have ended: after five minutes, which are less here, the launch ends with its name."""
    monkeypatch.setattr("real.job.served_launcher._SERVER_GRACE_S", 0.5)
    board()
    with pytest.raises(WorkerFailed, match="server 0: did not end"):
        run_text(tmp_path, "if is_server:\n    time.sleep(60)\n", 1, 1)


@pytest.mark.timeout(30)
def test_a_stopped_server_is_left_to_trainers_that_live(tmp_path: Path, board: Callable[..., Known]) -> None:
    """It goes on before its trainer misses it, and the job ends well."""
    board()
    pid = str(tmp_path / "pid")
    names_itself = f"if is_server:\n    open({pid!r}, 'w').write(str(os.getpid()))\n"
    waits = f"else:\n    while not os.path.exists({pid!r}):\n        time.sleep(0.01)\n    time.sleep(1)\n"
    continues = f"    os.kill(int(open({pid!r}).read()), signal.SIGCONT)\n"
    run_text(tmp_path, names_itself + STOPS + waits + continues, 1, 1)


@pytest.mark.timeout(30)
def test_a_server_that_writes_its_last_checkpoint_beside_one_that_failed_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch fails by the other's name, and not before this one has written."""
    monkeypatch.setattr("real.job.served_launcher._GRACE_S", 0.2)
    text = f"""
number = is_server and os.environ['PADDLE_PSERVERS_IP_PORT_LIST'].split(',').index('127.0.0.1:' + os.environ['PADDLE_PORT'])
if is_server and number == 0:
    time.sleep(0.7)
    sys.exit(3)
elif is_server:
    time.sleep(1.5)
    open({str(tmp_path / "saved")!r}, 'w').close()
"""
    with pytest.raises(WorkerFailed, match="server 0: ended with exit code 3"):
        run_text(tmp_path, text, 2, 1)
    assert (tmp_path / "saved").exists()


def spread(**parts: Any) -> Placement:
    """A job over several hosts, of which this machine is the loopback."""
    return Placement(**{"own": frozenset(["127.0.0.1"]), **parts})


def launch_here(tmp_path: Path, placement: Placement, text: str, monkeypatch: pytest.MonkeyPatch, startup_timeout_s: float = 1.0) -> None:
    """This machine's part of it, for which its own loopback will do."""
    monkeypatch.setenv("FLEETBENCH_TOKEN", "a token of this test's own job")
    monkeypatch.setattr("real.job.served_launcher.require_addresses", lambda _: None)
    script = tmp_path / "script.py"
    script.write_text(ROLE + text)
    launch_placed(placement, [str(script)], log_dir=tmp_path / "log", startup_timeout_s=startup_timeout_s, echo=lambda _text: None)


@pytest.mark.timeout(30)
def test_a_host_tells_the_others_why_its_part_ended(tmp_path: Path, board: Callable[..., Known], monkeypatch: pytest.MonkeyPatch) -> None:
    """A server was killed."""
    told = board().told
    placement = spread(endpoints=("10.0.0.9:1", "127.0.0.1:2"), workers=("127.0.0.1", "10.0.0.8"))
    with pytest.raises(WorkerFailed, match=r"server 1 on 127.0.0.1: was killed by SIGKILL"):
        launch_here(tmp_path, placement, "os.kill(os.getpid(), 9) if is_server else time.sleep(60)", monkeypatch)
    ended, failed = told[-2:]
    assert (ended.kind, ended.name, ended.code) == ("ended", "server 1", -9)
    assert failed == Entry(kind="failed", name="server 1", why="was killed by SIGKILL")


@pytest.mark.timeout(30)
def test_a_host_without_servers_ends_with_its_trainers(
    tmp_path: Path, board: Callable[..., Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its one trainer was killed, which it tells the servers; what becomes of the job is for other hosts to say."""
    known = board()
    told: list[Entry] = []
    monkeypatch.setattr("real.job.served_launcher.Messenger.tell", lambda _self, entry: told.append(entry))
    placement = spread(endpoints=("10.0.0.9:1",), workers=("127.0.0.1", "10.0.0.8"))
    with pytest.raises(WorkerFailed, match=r"rank 0 on 127\.0\.0\.1: was killed by SIGKILL"):
        launch_here(tmp_path, placement, "os.kill(os.getpid(), 9)", monkeypatch)
    assert told == known.told
    assert told[0] == Entry(kind="ended", name="rank 0", code=-9)


@pytest.mark.timeout(30)
def test_a_trainer_names_the_server_of_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended it stands on its host's board."""
    text = """
import json
entry = {"kind": "blamed", "name": "server 0", "why": "has been silent for 6 s", "code": 0, "seconds": 0.0}
with open(os.environ["FLEETBENCH_BOARD"], "a") as board:
    board.write(json.dumps(entry) + "\\n")
sys.exit(1)
"""
    with pytest.raises(WorkerFailed, match=r"server 0 on 10\.0\.0\.9: has been silent for 6 s"):
        launch_here(tmp_path, spread(endpoints=("10.0.0.9:1",), workers=("127.0.0.1",)), text, monkeypatch)


def test_a_host_removes_its_own_logs_alone(tmp_path: Path) -> None:
    """On a shared disk others write theirs."""
    for name in ("serverlog.0", "serverlog.1", "serverlog.5", "workerlog.0", "workerlog.1", "workerlog.9"):
        (tmp_path / name).write_text("old")
    placement = spread(endpoints=("127.0.0.1:1", "10.0.0.9:1"), workers=("10.0.0.9", "127.0.0.1"))
    with logs_in(tmp_path, placement) as folder:
        kept = {path.name for path in tmp_path.iterdir() if path.read_text() == "old"}
    assert folder == tmp_path
    assert kept == {"serverlog.1", "serverlog.5", "workerlog.0", "workerlog.9"}
    assert not (tmp_path / "serverlog.0").exists()


def test_trainers_of_servers_need_not_find_each_other() -> None:
    """Paddle's variables without the trainers' endpoints make a role where there are servers, and only there."""
    shared = {"PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "2", "TRAINING_ROLE": "TRAINER"}
    role = role_of({**shared, "PADDLE_PSERVERS_IP_PORT_LIST": "a:1"})
    assert (role.kind, role.rank, role.trainers, role.servers, role.rendezvous) == ("trainer", 1, 2, ("a:1",), None)
    with pytest.raises(ConfigError, match="PADDLE_TRAINER_ENDPOINTS"):
        role_of(shared)
