"""Reader: a rank's batches, the samples in them, and the normalisation of images."""

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
"""Mean and standard deviation of ImageNet's red, green and blue in 0..1, as published models use them."""
_FIRST_EPOCH = 2
"""Second word of the key of epoch 0's draws: epoch e has the key (seed, e + 2). Keys 0 and 1 split and
generate the data."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Words by number, the most frequent first."""

    words: tuple[str, ...]
    counts: npt.NDArray[np.int64]
    """Number of occurrences of each word in the text."""


@dataclass(frozen=True, slots=True)
class Read:
    """All samples ``(samples, ...)`` and their labels, and further facts about some kinds of data."""

    inputs: npt.NDArray[np.generic]
    labels: npt.NDArray[np.int64]
    vocabulary: Vocabulary | None = None
    """Vocabulary of word pairs; None for other data."""
    planted: npt.NDArray[np.float64] | None = None
    """Probabilities from which synthetic clicks were drawn; None for other data."""


class Unlike(NamedTuple):
    """Settings by which trainers get different data (``workload.unlike_data``)."""

    trainers: int
    """Number of trainers."""
    batch_size: int
    """Number of samples per trainer and step."""
    share: float
    """Share of the samples that are dealt to trainers by label."""
    labels: Path
    """Path of the file of all samples' labels."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Selects the samples that a rank reads at a step. Every epoch has a permutation that all ranks share.

    The batches of all ranks at a step, concatenated, are the batch of one process with the joint batch size.
    All ranks have the same number of batches: samples that do not fill a step of every trainer are left out
    (``cut``), or such a step is filled up with samples drawn anew in every epoch (``pad``).
    """

    num_samples: int
    batch_size: int
    trainers: int
    rank: int
    seed: int
    uneven: str
    wanted_steps: int | None = None
    """Number of steps per epoch, if fewer than the data allow; None for as many as they allow."""
    unlike: Unlike | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps per epoch. Raises ``ConfigError`` if more are requested than the data allow."""
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
        """Return the epoch, counted from 0, of the step at ``position``."""
        return position // self.steps_per_epoch

    def indices(self, position: int) -> npt.NDArray[np.int64]:
        """Return the sample numbers of this rank's batch.

        ``position`` counts steps from 0 over all epochs.
        """
        epoch, step = divmod(position, self.steps_per_epoch)
        length = self._available_steps * self.batch_size * self.trainers
        order = _epoch_order(self.seed, epoch, self.num_samples, length, self.unlike)
        first = (step * self.trainers + self.rank) * self.batch_size
        return order[first : first + self.batch_size]


class Reader(Protocol):
    """Batches of one rank by their position, counted from 0 over all epochs.

    Reading positions in order is fast; any other position may be requested at any time. ``close`` stops all
    threads of the reader; a second ``close`` does nothing.
    """

    def batch(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs ``(batch, ...)`` and labels ``(batch,)``, int64.

        Raises ``ConfigError`` for an unreadable sample.
        """
        ...

    def close(self) -> None:
        """Stop the reader's threads, if it has any."""
        ...


class BatchTime(NamedTuple):
    """Times of one batch that a thread makes ahead."""

    load_ns: int
    """Time in ns to make the batch, in its thread."""
    waited_ns: int
    """Time in ns from the request until the batch was ready."""


@runtime_checkable
class ReadsAhead(Protocol):
    """A ``Reader`` with ``loaders`` threads that make batches ahead. If 0, the requesting thread makes them."""

    loaders: int
    times: deque[BatchTime]
    """Times of the latest batches, in order."""


@lru_cache(maxsize=2)  # a permutation of a million samples takes longer than a step
def _epoch_order(seed: int, epoch: int, num_samples: int, length: int, unlike: Unlike | None) -> npt.NDArray[np.int64]:
    """Return ``length`` sample numbers: a permutation, cut or filled up with random samples.

    The random samples are distinct if there are enough samples.
    """
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
    """Exchange a share of an epoch's samples among trainers, so that each gets samples with similar labels.

    The chosen samples are sorted by label, then by number. Each trainer gets one run of them, in random
    order.
    """
    trainers = np.arange(len(order)) // unlike.batch_size % unlike.trainers
    chosen = np.flatnonzero(generator.random(len(order)) < unlike.share)
    places = chosen[np.lexsort((generator.random(len(chosen)), trainers[chosen]))]
    samples = order[places]
    labels = np.load(unlike.labels, mmap_mode="r")
    order[places] = samples[np.lexsort((samples, labels[samples]))]


def normalise(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Normalise pixels ``(batch, 3, H, W)`` of 0..255 to mean 0 and standard deviation 1 over ImageNet."""
    mean, std = (torch.tensor(values, dtype=dtype, device=pixels.device).view(3, 1, 1) for values in (MEAN, STD))
    return pixels.to(dtype).div_(255).sub_(mean).div_(std)
