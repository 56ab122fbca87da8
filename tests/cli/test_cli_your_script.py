"""``profile`` and ``tune`` of the user's own script: what follows ``--``, and what does not go with it."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetbench.cli.your_script import REGISTRY_SCRIPT, split_command
from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from tuner import tune
from tuner.jobs import Script
from tuner.recommendation import Recommendation


@pytest.mark.parametrize(
    ("argv", "own", "command"),
    [
        (["tune", "a.toml", "--", "python", "train.py", "--", "x"], ["tune", "a.toml"], ("python", "train.py", "--", "x")),
        (
            ["profile", "--", "torchrun", "--nproc-per-node", "2", "train.py"],
            ["profile"],
            ("torchrun", "--nproc-per-node", "2", "train.py"),
        ),
        (["tune"], ["tune"], ()),
        (["launch", "--nproc", "2", "train.py", "--", "x"], ["launch", "--nproc", "2", "train.py", "--", "x"], ()),
        ([], [], ()),
    ],
)
def test_a_command_stands_behind_two_dashes(argv: list[str], own: list[str], command: tuple[str, ...]) -> None:
    """Of profile and tune; the first two dashes count, and other commands keep theirs."""
    assert split_command(argv) == (own, command)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("tune", "--"), "no command follows it"),
        (("tune", "--", "no-such-program"), "no-such-program"),
        (("tune", "--set", "strategy.nccl_comm_num=2", "--", "no-such-program"), "strategy"),
        (("profile", "--set", "workload.batch_size=3", "--", "no-such-program"), "workload.batch_size: is the script's own (got 3)"),
    ],
)
def test_what_does_not_go_with_a_command_is_refused(
    command: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    """Before anything is started, with a hint; a program that is not there is the environment's lack."""
    monkeypatch.chdir(tmp_path)
    ended = command(*arguments)
    assert ended.code == (3 if says == "no-such-program" else 2)
    assert says in ended.err
    assert "HINT" in ended.err
    assert ended.out == ""


def test_stragglers_of_an_experiments_own_workload_are_refused_too(command: Callable, tmp_path: Path) -> None:
    """Started as one process of several, as a script is, nobody would inject them; what else the file says is its own to say."""
    path = tmp_path / "slow.toml"
    path.write_text('name = "slow"\n[[cluster.stragglers]]\nkind = "slow_rank"\nranks = [0]\nfactor = 2.0\n[strategy]\nnccl_comm_num = 2\n')
    ended = command("tune", path, "--out", tmp_path, "--", "no-such-program", "-m", REGISTRY_SCRIPT, path)
    assert ended.code == 2
    assert "cluster.stragglers" in ended.err


class _Tuned(Exception):  # noqa: N818  # it ends the command where the tuning would begin
    """Keeps what was asked for."""


def test_without_a_file_the_built_in_settings_hold(command: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is the script's; ``--set`` changes what it says; the target is what the user names."""
    asked: list[tuple[tuple[str, ...], Experiment, dict[str, Any]]] = []

    def tuned(base: Experiment, *, script: Script, **rest: Any) -> tuple[Recommendation, Path]:
        asked.append((script.command, base, rest))
        raise _Tuned

    monkeypatch.setattr(tune, "tune", tuned)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my train.py").touch()
    for extra in ([], ["--set", "name=mine"]):
        with pytest.raises(_Tuned):
            command(
                "tune", "--out", tmp_path, "--set", "workload.target_loss=0.3", *extra, "--", "torchrun", "my train.py", "--epochs", "3"
            )
    (words, base, rest), (_, named, _) = asked
    assert words == ("torchrun", "my train.py", "--epochs", "3")
    assert (base.name, named.name) == ("my-train", "mine")
    assert base.workload.target_loss == 0.3
    assert base.strategy == DistributedStrategy()
    assert base.run.warmup_steps >= 5
    assert rest["out"] == tmp_path


@pytest.mark.parametrize("command_name", ["tune", "profile"])
@pytest.mark.parametrize("workdir", [False, True])
def test_a_missing_script_is_said_at_once(
    command_name: str, workdir: bool, command: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is started, whichever launcher would start it; with a folder, it is looked for there and here."""
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    launcher = ("torchrun", "--nproc-per-node", "2")
    where = ("--workdir", "there") if workdir else ()
    begin_s = time.monotonic()
    ended = command(command_name, *where, "--out", tmp_path / "runs", "--", *launcher, "nosuch.py", "--lr", "1")
    assert time.monotonic() - begin_s < 5
    assert ended.code == 2
    assert f"no such script{' in there' if workdir else ''} (got nosuch.py)" in ended.err
    assert not (tmp_path / "runs").exists()


SCRIPT = """\
import os, sys
from pathlib import Path
Path("seen").write_text(os.getcwd() + " " + str("FLEETBENCH_TUNING" in os.environ))
sys.exit(3)
"""


def test_the_command_starts_in_its_folder(command: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made where it is not there; the script is found from here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a failed launch keeps its output for the user
    Path("script.py").write_text(SCRIPT, encoding="utf-8")
    assert command("tune", "--workdir", "own/place", "--", sys.executable, "script.py").code == 4
    assert (tmp_path / "own/place/seen").read_text(encoding="utf-8") == f"{tmp_path / 'own/place'} True"
    assert not (tmp_path / "seen").exists()


@pytest.mark.parametrize("command_name", ["tune", "profile"])
def test_a_folder_without_a_command_is_refused(command_name: str, command: Callable) -> None:
    """No process would start there."""
    ended = command(command_name, "--workdir", "own")
    assert ended.code == 2
    assert "--workdir: needs a command to start in that folder" in ended.err
