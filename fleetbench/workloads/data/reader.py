"""Reader: all samples of some data as arrays, what gives a rank its batches, which samples those are, and the shape of images in one."""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from fleetbench.errors import ConfigError

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Of ImageNet's pixels in 0..1: red, green, blue; as every published ImageNet model takes them."""
_FIRST_EPOCH = 2
"""Draws of epoch e have the key (seed, e + 2); 0 and 1 are those that split and make the data."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Words by their number, the most frequent first."""

    words: tuple[str, ...]
    counts: npt.NDArray[np.int64]
    """How often each occurs in the text."""


@dataclass(frozen=True, slots=True)
class Read:
    """All samples, ``(samples, ...)``, and their labels, with what else is known of some data."""

    inputs: npt.NDArray[np.generic]
    labels: npt.NDArray[np.int64]
    vocabulary: Vocabulary | None = None
    """Of pairs."""
    planted: npt.NDArray[np.float64] | None = None
    """The probabilities that synthetic clicks were drawn with."""


class Unlike(NamedTuple):
    """Of trainers whose data differ: how many, the samples in a step of each, which share of them is its own, and the file of labels."""

    trainers: int
    batch_size: int
    share: float
    labels: Path


@dataclass(frozen=True, slots=True)
class Sampler:
    """Which samples a rank reads at a step: every epoch a permutation that all ranks share.

    The batches of all ranks at a step, laid end to end, are the batch of one process with the
    joint batch size. No rank has more batches than another: what does not fill a step of every
    trainer is left out (``cut``), or filled up with samples drawn again every epoch (``pad``).
    """

    num_samples: int
    batch_size: int
    trainers: int
    rank: int
    seed: int
    uneven: str
    wanted_steps: int | None = None
    """Steps of an epoch, where fewer than the data give are wanted."""
    unlike: Unlike | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Steps of every trainer. Raises ``ConfigError`` where more are wanted than the data give."""
        available = self._available_steps
        if self.wanted_steps is not None and self.wanted_steps > available:
            wanted = str(self.wanted_steps)
            raise ConfigError("is more than the data give", "workload.steps_per_epoch", wanted, f"at most {available} with this batch size")
        return self.wanted_steps or available

    @property
    def _available_steps(self) -> int:
        whole, rest = divmod(self.num_samples, self.batch_size * self.trainers)
        return max(1, whole + (1 if rest and self.uneven == "pad" else 0))

    def epoch(self, position: int) -> int:
        """The epoch, from 0, of the step at ``position``."""
        return position // self.steps_per_epoch

    def indices(self, position: int) -> npt.NDArray[np.int64]:
        """Sample numbers of this rank's batch, ``position`` counting steps from 0 over all epochs."""
        epoch, step = divmod(position, self.steps_per_epoch)
        length = self._available_steps * self.batch_size * self.trainers
        order = _epoch_order(self.seed, epoch, self.num_samples, length, self.unlike)
        first = (step * self.trainers + self.rank) * self.batch_size
        return order[first : first + self.batch_size]


class Reader(Protocol):
    """Batches of one rank by their position, counted from 0 over all epochs.

    Reading in the order of positions is fast; any other position may be asked for at any time.
    ``close`` ends what the reader started; a second ``close`` does nothing.
    """

    def batch(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs ``(batch, ...)`` and labels ``(batch,)``, int64. Raises ``ConfigError`` naming a sample that cannot be read."""
        ...

    def close(self) -> None:
        """End the reader's threads, if it has any."""
        ...


class BatchTime(NamedTuple):
    """What one batch took that threads make ahead."""

    load_ns: int
    """To make it, in its thread."""
    waited_ns: int
    """Until it was there, from when it was asked for."""


@runtime_checkable
class ReadsAhead(Protocol):
    """A ``Reader`` whose batches ``loaders`` threads make ahead; 0: the one that asks for them makes them."""

    loaders: int
    times: deque[BatchTime]
    """Of the latest batches, in their order."""


@lru_cache(maxsize=2)  # a permutation of a million samples takes longer than a step
def _epoch_order(seed: int, epoch: int, num_samples: int, length: int, unlike: Unlike | None) -> npt.NDArray[np.int64]:
    """``length`` sample numbers: a permutation, cut, or filled up with random samples (no two alike where there are enough)."""
    generator = np.random.Generator(np.random.Philox(key=[seed, _FIRST_EPOCH + epoch]))
    order = generator.permutation(num_samples)
    missing = length - num_samples
    if missing > 0:
        order = np.concatenate([order, generator.choice(num_samples, missing, replace=missing > num_samples)])
    order = order[:length]
    if unlike is not None:
        _deal_by_label(order, unlike, generator)
    order.setflags(write=False)
    return order


def _deal_by_label(order: npt.NDArray[np.int64], unlike: Unlike, generator: np.random.Generator) -> None:
    """Exchange a share of an epoch's samples among trainers: sorted by label, and then by number, each gets a piece, in random order."""
    trainers = np.arange(len(order)) // unlike.batch_size % unlike.trainers
    chosen = np.flatnonzero(generator.random(len(order)) < unlike.share)
    places = chosen[np.lexsort((generator.random(len(chosen)), trainers[chosen]))]
    samples = order[places]
    labels = np.load(unlike.labels, mmap_mode="r")
    order[places] = samples[np.lexsort((samples, labels[samples]))]


def normalise(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Pixels ``(batch, 3, H, W)`` of 0..255 to numbers of mean 0 and deviation 1 over ImageNet."""
    mean, std = (torch.tensor(values, dtype=dtype, device=pixels.device).view(3, 1, 1) for values in (MEAN, STD))
    return pixels.to(dtype).div_(255).sub_(mean).div_(std)
