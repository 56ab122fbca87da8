"""``fleetbench launch``: what is asked of the launcher, and what is printed before it starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetbench.errors import WorkerFailed
from real.job import launcher, served_launcher
from real.servers import hosts
from real.servers.hosts import Placement


@dataclasses.dataclass
class _Launches:
    """Stands for the launcher: keeps what it was asked for, and fails where it is told to."""

    asked: list[tuple[int, list[str], dict[str, Any]]] = dataclasses.field(default_factory=list)
    failure: BaseException | None = None
    joined: bool = True

    def __call__(self, nproc: int, script: list[str], *, echo: Callable[[bytes], object], **rest: Any) -> bool:
        self.asked.append((nproc, script, rest))
        echo(b"from rank 0\n")
        if self.failure is not None:
            raise self.failure
        return self.joined


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> _Launches:
    """The launcher, replaced."""
    launches = _Launches()
    monkeypatch.setattr(launcher, "launch_script", launches)
    return launches


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A training script that never runs."""
    path = tmp_path / "train.py"
    path.write_text("")
    return path


def test_the_scripts_own_options_stay_its_own(command: Callable, launches: _Launches, script: Path) -> None:
    """What stands after the script belongs to it, even where fleetbench has an option of that name."""
    ended = command("launch", "--nproc", "3", "--log-dir", "logs", script, "--lr", "0.1", "--log-dir", "1", "data")
    assert ended.code == 0
    expected = (3, [str(script), "--lr", "0.1", "--log-dir", "1", "data"], {"log_dir": Path("logs"), "strategy": None})
    assert launches.asked == [expected]


@pytest.mark.parametrize(("joined", "nproc", "told"), [(False, "2", True), (True, "2", False), (False, "1", False)])
def test_trainers_that_never_met_are_remarked_on(
    command: Callable, launches: _Launches, script: Path, joined: bool, nproc: str, told: bool
) -> None:
    """Several trainings beside each other are no error, and seldom meant; one alone needs no ``fleet.init``."""
    launches.joined = joined
    ended = command("launch", "--nproc", nproc, script)
    assert ended.code == 0
    assert ("no trainer called fleet.init" in ended.err) is told


def test_a_failed_trainer_is_exit_code_4(command: Callable, launches: _Launches, script: Path) -> None:
    """The rank is named on stderr."""
    launches.failure = WorkerFailed("was killed by SIGKILL", "rank 1")
    ended = command("launch", "--nproc", "2", script)
    assert ended.code == 4
    assert "error: rank 1: was killed by SIGKILL" in ended.err


def test_ctrl_c_is_exit_code_130(command: Callable, launches: _Launches, script: Path) -> None:
    """The message says that the trainers are gone."""
    launches.failure = KeyboardInterrupt()
    ended = command("launch", "--nproc", "2", script)
    assert (ended.code, ended.err) == (130, "interrupted: all trainers were stopped\n")


def test_a_script_that_is_missing_starts_nothing(command: Callable, launches: _Launches, tmp_path: Path) -> None:
    """Exit code 2, before the box."""
    ended = command("launch", "--nproc", "2", tmp_path / "absent.py")
    assert (ended.code, ended.out) == (2, "")
    assert "absent.py" in ended.err
    assert launches.asked == []


def test_restarts_start_elastic_workers(command: Callable, launches: _Launches, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked for reaches the launch, which says how many restarts are left."""
    asked: list[tuple[Any, ...]] = []

    def launch(nproc: int, script: list[str], *, restarts: int, say: Callable[[str], None], **_: Any) -> None:
        asked.append((nproc, script, restarts))
        say("note: rank 1 was killed by SIGKILL, and is started again (1 of 3)")

    monkeypatch.setattr("real.elastic.launching.launch_elastic", launch)
    ended = command("launch", "--nproc", "2", "--restarts", "3", script, "--lr", "0.1")
    assert ended.code == 0
    assert "note: rank 1 was killed by SIGKILL" in ended.err
    assert (asked, launches.asked) == ([(2, [str(script), "--lr", "0.1"], 3)], [])


@dataclasses.dataclass
class _Served:
    """Stands for the launcher of servers: keeps what it was asked for."""

    asked: list[tuple[Placement, list[str], dict[str, Any]]] = dataclasses.field(default_factory=list)

    def __call__(self, placement: Placement, script: list[str], *, echo: Callable[[bytes], object], **rest: Any) -> None:
        self.asked.append((placement, script, rest))
        echo(b"from rank 0\n")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> _Served:
    """The launcher of servers, replaced."""
    served = _Served()
    monkeypatch.setattr(served_launcher, "launch_placed", served)
    return served


def test_servers_and_trainers_are_counted_or_placed(
    command: Callable, served: _Served, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every host says what there is."""
    monkeypatch.setattr(hosts, "own_among", lambda names: [names.index("b")] if "b" in names else [])
    rest = ("--log-dir", "logs", "--startup-timeout", "60", script, "--lr", "0.1")
    here = command("launch", "--servers", "2", "--workers", "3", *rest)
    first = command("launch", "--servers", "a:1,b:2", "--workers", "b:2,c:2", *rest)
    other = command("launch", "--servers", "a:1,b:2", "--workers", "a:2,b:2", *rest)
    assert (here.code, first.code, other.code) == (0, 0, 0), here.err + first.err + other.err
    assert [len(asked[0].workers) for asked in served.asked] == [3, 4, 4]
    assert served.asked[1][0].own_trainers == (0, 1)
    expected = {"log_dir": Path("logs"), "startup_timeout_s": 60.0}
    assert all(asked[1:] == ([str(script), "--lr", "0.1"], expected) for asked in served.asked)
    assert here.out == f"{script}: 2 servers, 3 trainers, logs in logs\nfrom rank 0\n"
    assert first.out == f"{script}: 2 servers (a:1, b:2), 4 trainers on 3 hosts, logs in logs\nfrom rank 0\n"
    assert other.out.startswith(f"{script}: 2 servers (a:1, b:2), 4 trainers on 2 hosts, logs in logs\n")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--servers", "1"), "--servers, --workers"),
        (("--workers", "1"), "--servers, --workers"),
        (("--servers", "0", "--workers", "1"), "--servers"),
        (("--servers", "one", "--workers", "a:1"), "--servers"),
        (("--servers", "1", "--workers", "0"), "--workers"),
        (("--servers", "192.0.2.1:1", "--workers", "192.0.2.2:1"), "--servers, --workers"),
        (("--servers", "127.0.0.1:1", "--workers", "192.0.2.2:1"), "--servers"),
        (("--servers", "1", "--workers", "1", "--nproc", "1"), "--servers, --workers"),
    ],
)
def test_servers_that_are_half_described_are_refused(
    options: tuple[str, ...], named: str, command: Callable, served: _Served, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2 with the option's name and a hint, before anything is printed or started."""
    monkeypatch.setattr(hosts, "own_among", lambda _: [])
    ended = command("launch", *options, script)
    assert (ended.code, ended.out, served.asked) == (2, "", [])
    assert ended.err.startswith(f"error: {named}: ")
    assert "HINT" in ended.err
