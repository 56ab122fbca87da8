"""Commands that somebody has started once for each trainer, with nothing after ``--``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from real.job import inside
from tuner import tune
from tuner.jobs import Script


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 0 of two, and has met the other."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(inside, "driving", lambda *_: contextlib.nullcontext())


class _Tuned(Exception):  # noqa: N818  # it ends the command where the tuning would begin
    """Stands for the tuning."""


@pytest.mark.slow
@pytest.mark.usefixtures("job")
def test_the_experiments_own_workload_is_tuned(command: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trainer trains it, overrides included, and hands over the file's strategy itself."""
    asked: list[tuple[tuple[str, ...], Experiment]] = []

    def tuned(base: Experiment, *, script: Script, **_: Any) -> None:
        asked.append((script.command, base))
        raise _Tuned

    monkeypatch.setattr(tune, "tune", tuned)
    path = tmp_path / "e.toml"
    path.write_text('schema = 1\nname = "own"\n[strategy]\nnccl_comm_num = 2\nsync_nccl_allreduce = false\n')
    with pytest.raises(_Tuned):
        command("tune", path, "--set", "workload.batch_size=16", "--seed", "3", "--out", tmp_path / "runs")
    ((words, base),) = asked
    assert words[0] == sys.executable
    assert words[-4:] == ("real.workloads.train", str(path), "workload.batch_size=16", "run.seed=3")
    assert (base.name, base.workload.batch_size, base.run.seed) == ("own", 16, 3)
    assert base.strategy == DistributedStrategy()


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(("name", "says"), [("tune", "nothing says what they train"), ("real", "starts its trainers itself")])
def test_what_cannot_be_started_so_is_refused(name: str, says: str, command: Callable, tmp_path: Path) -> None:
    """Instead of as many searches, or runs, as there are trainers."""
    ended = command(name, "--out", tmp_path)
    assert (ended.code, ended.out) == (2, "")
    assert says in ended.err
    assert "HINT" in ended.err
