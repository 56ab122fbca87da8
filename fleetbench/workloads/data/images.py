"""Images: ImageNet's folder, its JPEG files as pixels for training or evaluation, and a reader of batches.

The folder has ``train/``, ``val/`` and the lists ``train.txt`` and ``val.txt`` of ``path label`` lines. The
draws for a training picture are a function of (seed, epoch, sample), so they depend neither on the rank or
thread that decodes it, nor on what was decoded before.
"""

import math
import re
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from fleetbench.digests import read_text
from fleetbench.errors import ConfigError
from fleetbench.workloads.data.reader import BatchTime, Sampler, normalise

Pixels = npt.NDArray[np.uint8]

_AREA = (0.08, 1.0)
"""Range of the share of the picture's area in a training crop (Szegedy et al. 2014, arXiv 1409.4842, section
6)."""
_RATIO = (3 / 4, 4 / 3)
"""Range of the ratio of width to height of a training crop, drawn uniformly in its logarithm."""
_LINE = re.compile(r"\s*(\S.*?)\s+([+-]?[0-9]{1,9})\s*")
_SHORTER_SIDE = 256 / 224
"""Ratio of the picture's shorter side to the side of the central square that evaluation uses."""
_PURPOSE = 2**63
"""Second word of the key of all augmentation draws, so that they share no key with other draws."""


@dataclass(frozen=True, slots=True)
class Crop:
    """A rectangle of a picture, in pixels, and whether it is mirrored horizontally."""

    left: int
    top: int
    width: int
    height: int
    mirror: bool


