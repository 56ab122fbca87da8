"""ImageBatches: pictures decoded ahead of time by processes of torch's DataLoader.

The processes come from a fork server, which a rank's threads, its device and its sockets have
never been part of. (A plain fork copies locks that other threads hold, and sockets that then stay
open when the rank dies, so that its peers would not hear of it.) A decoding process ends with its
rank at once, however that ends; the fork server notices, too, and needs a moment to go.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import Sampler as Positions

from fleetbench.errors import ConfigError, WorkerFailed
from fleetbench.workloads.data.images import training_pixels
from fleetbench.workloads.data.reader import BatchTime, Sampler, normalise

Decoded = tuple[torch.Tensor, torch.Tensor, str, int]
"""Pixels ``(batch, 3, size, size)`` of 0..255, labels ``(batch,)``, what could not be decoded (path and reason), and ns taken."""
_KEPT = 10_000
"""Batches whose times are remembered."""


class ImageBatches:
    """A ``Reader`` of pictures below ``root``, in the order of ``folder/paths_train.npy``.

    Life cycle: the first batches are decoded from the start; a position that is not the next one
    throws away what was decoded ahead. ``close`` ends the processes.
    """

    def __init__(self, folder: Path, root: Path, sampler: Sampler, size: int, workers: int, dtype: torch.dtype) -> None:
        self.loaders = workers
        self.times: deque[BatchTime] = deque(maxlen=_KEPT)
        self._dtype = dtype
        self._next = 0
        self._from = _From()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._loader: DataLoader[Decoded] | None = DataLoader(
            _Decoding(folder, root, sampler, size),
            batch_size=None,  # an item is a batch already
            sampler=self._from,
            num_workers=workers,
            persistent_workers=workers > 0,
            multiprocessing_context=context if workers > 0 else None,
            worker_init_fn=_end_with_rank if workers > 0 else None,
            generator=torch.Generator(),  # the loader's own draws leave the global generator alone
        )
        self._batches: Iterator[Decoded] | None = iter(self._loader)

    def batch(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs ``(batch, 3, size, size)`` and labels ``(batch,)``.

        Raises ``ConfigError`` naming a file that is no picture, ``WorkerFailed`` for a decoding process that died.
        """
        assert self._loader is not None, "the reader is closed"
        if position != self._next or self._batches is None:
            self._from.position = position
            self._batches = iter(self._loader)
        asked_ns = time.perf_counter_ns()
        try:
            pixels, labels, failure, load_ns = next(self._batches)
        except (RuntimeError, OSError, EOFError) as error:  # the loader's own word, or a pipe that broke first
            hint = "it may have run out of memory: fewer workload.data_options.workers; its output is in the rank's log"
            raise WorkerFailed(f"a process that decodes pictures has died: {error}", hint=hint) from error
        self.times.append(BatchTime(load_ns, time.perf_counter_ns() - asked_ns))
        self._next = position + 1
        if failure:
            raise ConfigError("cannot be decoded", "workload.data", failure, "mend the file, or drop its line from train.txt")
        return normalise(pixels, self._dtype), labels

    def close(self) -> None:
        """End the decoding processes, and their server with the last of them."""
        self._batches = self._loader = None  # the loader's iterator joins its processes when it is dropped
        if not multiprocessing.active_children():  # by itself the server outlives the rank by half a second
            forkserver._forkserver._stop()  # type: ignore[attr-defined]  # noqa: SLF001  # there is no public way


class _From(Positions[int]):
    """All positions from one on."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self.position)


class _Decoding(Dataset[Decoded]):
    """Batches by their position; opens its arrays in the process that reads them."""

    def __init__(self, folder: Path, root: Path, sampler: Sampler, size: int) -> None:
        self._folder = folder
        self._root = root
        self._sampler = sampler
        self._size = size
        self._arrays: tuple[npt.NDArray[np.bytes_], npt.NDArray[np.int64]] | None = None

    def __getitem__(self, position: int) -> Decoded:
        begin_ns = time.perf_counter_ns()
        if self._arrays is None:
            self._arrays = (np.load(self._folder / "paths_train.npy", mmap_mode="r"), np.load(self._folder / "y_train.npy", mmap_mode="r"))
        paths, labels = self._arrays
        chosen, epoch = self._sampler.indices(position), self._sampler.epoch(position)
        pixels = np.zeros((len(chosen), 3, self._size, self._size), np.uint8)
        failure = ""
        for place, sample in enumerate(chosen):
            path = self._root / bytes(paths[sample]).decode()
            try:
                pixels[place] = training_pixels(path, self._size, self._sampler.seed, epoch, int(sample))
            except OSError as error:
                failure = f"{path}: {error}"
        return torch.from_numpy(pixels), torch.from_numpy(labels[chosen]), failure, time.perf_counter_ns() - begin_ns


def _end_with_rank(_worker: int) -> None:
    """Watch the rank from a daemon thread; the loader's own watch takes seconds."""
    rank = multiprocessing.parent_process()
    assert rank is not None

    def watch() -> None:
        rank.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-rank", daemon=True).start()
