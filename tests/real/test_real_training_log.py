"""The training log: Fleet's line, every so many batches."""

from __future__ import annotations

import pytest
import torch

from fleetbench.errors import ConfigError
from real.fleet import Fleet
from real.training_log import TrainingLog, line


def test_the_line_is_fleets() -> None:
    """The documents' own line, to the letter."""
    values = {"loss": 1.01921, "acc1": 0.0, "acc5": 0.0}
    assert line(0, 5, values) == "[Epoch 0, batch 5] loss: 1.01921, acc1: 0.00000, acc5: 0.00000"


def test_every_fifth_batch_of_an_epoch_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Batches count from 0 in every epoch; tensors and numbers are printed alike."""
    log = TrainingLog(5)
    for _ in range(2):
        for batch in range(7):
            log.report({"loss": torch.tensor(batch / 8)})
        log.end_epoch()
    assert capsys.readouterr().out.splitlines() == [
        "[Epoch 0, batch 0] loss: 0.00000",
        "[Epoch 0, batch 5] loss: 0.62500",
        "[Epoch 1, batch 0] loss: 0.00000",
        "[Epoch 1, batch 5] loss: 0.62500",
    ]


def test_a_training_that_goes_on_counts_epochs_on(capsys: pytest.CaptureFixture[str]) -> None:
    """After a load, epochs are those of the training, and batches begin again."""
    log = TrainingLog(1)
    log.report({"loss": 1.0})
    log.resume(3)
    log.report({"loss": 2.0})
    assert capsys.readouterr().out.splitlines()[1:] == ["[Epoch 3, batch 0] loss: 2.00000"]


def test_a_value_is_one_number() -> None:
    """A vector of per-sample values is refused."""
    with pytest.raises(RuntimeError, match="3 elements"):
        TrainingLog(1).report({"loss": 1.0, "acc1": torch.zeros(3)})


def test_batches_between_are_not_read() -> None:
    """A value that is not printed is never read, so that nobody waits for a device."""
    log = TrainingLog(2)
    log.report({"loss": 1.0})
    log.report({"loss": torch.zeros(3)})


def test_a_loss_with_its_graph_is_read_without_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """It is reported as the loop has it, before or after the backward."""
    TrainingLog(1).report({"loss": torch.ones(2, requires_grad=True).mean()})
    assert capsys.readouterr().out == "[Epoch 0, batch 0] loss: 1.00000\n"


def test_a_negative_interval_is_refused() -> None:
    """Before anybody is joined."""
    with pytest.raises(ConfigError, match="log_every"):
        Fleet().init(log_every=-1)
