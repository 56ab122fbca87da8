"""The training log: Fleet's line, every so many batches."""

from __future__ import annotations

import pytest
import torch

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


def test_batches_between_are_not_read() -> None:
    """A value that is not printed is never read, so that nobody waits for a device."""
    log = TrainingLog(2)
    log.report({"loss": 1.0})
    log.report({"loss": torch.zeros(3)})
