"""``fleetbench launch``: what is asked of the launcher, and what is printed before it starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetbench.errors import WorkerFailed
from real import launching


@dataclasses.dataclass
class _Launches:
    """Stands for the launcher: keeps what it was asked for, and fails where it is told to."""

    asked: list[tuple[int, list[str], dict[str, Any]]] = dataclasses.field(default_factory=list)
    failure: BaseException | None = None

    def __call__(self, nproc: int, script: list[str], *, echo: Callable[[bytes], object], **rest: Any) -> None:
        self.asked.append((nproc, script, rest))
        echo(b"from rank 0\n")
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> _Launches:
    """The launcher, replaced."""
    launches = _Launches()
    monkeypatch.setattr(launching, "launch_script", launches)
    return launches


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A training script that never runs."""
    path = tmp_path / "train.py"
    path.write_text("")
    return path


def test_the_scripts_own_options_stay_its_own(command: Callable, launches: _Launches, script: Path) -> None:
    """What stands behind the script belongs to it, even where fleetbench has an option of that name."""
    ended = command("launch", "--nproc", "3", "--port", "29511", "--log-dir", "logs", script, "--lr", "0.1", "--port", "1", "data")
    assert ended.code == 0
    expected = (3, [str(script), "--lr", "0.1", "--port", "1", "data"], {"log_dir": Path("logs"), "port": 29511})
    assert launches.asked == [expected]


def test_the_box_names_trainers_rendezvous_and_logs(command: Callable, launches: _Launches, script: Path) -> None:
    """The box comes before the first line of a trainer."""
    out = command("launch", "--nproc", "3", script).out
    assert launches.asked[0][2]["port"] is None
    box, _, behind = out.partition("DistributedStrategy Overview")
    assert "trainers" in box
    assert "3" in box
    assert "a file" in box
    assert behind.endswith("from rank 0\n")


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


@pytest.mark.parametrize("arguments", [("--nproc", "0"), ("--nproc", "two"), ("--nproc", "2", "--port", "70000")])
def test_numbers_that_make_no_sense_are_bad_usage(arguments: tuple[str, ...], command: Callable, launches: _Launches, script: Path) -> None:
    """Exit code 2 from argparse."""
    assert command("launch", *arguments, script).code == 2
    assert launches.asked == []
