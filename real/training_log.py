"""The training log: Fleet's line per batch, such as ``[Epoch 0, batch 5] loss: 1.01921, acc1: 0.00000``."""

from collections.abc import Mapping

import torch

from real.communication.lanes import host_reads


class TrainingLog:
    """Prints the line of every ``every``-th batch of an epoch, starting with its batch 0.

    It reads only the values of these batches, because reading a value from a device waits for it.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._epoch = 0
        self._batch = 0

    def report(self, values: Mapping[str, torch.Tensor | float]) -> None:
        """Add a batch with these values, one number each."""
        if self._batch % self._every == 0:
            with host_reads():
                told = {name: _number(value) for name, value in values.items()}
            print(line(self._epoch, self._batch, told), flush=True)  # noqa: T201  # the log that was asked for
        self._batch += 1

    def resume(self, epoch: int) -> None:
        """Continue after ``epoch`` epochs."""
        self._epoch = epoch
        self._batch = 0

    def end_epoch(self) -> None:
        """Start the next epoch with the next batch."""
        self.resume(self._epoch + 1)


def line(epoch: int, batch: int, values: Mapping[str, float]) -> str:
    """Return Fleet's line of one batch."""
    return f"[Epoch {epoch}, batch {batch}] " + ", ".join(f"{name}: {value:.5f}" for name, value in values.items())


def _number(value: torch.Tensor | float) -> float:
    return value.item() if isinstance(value, torch.Tensor) else float(value)
