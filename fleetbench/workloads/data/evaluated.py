"""Samples of a data set in its own order, for an evaluation: nothing is held out, shuffled or augmented."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from fleetbench.workload import Workload
from fleetbench.workloads.data.data import numbers_of, read_data
from fleetbench.workloads.data.images import evaluation_picture, read_list
from fleetbench.workloads.data.reader import normalise
from fleetbench.workloads.models.registry import data_source, model_option, sizes


def samples_of(workload: Workload, seed: int) -> tuple[Sequence[str], Callable[[int, int], torch.Tensor]]:
    """Return the ids of a workload's samples, and a function of (first, last) that reads inputs first to last - 1.

    Ids are positions from 0 or, for pictures, the paths in ``val.txt``. Raises ``ConfigError`` for data that
    cannot be read.
    """
    dtype = getattr(torch, workload.dtype)
    if data_source(workload) != "imagenet":
        inputs = read_data(workload, seed).inputs

        def read_rows(first: int, last: int) -> torch.Tensor:
            rows = numbers_of(np.ascontiguousarray(inputs[first:last]), dtype)
            return rows.to(dtype) if rows.is_floating_point() else rows

        return [str(place) for place in range(len(inputs))], read_rows
    root, size = Path(workload.data.partition(":")[2]), sizes(workload, "images")["image_size"]
    listed = read_list(root, "val", model_option(workload, "classes"))

    def read_pictures(first: int, last: int) -> torch.Tensor:
        pictures = [evaluation_picture(root, listed, place, size) for place in range(first, last)]
        return normalise(torch.from_numpy(np.stack(pictures)), dtype)

    return listed.paths, read_pictures
