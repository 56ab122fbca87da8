"""DaliBatches: pictures decoded by NVIDIA DALI, behind the same interface as the DataLoader's.

Samples, crops and mirroring are those of ``ImageBatches``, by the same draws; decoded and resized
pixels differ by rounding. Install it with ``fleetbench[dali]``.

**Executed so far on CPUs only** (DALI 2.4.0): with a GPU the decoder's device is ``mixed`` and the
rest of the pipeline runs behind it, as DALI's user guide describes; nobody has seen that run yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from fleetbench.errors import ConfigError, EnvironmentLacks
from fleetbench.workloads.data.pictures import training_crop, training_pixels
from fleetbench.workloads.data.reader import MEAN, STD
from fleetbench.workloads.data.sampler import Sampler

Encoded = tuple[list[npt.NDArray[Any]], ...]
"""A batch, sample by sample: bytes of the file, (left, top), (width, height), mirror, label."""

_READ_AHEAD = 2
"""Batches that a pipeline prefetches (DALI's ``prefetch_queue_depth``)."""


def require_dali() -> None:
    """Raise ``EnvironmentLacks`` where DALI is not installed."""
    if find_spec("nvidia") is None or find_spec("nvidia.dali") is None:
        hint = 'pip install "fleetbench[dali]", or drop the option'
        raise EnvironmentLacks("NVIDIA DALI is not installed", "workload.data_options.reader", "'dali'", hint)


class DaliBatches:
    """A ``Reader`` of pictures below ``root``; tensors lie on ``device``.

    A position that is not the next one builds the pipeline anew, since it has read ahead.
    """

    def __init__(self, folder: Path, root: Path, sampler: Sampler, size: int, workers: int, device: str, dtype: torch.dtype) -> None:
        require_dali()
        self._paths = np.load(folder / "paths_train.npy", mmap_mode="r")
        self._labels = np.load(folder / "y_train.npy", mmap_mode="r")
        self._root = root
        self._sampler = sampler
        self._size = size
        self._workers = workers
        self._device = torch.device(device)
        self._dtype = dtype
        self._next = -1
        self._batches: Iterator[Any] | None = None

    def batch(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs ``(batch, 3, size, size)`` and labels ``(batch,)``. Raises ``ConfigError`` naming a file that is no picture."""
        if position != self._next or self._batches is None:
            self._batches = self._pipeline(position)
        try:
            output = next(self._batches)[0]
        except RuntimeError:
            self._batches = None
            self._find_broken(position)
            raise
        self._next = position + 1
        return output["inputs"].to(self._device, self._dtype), output["labels"].to(self._device).reshape(-1)

    def close(self) -> None:
        """Drop the pipeline; its threads end with it."""
        self._batches = None

    def _pipeline(self, position: int) -> Iterator[Any]:
        from nvidia.dali import fn, pipeline_def, types
        from nvidia.dali.plugin.pytorch import DALIGenericIterator

        on_gpu = self._device.type == "cuda"
        gpu = self._device.index if self._device.index is not None or not on_gpu else torch.cuda.current_device()

        @pipeline_def(  # type: ignore[untyped-decorator]  # DALI is not installed where types are checked
            batch_size=self._sampler.batch_size,
            num_threads=self._workers,
            device_id=gpu,
        )
        def decoding() -> tuple[Any, Any]:
            encoded, start, shape, mirror, labels = fn.external_source(source=self._encoded(position), num_outputs=5, batch=True)
            parts = fn.decoders.image_slice(
                encoded, device="mixed" if on_gpu else "cpu", output_type=types.RGB, axis_names="WH", start=start, shape=shape
            )
            resized = fn.resize(parts, size=(self._size, self._size), interp_type=types.INTERP_LINEAR, antialias=True)
            inputs = fn.crop_mirror_normalize(
                resized,
                dtype=types.FLOAT,
                output_layout="CHW",
                mean=[255 * value for value in MEAN],
                std=[255 * value for value in STD],
                mirror=mirror,
            )
            return inputs, labels

        return iter(DALIGenericIterator([decoding()], ["inputs", "labels"], prepare_first_batch=False))

    def _find_broken(self, position: int) -> None:
        """Raise ``ConfigError`` naming the picture that the pipeline, which says not which, stopped at; it may have read ahead."""
        for ahead in range(position, position + _READ_AHEAD + 1):
            for sample in self._sampler.indices(ahead):
                path = self._path(int(sample))
                try:
                    training_pixels(path, self._size, self._sampler.seed, self._sampler.epoch(ahead), int(sample))
                except OSError as error:
                    raise _undecodable(path, error) from None

    def _encoded(self, position: int) -> Iterator[Encoded]:
        """Batches from ``position`` on, for ever."""
        while True:
            chosen, epoch = self._sampler.indices(position), self._sampler.epoch(position)
            samples = [self._sample(int(sample), epoch) for sample in chosen]
            yield tuple(list(part) for part in zip(*samples, strict=True))
            position += 1

    def _sample(self, sample: int, epoch: int) -> tuple[npt.NDArray[Any], ...]:
        path = self._path(sample)
        try:
            with Image.open(path) as image:
                crop = training_crop(self._sampler.seed, epoch, sample, image.width, image.height)
            encoded = np.fromfile(path, np.uint8)
        except OSError as error:
            raise _undecodable(path, error) from None
        whole = (np.array(pair, np.int32) for pair in ((crop.left, crop.top), (crop.width, crop.height)))
        return encoded, *whole, np.array(crop.mirror, np.int32), np.array([self._labels[sample]], np.int64)

    def _path(self, sample: int) -> Path:
        return self._root / bytes(self._paths[sample]).decode()


def _undecodable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot be decoded: {error}", "workload.data", str(path), "mend the file, or drop its line from train.txt")
