"""Data: prepared once by the driver, read by every rank through a ``Reader``.

A launch's folder contains ``data.json`` (the kind of data, its type, the folder of its images),
``y_train.npy``, ``x_eval.npy`` and ``y_eval.npy``, and ``x_train.npy`` or, for images that are decoded on
reading, ``paths_train.npy``. Arrays of bytes are images, normalised on reading. Pairs of words have
``counts.npy`` and ``words.json``, the words by number, and get their negatives on reading.
``planted_eval.npy`` has the probabilities from which synthetic clicks of the held-out split were drawn.
"""

import gzip
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fleetbench.errors import ConfigError
from fleetbench.stragglers import splitmix64
from fleetbench.workload import Workload
from fleetbench.workloads.data.reader import Read, Reader, Sampler, normalise
from fleetbench.workloads.data.words import HELD_OUT_POSITION, Negatives, read_pairs, text_file, topics_file
from fleetbench.workloads.models.registry import INPUTS, LOSSES, NUM_BYTES, check_model, data_source, model_option, sizes
from fleetbench.workloads.models.sparse import NUM_CATEGORICAL, NUM_NUMERIC

Array = npt.NDArray[np.generic]
Labels = npt.NDArray[np.int64]

MASK = NUM_BYTES
"""Token in the place of a masked byte."""
_BLOTCHES = 8
"""Number of blotches per side that distinguish the classes of synthetic images."""
_BIAS, _SPREAD = -1.5, 0.4
"""Planted log-odds of a click: the value without features, and the standard deviation of each feature's
effect."""
HELD_OUT = 5
"""Ratio of all samples to held-out ones: every fifth sample is held out."""


def prepare(workload: Workload, seed: int, folder: Path) -> None:
    """Write the data of all ranks below ``folder``. Raises ``ConfigError`` for data that cannot be read."""
    check_model(workload)
    folder.mkdir(parents=True, exist_ok=True)
    described: dict[str, Any] = {"dtype": workload.dtype}
    if data_source(workload) == "imagenet":
        from fleetbench.workloads.data.images import prepare_images  # imports Pillow, which arrays do not need

        size = sizes(workload, "images")
        root = Path(workload.data.partition(":")[2])
        prepare_images(root, model_option(workload, "classes"), size["image_size"], size["held_out"], seed, folder)
        described["images"] = str(root)
    else:
        described |= _prepare_arrays(workload, seed, folder)
    (folder / "data.json").write_text(json.dumps(described), encoding="utf-8")


def _prepare_arrays(workload: Workload, seed: int, folder: Path) -> dict[str, Any]:
    """Write the arrays, and return the other entries of ``data.json``."""
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
    """Return the reader of this rank's batches; ``close`` it after use."""
    images = _described(folder).get("images")
    if images is None:
        pairs = _described(folder).get("pairs")
        return Batches(folder, sampler) if pairs is None else PairBatches(folder, sampler, pairs["negatives"], pairs["seed"])
    size = sizes(workload, "images")
    from fleetbench.workloads.data.images import ImageBatches

    return ImageBatches(folder, Path(images), sampler, size["image_size"], size["workers"], _dtype(folder))


