"""The samples of an evaluation: a whole data set in its own order, each sample with an id that a service can be asked for.

Ids are places, from 0, in the data (digits, synthetic, text, a factory's own inputs), and the paths of ``val.txt`` for pictures.
Nothing is held out, shuffled or augmented; numbers are shaped as they are for training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from fleetbench.errors import ConfigError
from fleetbench.workload import Workload
from real.data.arrays import Array, read_data
from real.data.image_lists import ImageList, evaluation_picture, read_list
from real.data.reader import normalise
from real.models.data_options import data_source, sizes
from real.models.registry import check_model, model_option


class Samples(Protocol):
    """Samples by their place."""

    @property
    def ids(self) -> Sequence[str]:
        """Of all samples, in order."""
        ...

    def read(self, first: int, last: int) -> tuple[torch.Tensor, ...]:
        """The model's inputs ``(last - first, ...)`` of samples ``first`` up to ``last``.

        Raises ``ConfigError`` naming a sample that cannot be read.
        """
        ...


def open_samples(workload: Workload, seed: int) -> Samples:
    """A workload's data. Raises ``ConfigError`` for data that cannot be read, or do not fit the model."""
    check_model(dataclasses.replace(workload, batch_size=max(2, workload.batch_size)))  # no batch is too small for an evaluation
    dtype = getattr(torch, workload.dtype)
    if data_source(workload) == "imagenet":
        root, size = Path(workload.data.partition(":")[2]), sizes(workload, "images")
        return Pictures(root, read_list(root, "val", model_option(workload, "classes")), size["image_size"], size["workers"], dtype)
    return Rows(read_data(workload, seed).inputs, dtype)


class Rows:
    """``Samples`` of an array; bytes are images, normalised on reading."""

    def __init__(self, inputs: Array, dtype: torch.dtype) -> None:
        self.ids = _places(len(inputs))
        self._inputs = inputs
        self._dtype = dtype

    def read(self, first: int, last: int) -> tuple[torch.Tensor, ...]:
        """One tensor."""
        rows = torch.from_numpy(np.ascontiguousarray(self._inputs[first:last]))
        if rows.dtype == torch.uint8:
            return (normalise(rows, self._dtype),)
        return (rows.to(self._dtype) if rows.is_floating_point() else rows,)


class Pictures:
    """``Samples`` of a list of pictures below ``root``: their middles, decoded by ``workers`` threads."""

    def __init__(self, root: Path, listed: ImageList, size: int, workers: int, dtype: torch.dtype) -> None:
        self.ids = listed.paths
        self._root = root
        self._listed = listed
        self._size = size
        self._workers = workers
        self._dtype = dtype

    def read(self, first: int, last: int) -> tuple[torch.Tensor, ...]:
        """One tensor, ``(batch, 3, size, size)``."""
        with ThreadPoolExecutor(self._workers) as threads:
            pictures = list(threads.map(lambda place: evaluation_picture(self._root, self._listed, place, self._size), range(first, last)))
        return (normalise(torch.from_numpy(np.stack(pictures)), self._dtype),)


class Given:
    """``Samples`` that a factory returned beside its model; here they are the whole data set, not a batch."""

    def __init__(self, inputs: tuple[torch.Tensor, ...], name: str) -> None:
        rows = [len(item) for item in inputs]
        if len(set(rows)) > 1 or not rows[0]:
            hint = "every tensor of inputs has a row for each of the same samples"
            raise ConfigError("the factory's inputs have no sample, or not the same ones", f"--model {name}", f"{rows} rows", hint)
        self.ids = _places(rows[0])
        self._inputs = inputs

    def read(self, first: int, last: int) -> tuple[torch.Tensor, ...]:
        """As many tensors as the factory returned."""
        return tuple(item[first:last] for item in self._inputs)


def _places(number: int) -> list[str]:
    return [str(place) for place in range(number)]