def training_crop(seed: int, epoch: int, sample: int, width: int, height: int) -> Crop:
    """Return a random rectangle of a picture of ``width`` x ``height`` pixels, mirrored half of the time.

    A rectangle wider or higher than the picture is cut to it.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, _PURPOSE], counter=[0, 0, epoch, sample]))
    mirror = bool(generator.random() < 0.5)
    area, ratio, across, down = generator.random(4)
    wanted = width * height * (_AREA[0] + area * (_AREA[1] - _AREA[0]))
    stretch = _RATIO[0] * (_RATIO[1] / _RATIO[0]) ** ratio
    inner_width = max(1, min(width, round(math.sqrt(wanted * stretch))))
    inner_height = max(1, min(height, round(math.sqrt(wanted / stretch))))
    return Crop(int(across * (width - inner_width + 1)), int(down * (height - inner_height + 1)), inner_width, inner_height, mirror)


def training_pixels(path: Path, size: int, seed: int, epoch: int, sample: int) -> Pixels:
    """Return a random part of the picture, ``(3, size, size)``.

    Raises ``OSError`` if the file is no picture.
    """
    with Image.open(path) as image:
        crop = training_crop(seed, epoch, sample, image.width, image.height)
        box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
        part = image.convert("RGB").crop(box).resize((size, size), Image.Resampling.BILINEAR)
    pixels = _channels_first(part)
    return np.ascontiguousarray(pixels[:, :, ::-1]) if crop.mirror else pixels


def evaluation_pixels(path: Path, size: int) -> Pixels:
    """Return the centre of the picture, ``(3, size, size)``.

    Raises ``OSError`` if the file is no picture.
    """
    with Image.open(path) as image:
        part = min(image.width, image.height) / _SHORTER_SIDE
        left, top = (image.width - part) / 2, (image.height - part) / 2
        middle = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + part, top + part))
    return _channels_first(middle)


def _channels_first(image: Image.Image) -> Pixels:
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))


@dataclass(frozen=True, slots=True)
class ImageList:
    """Pictures of a split, in the order of its list."""

    paths: list[str]
    """Paths below the data folder."""
    labels: list[int]
    lines: list[int]
    """Line numbers in the list, from 1."""


def read_list(root: Path, split: str, classes: int) -> ImageList:
    """Return the pictures in the list ``root/split.txt``.

    Paths are relative to ``root``, or to ``root/split`` if the first one is; a label is in 0..classes-1. Raises
    ``ConfigError``, with file and line for a wrong entry.
    """
    lines = read_text(root / f"{split}.txt", "imagenet:DIR needs train/, val/, train.txt and val.txt in DIR").splitlines()
    found, inside = ImageList([], [], []), ""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{root / split}.txt:{number}"
        fields = _LINE.fullmatch(line)
        if fields is None:
            hint = "for example train/n01440764/n01440764_10026.JPEG 0"
            raise ConfigError("is no `path label` line", where, repr(line), hint)
        name, label = fields[1], int(fields[2])
        if not 0 <= label < classes:
            hint = f"0..{classes - 1}, or more workload.model_options.classes"
            raise ConfigError("is not the label of a class", where, str(label), hint)
        if not found.paths and not (root / name).is_file():
            inside = f"{split}/"
            if not (root / split / name).is_file():
                raise ConfigError("no such file", where, repr(name), f"paths are relative to {root} or {root / split}")
        found.paths.append(f"{inside}{name}")
        found.labels.append(label)
        found.lines.append(number)
    if not found.paths:
        raise ConfigError("lists no picture", "workload.data", f"{root / split}.txt", "one `path label` line for every picture")
    return found


def prepare_images(root: Path, classes: int, size: int, num_held_out: int, seed: int, folder: Path) -> None:
    """Write the training list, and the pixels of at most ``num_held_out`` random pictures of ``val``.

    Raises ``ConfigError`` for a list or a validation picture that cannot be read.
    """
    train, val = (read_list(root, split, classes) for split in ("train", "val"))
    np.save(folder / "paths_train.npy", np.array([path.encode() for path in train.paths]))
    np.save(folder / "y_train.npy", np.array(train.labels, dtype=np.int64))
    chosen = np.random.Generator(np.random.Philox(key=[seed, 0])).permutation(len(val.paths))[:num_held_out]
    np.save(folder / "x_eval.npy", np.stack([evaluation_picture(root, val, index, size) for index in chosen]))
    np.save(folder / "y_eval.npy", np.array(val.labels, dtype=np.int64)[chosen])


def evaluation_picture(root: Path, val: ImageList, index: int, size: int) -> Pixels:
    """Return the centre of a listed picture, ``(3, size, size)``.

    Raises ``ConfigError`` with the picture's line in the list if it cannot be decoded.
    """
    try:
        return evaluation_pixels(root / val.paths[index], size)
    except OSError as error:
        hint = "repair the file, or drop its line from the list"
        where = f"{root / 'val.txt'}:{val.lines[index]}"
        raise ConfigError(f"cannot be decoded: {error}", where, repr(val.paths[index]), hint) from None


_KEPT = 10_000
"""Number of batches whose times are kept."""
_PREFETCH = 2
"""Number of batches per thread that are being decoded or ready."""


class ImageBatches:
    """A ``Reader`` of pictures below ``root``, in the order of ``folder/paths_train.npy``.

    ``workers`` threads decode batches ahead, each one batch after another. With 0 workers, a batch is decoded
    when it is requested. Threads suffice because Pillow decodes and resizes without holding Python's lock. A
    request for a position that is not among the next ones discards the batches decoded ahead.
    """

    def __init__(self, folder: Path, root: Path, sampler: Sampler, size: int, workers: int, dtype: torch.dtype) -> None:
        self.loaders = workers
        self.times: deque[BatchTime] = deque(maxlen=_KEPT)
        self._paths, self._labels = (np.load(folder / name, mmap_mode="r") for name in ("paths_train.npy", "y_train.npy"))
        self._root, self._sampler, self._size, self._dtype = root, sampler, size, dtype
        self._threads = ThreadPoolExecutor(max(1, workers), "fleetbench-decode")
        self._ahead: dict[int, Future[tuple[Pixels, int]]] = {}

    def batch(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs ``(batch, 3, size, size)`` and labels ``(batch,)``.

        Raises ``ConfigError`` for a file that cannot be decoded.
        """
        asked_ns = time.perf_counter_ns()
        pixels, load_ns = self._taken(position) if self.loaders else self._decoded(position)
        self.times.append(BatchTime(load_ns, time.perf_counter_ns() - asked_ns))
        return normalise(torch.from_numpy(pixels), self._dtype), torch.from_numpy(self._labels[self._sampler.indices(position)])

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(cancel_futures=True)

    def _taken(self, position: int) -> tuple[Pixels, int]:
        """Return a batch decoded by the threads, and let them continue with the next ones."""
        wanted = range(position, position + _PREFETCH * self.loaders)
        for other in self._ahead.keys() - set(wanted):
            self._ahead.pop(other).cancel()
        for place in wanted:
            if place not in self._ahead:
                self._ahead[place] = self._threads.submit(self._decoded, place)
        return self._ahead.pop(position).result()

    def _decoded(self, position: int) -> tuple[Pixels, int]:
        """Return pixels ``(batch, 3, size, size)`` in 0..255, and the time in ns that decoding took."""
        begin_ns = time.perf_counter_ns()
        chosen, epoch = self._sampler.indices(position), self._sampler.epoch(position)
        pixels = np.empty((len(chosen), 3, self._size, self._size), np.uint8)
        for place, sample in enumerate(chosen):
            path = self._root / bytes(self._paths[sample]).decode()
            try:
                pixels[place] = training_pixels(path, self._size, self._sampler.seed, epoch, int(sample))
            except OSError as error:
                hint = "repair the file, or drop its line from train.txt"
                raise ConfigError("cannot be decoded", "workload.data", f"{path}: {error}", hint) from None
        return pixels, time.perf_counter_ns() - begin_ns
