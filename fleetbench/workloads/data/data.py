"""Data: prepared once by the driver, read by every rank through a ``Reader``.

Below the folder of a launch lie ``data.json`` (the kind of data, its type, the folder of its images),
``y_train.npy``, ``x_eval.npy`` and ``y_eval.npy``, and ``x_train.npy`` or, for images that are
decoded when they are read, ``paths_train.npy``. Arrays of bytes are images, normalised on reading.
Pairs of words have ``counts.npy`` and ``words.json``, words by their number, and get their negatives on reading;
``planted_eval.npy`` has the probabilities that synthetic clicks of the held-out split were drawn with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fleetbench.errors import ConfigError
from fleetbench.workload import Workload
from fleetbench.workloads.data.arrays import read_data
from fleetbench.workloads.data.negatives import HELD_OUT_POSITION, Negatives
from fleetbench.workloads.data.reader import Reader, Sampler, normalise
from fleetbench.workloads.models.data_options import data_source, sizes
from fleetbench.workloads.models.registry import INPUTS, check_model, model_option

HELD_OUT = 5
"""Every fifth sample is held out."""


def prepare(workload: Workload, seed: int, folder: Path) -> None:
    """Write below ``folder`` what the ranks read.

    Raises ``ConfigError`` for data that cannot be read.
    """
    check_model(workload)
    folder.mkdir(parents=True, exist_ok=True)
    described: dict[str, Any] = {"dtype": workload.dtype}
    if data_source(workload) == "imagenet":
        from fleetbench.workloads.data.images import prepare_images  # Pillow, which arrays do not need

        size = sizes(workload, "images")
        root = Path(workload.data.partition(":")[2])
        prepare_images(root, model_option(workload, "classes"), size["image_size"], size["held_out"], seed, folder)
        described["images"] = str(root)
    else:
        described |= _prepare_arrays(workload, seed, folder)
    (folder / "data.json").write_text(json.dumps(described), encoding="utf-8")


def _prepare_arrays(workload: Workload, seed: int, folder: Path) -> dict[str, Any]:
    """Write the arrays; what else there is to know of them."""
    read = read_data(workload, seed)
    inputs, labels = read.inputs, read.labels
    known: dict[str, Any] = {}
    if len(labels) < 2 * HELD_OUT:
        hint = f"at least {2 * HELD_OUT} are needed, of which every fifth is held out"
        raise ConfigError("has too few samples", "workload.data", str(len(labels)), hint)
    order = np.random.Generator(np.random.Philox(key=[seed, 0])).permutation(len(labels))
    if np.issubdtype(inputs.dtype, np.floating):
        inputs = inputs.astype(workload.dtype)
    held = order[::HELD_OUT][: sizes(workload, INPUTS[workload.model]).get("held_out")]
    trained = np.delete(order, slice(None, None, HELD_OUT))
    for name, chosen in (("train", trained), ("eval", held)):
        np.save(folder / f"x_{name}.npy", inputs[chosen])
        np.save(folder / f"y_{name}.npy", labels[chosen].astype(np.int64))
    if read.vocabulary is not None:
        num_negatives = sizes(workload, "pairs")["negatives"]
        drawn = Negatives(read.vocabulary.counts, num_negatives, seed).drawn(HELD_OUT_POSITION, 0, len(held))
        np.save(folder / "x_eval.npy", np.concatenate([inputs[held], drawn], axis=1))
        np.save(folder / "counts.npy", read.vocabulary.counts)
        (folder / "words.json").write_text(json.dumps(read.vocabulary.words), encoding="utf-8")
        known = {"pairs": {"negatives": num_negatives, "seed": seed}}
    if read.planted is not None:
        np.save(folder / "planted_eval.npy", read.planted[held])
    return known


def open_batches(workload: Workload, folder: Path, sampler: Sampler) -> Reader:
    """The reader of this rank's batches; ``close`` it when done."""
    images = _described(folder).get("images")
    if images is None:
        pairs = _described(folder).get("pairs")
        return Batches(folder, sampler) if pairs is None else PairBatches(folder, sampler, pairs["negatives"], pairs["seed"])
    size = sizes(workload, "images")
    from fleetbench.workloads.data.image_reader import ImageBatches

    return ImageBatches(folder, Path(images), sampler, size["image_size"], size["workers"], _dtype(folder))


class Batches:
    """A ``Reader`` of arrays, which it maps."""

    def __init__(self, folder: Path, sampler: Sampler) -> None:
        self._inputs = np.load(folder / "x_train.npy", mmap_mode="r")
        self._labels = np.load(folder / "y_train.npy", mmap_mode="r")
        self._dtype = _dtype(folder)
        self.sampler = sampler

    def batch(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs ``(batch, ...)`` and labels ``(batch,)`` of the step at ``position``."""
        chosen = self.sampler.indices(position)
        return _numbers(self._inputs[chosen], self._dtype), torch.from_numpy(self._labels[chosen])

    def close(self) -> None:
        """Nothing was started."""


class PairBatches(Batches):
    """Pairs of words: inputs ``(batch, 2 + negatives)``, the middle word, its neighbour, and fresh negatives; labels 0."""

    def __init__(self, folder: Path, sampler: Sampler, num_negatives: int, seed: int) -> None:
        super().__init__(folder, sampler)
        self._negatives = Negatives(np.load(folder / "counts.npy"), num_negatives, seed)

    def batch(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Reader``."""
        pairs, labels = super().batch(position)
        negatives = self._negatives.drawn(position, self.sampler.rank * self.sampler.batch_size, len(pairs))
        return torch.cat([pairs, torch.from_numpy(negatives)], dim=1), labels


def held_out(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels that no trainer learns from."""
    return _numbers(np.load(folder / "x_eval.npy"), _dtype(folder)), torch.from_numpy(np.load(folder / "y_eval.npy"))


def num_training_samples(folder: Path) -> int:
    """Samples that trainers learn from."""
    return int(np.load(folder / "y_train.npy", mmap_mode="r").shape[0])


def _numbers(inputs: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    return normalise(torch.from_numpy(inputs), dtype) if inputs.dtype == np.uint8 else torch.from_numpy(inputs)


def _described(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "data.json").read_text(encoding="utf-8")))


def _dtype(folder: Path) -> torch.dtype:
    return getattr(torch, _described(folder)["dtype"])  # type: ignore[no-any-return]  # a name that Workload allows
