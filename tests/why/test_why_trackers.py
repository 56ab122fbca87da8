"""Trackers: runs that a script has open are told, and nothing is imported."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from real.why.trackers import log_to_open_runs

NUMBERS = {"fleetbench/step_ms": 12.5, "fleetbench/wait_ms": 3.0}


def test_open_runs_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of Weights & Biases gets them in its summary, one of MLflow as metrics, a writer of TensorBoard as scalars."""
    summary: dict[str, float] = {}
    metrics: dict[str, float] = {}
    scalars: dict[str, float] = {}

    class SummaryWriter:
        """As torch's."""

        file_writer: object | None = object()

        def add_scalar(self, name: str, value: float) -> None:
            """Keep it."""
            scalars[name] = value

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=SimpleNamespace(summary=summary)))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(active_run=object, log_metrics=metrics.update))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", SimpleNamespace(SummaryWriter=SummaryWriter))
    writer = SummaryWriter()
    assert log_to_open_runs(NUMBERS) == ["wandb", "mlflow", "tensorboard"]
    assert summary == metrics == scalars == NUMBERS
    writer.file_writer = None  # closed
    assert log_to_open_runs(NUMBERS) == ["wandb", "mlflow"]


def test_without_a_run_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackers that are imported and idle stay so, and one that fails is left out."""

    def fails(_numbers: object) -> None:
        raise ConnectionError("the server is gone")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(active_run=object, log_metrics=fails))
    assert log_to_open_runs(NUMBERS) == []