class Batches:
    """A ``Reader`` of memory-mapped arrays."""

    def __init__(self, folder: Path, sampler: Sampler) -> None:
        self._inputs = np.asarray(np.load(folder / "x_train.npy", mmap_mode="r"))
        self._labels = np.asarray(np.load(folder / "y_train.npy", mmap_mode="r"))
        self._dtype = _dtype(folder)
        self.sampler = sampler

    def batch(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs ``(batch, ...)`` and labels ``(batch,)`` of the step at ``position``."""
        chosen = self.sampler.indices(position)  # ``take`` needs half the time of indexing
        return numbers_of(self._inputs.take(chosen, axis=0), self._dtype), torch.from_numpy(self._labels.take(chosen))

    def close(self) -> None:
        """Do nothing: nothing was started."""


class PairBatches(Batches):
    """A ``Reader`` of word pairs: inputs ``(batch, 2 + negatives)`` of word, neighbour and negatives; labels 0."""

    def __init__(self, folder: Path, sampler: Sampler, num_negatives: int, seed: int) -> None:
        super().__init__(folder, sampler)
        self._negatives = Negatives(np.load(folder / "counts.npy"), num_negatives, seed)

    def batch(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch; see ``Reader``."""
        pairs, labels = super().batch(position)
        negatives = self._negatives.drawn(position, self.sampler.rank * self.sampler.batch_size, len(pairs))
        return torch.cat([pairs, torch.from_numpy(negatives)], dim=1), labels


def held_out(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels of the held-out split."""
    return numbers_of(np.load(folder / "x_eval.npy"), _dtype(folder)), torch.from_numpy(np.load(folder / "y_eval.npy"))


def num_training_samples(folder: Path) -> int:
    """Return the number of training samples."""
    return int(np.load(folder / "y_train.npy", mmap_mode="r").shape[0])


def numbers_of(inputs: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """Return inputs as a model takes them: arrays of bytes are images, and are normalised."""
    return normalise(torch.from_numpy(inputs), dtype) if inputs.dtype == np.uint8 else torch.from_numpy(inputs)


def _described(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "data.json").read_text(encoding="utf-8")))


def _dtype(folder: Path) -> torch.dtype:
    return getattr(torch, _described(folder)["dtype"])  # type: ignore[no-any-return]  # a name that Workload allows


def read_data(workload: Workload, seed: int) -> Read:
    """Return a workload's data.

    Raises ``ConfigError`` for a file that cannot be read, or that has too little data.
    """
    if INPUTS[workload.model] == "pairs":
        return read_pairs(workload, seed)
    if INPUTS[workload.model] == "clicks":
        size = sizes(workload, "clicks")
        return planted_clicks(seed, size["samples"], size["categories"], model_option(workload, "rows"))
    source = data_source(workload)
    if source == "digits":
        return Read(*_digits())
    if source == "synthetic":
        return Read(*_synthetic(workload, seed))
    text = topics_file().read_bytes() if source == "pydocs" else text_file(workload)
    return Read(*_masked_bytes(text, sizes(workload, "tokens")["length"], seed, workload.data))


def _digits() -> tuple[Array, Labels]:
    """Return scikit-learn's 1,797 digits, 8 x 8, scaled to 0..1."""
    found = find_spec("sklearn")  # read the file, because importing sklearn takes a second in every process that prepares data
    assert found is not None
    assert found.origin is not None
    with gzip.open(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt", encoding="ascii") as file:
        numbers = np.loadtxt(file, delimiter=",")
    return numbers[:, :-1].reshape(-1, 8, 8) / 16.0, numbers[:, -1].astype(np.int64)


def _synthetic(workload: Workload, seed: int) -> tuple[Array, Labels]:
    generator = np.random.Generator(np.random.Philox(key=[seed, 1]))
    inputs = INPUTS[workload.model]
    size = sizes(workload, inputs)
    if inputs == "images":
        return _blotches(generator, size["samples"], size["image_size"], model_option(workload, "classes"))
    if inputs == "tokens":
        classes = 1 if workload.model in LOSSES else model_option(workload, "classes")  # a decoder's loss reads no labels
        return _bags(generator, (size["samples"], size["length"]), model_option(workload, "vocab"), classes)
    features, classes = (64, 10) if inputs == "digits" else (model_option(workload, "features"), model_option(workload, "classes"))
    noise = float(workload.data_options.get("noise", 0.0))
    samples, labels = _taught(generator, size["samples"], features, classes, size.get("teacher", 0), noise)
    return (samples.reshape(-1, 8, 8) if features == 64 else samples), labels  # the shape of digits


def _taught(generator: np.random.Generator, samples: int, features: int, classes: int, hidden: int, noise: float) -> tuple[Array, Labels]:
    """Return normally distributed features, and labels by a random teacher, linear or with ``hidden`` units.

    The share ``noise`` of the labels is replaced by random ones.
    """
    inputs = told = generator.standard_normal((samples, features))
    if hidden:
        told = np.tanh(inputs @ generator.standard_normal((features, hidden)) * (2 / features**0.5))
    labels = (told @ generator.standard_normal((told.shape[1], classes))).argmax(axis=1)
    drawn = generator.random(samples) < noise
    labels[drawn] = generator.integers(0, classes, int(drawn.sum()))
    return inputs, labels


def _blotches(generator: np.random.Generator, samples: int, size: int, classes: int) -> tuple[Array, Labels]:
    """Return images ``(samples, 3, size, size)`` of bytes: the sum of their class's blotches and noise."""
    patterns = generator.integers(0, 128, (classes, 3, _BLOTCHES, _BLOTCHES), dtype=np.uint8)
    labels = generator.integers(0, classes, samples)
    blotch = np.arange(size) * _BLOTCHES // size
    images = generator.integers(0, 128, (samples, 3, size, size), dtype=np.uint8)
    for sample, label in enumerate(labels):
        images[sample] += patterns[label][:, blotch[:, None], blotch]
    return images, labels


def _bags(generator: np.random.Generator, shape: tuple[int, int], vocab: int, classes: int) -> tuple[Array, Labels]:
    """Return tokens ``(samples, length)``. Each token votes for classes, and the largest sum is the label."""
    tokens = generator.integers(0, vocab, shape)
    votes = generator.standard_normal((vocab, classes))
    return tokens, np.array([votes[sample].sum(axis=0).argmax() for sample in tokens])


def _masked_bytes(text: bytes, length: int, seed: int, name: str) -> tuple[Array, Labels]:
    """Return consecutive pieces of ``length`` bytes, each with one masked byte, which is the label."""
    num_samples = len(text) // length
    if num_samples == 0:
        raise ConfigError(f"has no {length} bytes", "workload.data", repr(name), "a longer text, or a smaller workload.data_options.length")
    tokens = np.frombuffer(text, np.uint8, num_samples * length).reshape(num_samples, length).astype(np.int64)
    masked = np.random.Generator(np.random.Philox(key=[seed, 1])).integers(0, length, num_samples)
    samples = np.arange(num_samples)
    labels = tokens[samples, masked]
    tokens[samples, masked] = MASK
    return tokens, labels


def hashed(column: npt.ArrayLike, value: npt.ArrayLike, rows: int) -> npt.NDArray[np.int64]:
    """Return the table row of a category: SplitMix64 of column x 2^33 + value (below 2^33), modulo ``rows``.

    ``column`` and ``value`` are broadcast against each other.
    """
    words = (np.asarray(column, dtype=np.uint64) << np.uint64(33)) + np.asarray(value, dtype=np.uint64)
    return np.asarray(splitmix64(words) % np.uint64(rows), dtype=np.int64)


def planted_clicks(seed: int, num_samples: int, num_categories: int, rows: int) -> Read:
    """Return samples ``(samples, 39)`` with labels 0 and 1 drawn from known probabilities.

    Samples are laid out as ``fleetbench.workloads.models.sparse`` describes. Log-odds are linear in 13 normal
    numbers and in the weights of 26 categories. Each column has ``num_categories`` values, frequent and rare
    ones (Zipf, exponent 1). No classifier has a larger expected AUC than one that ranks samples by
    ``planted``.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, 1]))
    chance = 1.0 / np.arange(1, num_categories + 1)
    values = generator.choice(num_categories, (num_samples, NUM_CATEGORICAL), p=chance / chance.sum())
    numbers = generator.standard_normal((num_samples, NUM_NUMERIC)).astype(np.float32)
    weights = generator.normal(0.0, _SPREAD, (NUM_CATEGORICAL, num_categories))
    slopes = generator.normal(0.0, _SPREAD, NUM_NUMERIC)
    columns = np.arange(NUM_CATEGORICAL)
    log_odds = _BIAS + numbers @ slopes + weights[columns, values].sum(axis=1)
    planted = 1.0 / (1.0 + np.exp(-log_odds))
    labels = (generator.random(num_samples) < planted).astype(np.int64)
    samples = np.concatenate([numbers, hashed(columns, values, rows).astype(np.float32)], axis=1)
    return Read(samples, labels, planted=planted)
