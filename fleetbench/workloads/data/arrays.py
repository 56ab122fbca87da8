"""Data that fit into memory, as arrays: scikit-learn's digits, synthetic samples, the bytes or the words of a text, clicks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fleetbench.errors import ConfigError, EnvironmentLacks
from fleetbench.workload import Workload
from fleetbench.workloads.data.clicks import read_clicks
from fleetbench.workloads.data.reader import Read
from fleetbench.workloads.data.words import read_pairs
from fleetbench.workloads.models.data_options import data_source, sizes
from fleetbench.workloads.models.registry import INPUTS, NUM_BYTES, model_option

Array = npt.NDArray[np.generic]
Labels = npt.NDArray[np.int64]

MASK = NUM_BYTES
"""The token in the place of a masked byte."""
_BLOTCHES = 8
"""Blotches a side that tell the classes of synthetic images apart."""


def read_data(workload: Workload, seed: int) -> Read:
    """A workload's data; raises ``ConfigError`` for a file that cannot be read, or that holds too little."""
    if INPUTS[workload.model] == "pairs":
        return read_pairs(workload, seed)
    if INPUTS[workload.model] == "clicks":
        return read_clicks(workload, seed)
    return Read(*_arrays(workload, seed))


def _arrays(workload: Workload, seed: int) -> tuple[Array, Labels]:
    source = data_source(workload)
    if source == "digits":
        return _digits()
    if source == "synthetic":
        return _synthetic(workload, seed)
    return _masked_bytes(_text(workload), sizes(workload, "tokens")["length"], seed, workload.data)


def _digits() -> tuple[Array, Labels]:
    """scikit-learn's 1,797 digits, 8 x 8, scaled to 0..1."""
    from sklearn.datasets import load_digits  # 1.8 s of imports that only the driver pays

    inputs, labels = load_digits(return_X_y=True)
    return inputs.reshape(-1, 8, 8) / 16.0, labels


def _synthetic(workload: Workload, seed: int) -> tuple[Array, Labels]:
    generator = np.random.Generator(np.random.Philox(key=[seed, 1]))
    inputs = INPUTS[workload.model]
    size = sizes(workload, inputs)
    if inputs == "images":
        return _blotches(generator, size["samples"], size["image_size"], model_option(workload, "classes"))
    if inputs == "tokens":
        return _bags(generator, (size["samples"], size["length"]), model_option(workload, "vocab"), model_option(workload, "classes"))
    features, classes = (64, 10) if inputs == "digits" else (model_option(workload, "features"), model_option(workload, "classes"))
    samples, labels = _taught(generator, size["samples"], features, classes)
    return (samples.reshape(-1, 8, 8) if features == 64 else samples), labels  # as the digits


def _taught(generator: np.random.Generator, samples: int, features: int, classes: int) -> tuple[Array, Labels]:
    """Normal numbers labelled by a random linear teacher, so that there is something to learn."""
    inputs = generator.standard_normal((samples, features))
    return inputs, (inputs @ generator.standard_normal((features, classes))).argmax(axis=1)


def _blotches(generator: np.random.Generator, samples: int, size: int, classes: int) -> tuple[Array, Labels]:
    """Images ``(samples, 3, size, size)`` of bytes: a class's own 8 x 8 blotches of colour, half of it noise."""
    patterns = generator.integers(0, 128, (classes, 3, _BLOTCHES, _BLOTCHES), dtype=np.uint8)
    labels = generator.integers(0, classes, samples)
    blotch = np.arange(size) * _BLOTCHES // size
    images = generator.integers(0, 128, (samples, 3, size, size), dtype=np.uint8)
    for sample, label in enumerate(labels):
        images[sample] += patterns[label][:, blotch[:, None], blotch]
    return images, labels


def _bags(generator: np.random.Generator, shape: tuple[int, int], vocab: int, classes: int) -> tuple[Array, Labels]:
    """Tokens ``(samples, length)``; every token speaks for some classes, and their sum decides."""
    tokens = generator.integers(0, vocab, shape)
    votes = generator.standard_normal((vocab, classes))
    return tokens, np.array([votes[sample].sum(axis=0).argmax() for sample in tokens])


def _text(workload: Workload) -> bytes:
    if data_source(workload) == "text":
        path = Path(workload.data.partition(":")[2])
        try:
            return path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror}", "workload.data", repr(workload.data), "text:FILE names a file") from None
    found = find_spec("pydoc_data.topics")
    if found is None or found.origin is None:
        raise EnvironmentLacks("this Python comes without pydoc_data", "workload.data", "'pydocs'", "use text:FILE")
    return Path(found.origin).read_bytes()


def _masked_bytes(text: bytes, length: int, seed: int, name: str) -> tuple[Array, Labels]:
    """Pieces of ``length`` bytes laid end to end, in each of which one byte, the label, is masked."""
    num_samples = len(text) // length
    if num_samples == 0:
        raise ConfigError(f"has no {length} bytes", "workload.data", repr(name), "a longer text, or a smaller workload.data_options.length")
    tokens = np.frombuffer(text, np.uint8, num_samples * length).reshape(num_samples, length).astype(np.int64)
    masked = np.random.Generator(np.random.Philox(key=[seed, 1])).integers(0, length, num_samples)
    samples = np.arange(num_samples)
    labels = tokens[samples, masked]
    tokens[samples, masked] = MASK
    return tokens, labels
