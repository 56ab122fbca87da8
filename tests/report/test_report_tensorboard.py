"""A run's scalars for TensorBoard."""

import builtins
from pathlib import Path
from typing import Any

import pytest
from sim_cases import layered, link

from fleetbench.errors import ConfigError
from fleetbench.report.tensorboard import save_scalars
from fleetbench.result import PARTS, RunResult
from sim.run import simulate


@pytest.fixture(scope="module")
def run() -> RunResult:
    """One layer."""
    return simulate(layered([(1000, 100, 200)], inter=link(8)))


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # of that library
def test_tensorboard_reads_what_was_written(run: RunResult, tmp_path: Path) -> None:
    """Every counted step's time is the mean over ranks of its parts. Needs ``pip install tensorboard``."""
    module = "tensorboard.backend.event_processing.event_accumulator"
    events = pytest.importorskip(module, reason="SKIPPED: tensorboard is not installed")
    save_scalars(run, tmp_path)
    read = events.EventAccumulator(str(tmp_path))
    read.Reload()
    expected = run.steps.groupby("step")[list(PARTS)].mean().sum(axis=1)
    assert {event.step: event.value for event in read.Scalars("step_s")} == pytest.approx(expected.to_dict(), rel=1e-6)


def test_without_tensorboard_it_says_what_to_install(run: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And writes nothing."""
    known = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "torch.utils.tensorboard":
            raise ImportError(name)
        return known(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match="needs another package") as caught:
        save_scalars(run, tmp_path / "scalars")
    assert caught.value.hint == "pip install tensorboard"
    assert not (tmp_path / "scalars").exists()
