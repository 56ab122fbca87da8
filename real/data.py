"""Data: prepared once by the driver as arrays, which the workers map; sharded evenly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fleetbench.errors import ConfigError
from fleetbench.workload import Workload

HELD_OUT = 5
"""Every fifth sample is held out."""


def prepare(workload: Workload, seed: int, folder: Path) -> None:
    """Write ``x_train``, ``y_train``, ``x_eval`` and ``y_eval`` as ``.npy`` below ``folder``.

    Raises ``ConfigError`` for data that cannot be read.
    """
    if workload.data == "digits":
        inputs, labels = _digits()
    elif workload.data == "synthetic":
        inputs, labels = _synthetic(workload, seed)
    else:
        raise ConfigError("not data that can be read yet", "workload.data", repr(workload.data), "digits or synthetic")
    order = np.random.Generator(np.random.Philox(key=[seed, 0])).permutation(len(labels))
    inputs, labels = inputs[order].astype(workload.dtype), labels[order].astype(np.int64)
    held_out = np.arange(len(labels)) % HELD_OUT == 0
    folder.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("train", ~held_out), ("eval", held_out)):
        np.save(folder / f"x_{name}.npy", inputs[chosen])
        np.save(folder / f"y_{name}.npy", labels[chosen])


def _digits() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """scikit-learn's 1,797 digits, 8 x 8, scaled to 0..1."""
    from sklearn.datasets import load_digits  # 1.8 s of imports that only the driver pays

    inputs, labels = load_digits(return_X_y=True)
    return inputs.reshape(-1, 8, 8) / 16.0, labels


def _synthetic(workload: Workload, seed: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """10,000 samples labelled by a random linear teacher, so that there is something to learn."""
    generator = np.random.Generator(np.random.Philox(key=[seed, 1]))
    features = 64 if workload.model.startswith("digits") else int(workload.model_options.get("features", 32))
    classes = 10 if workload.model.startswith("digits") else int(workload.model_options.get("classes", 10))
    inputs = generator.standard_normal((10_000, features))
    labels = (inputs @ generator.standard_normal((features, classes))).argmax(axis=1)
    return (inputs.reshape(-1, 8, 8) if features == 64 else inputs), labels


@dataclass(frozen=True, slots=True)
class Sampler:
    """Which samples a rank reads at a step: every epoch a permutation that all ranks share.

    The batches of all ranks at a step, laid end to end, are the batch of one process with the
    joint batch size. No rank has more batches than another: what does not fill a step of every
    trainer is left out (``cut``), or filled up with samples of the epoch's beginning (``pad``).
    """

    num_samples: int
    batch_size: int
    trainers: int
    rank: int
    seed: int
    uneven: str
    wanted_steps: int | None = None
    """Steps of an epoch, where fewer than the data give are wanted."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps of every trainer. Raises ``ConfigError`` where more are wanted than the data give."""
        joint = self.batch_size * self.trainers
        whole, rest = divmod(self.num_samples, joint)
        available = max(1, whole + (1 if rest and self.uneven == "pad" else 0))
        if self.wanted_steps is not None and self.wanted_steps > available:
            wanted = str(self.wanted_steps)
            raise ConfigError("is more than the data give", "workload.steps_per_epoch", wanted, f"at most {available} with this batch size")
        return self.wanted_steps or available

    def indices(self, position: int) -> npt.NDArray[np.int64]:
        """Sample numbers of this rank's batch, ``position`` counting steps from 0 over all epochs."""
        epoch, step = divmod(position, self.steps_per_epoch)
        order = np.random.Generator(np.random.Philox(key=[self.seed, 2 + epoch])).permutation(self.num_samples)
        first = (step * self.trainers + self.rank) * self.batch_size
        return np.take(order, np.arange(first, first + self.batch_size), mode="wrap")


class Batches:
    """The mapped training arrays of a workload, read batch by batch."""

    def __init__(self, folder: Path, sampler: Sampler) -> None:
        self._inputs = np.load(folder / "x_train.npy", mmap_mode="r")
        self._labels = np.load(folder / "y_train.npy", mmap_mode="r")
        self.sampler = sampler

    def batch(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs ``(batch, ...)`` and labels ``(batch,)`` of the step at ``position``."""
        chosen = self.sampler.indices(position)
        return torch.from_numpy(self._inputs[chosen]), torch.from_numpy(self._labels[chosen])


def held_out(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels that no trainer learns from."""
    return torch.from_numpy(np.load(folder / "x_eval.npy")), torch.from_numpy(np.load(folder / "y_eval.npy"))


def num_training_samples(folder: Path) -> int:
    """Samples that trainers learn from."""
    return int(np.load(folder / "y_train.npy", mmap_mode="r").shape[0])
