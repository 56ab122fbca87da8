"""Evaluation: the last layer's vector of every sample of a data set, by one process.

All samples come in the data's own order: nothing is held out, shuffled or augmented. Ids are positions in the
data, from 0 (digits, synthetic, text, a factory's own inputs), or the paths of ``val.txt`` for pictures.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fleetbench.digests import file_digest
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.vectors import name_some, refuse_repeated, write_vectors
from fleetbench.workload import Workload
from fleetbench.workloads.data.data import numbers_of, read_data
from fleetbench.workloads.data.images import evaluation_picture, read_list
from fleetbench.workloads.data.reader import normalise
from fleetbench.workloads.models.registry import build_model, check_model, data_source, model_option, sizes
from real.checkpoints.checkpoint import model_file, read_part
from real.checkpoints.persistables import model_tensors, refuse_another_model
from real.communication.communicators import device_of

_CHECKPOINT = "--checkpoint"


def evaluate(
    experiment: Experiment,
    path: Path,
    *,
    checkpoint: Path | None = None,
    samples: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Write the vectors of a data set, as float32, to a Parquet file at ``path``, and return a summary.

    ``checkpoint``: weights of the model; required. ``samples``: the number of first samples, by default all.

    The model evaluates (no dropout, batch norm by its stored statistics) in ``workload.dtype``, in batches of
    ``workload.batch_size``, of which the last may be smaller. The strategy has no effect. Raises
    ``ConfigError`` for a model, a checkpoint or data that cannot be evaluated.
    """
    if experiment.run.device == "emulated":
        raise ConfigError("emulated compute gives no vectors", "run.device", "'emulated'", "--set run.device=cpu")
    device = device_of(experiment.run.device)
    workload, seed = experiment.workload, experiment.run.seed
    if checkpoint is None:
        hint = "--checkpoint FILE with its weights: what fleet.save_persistables wrote, or torch.save(model.state_dict(), FILE)"
        raise ConfigError("has random parameters", "workload.model", repr(workload.model), hint)
    file = model_file(checkpoint) if checkpoint.is_dir() else checkpoint
    ids, read = open_samples(workload, seed)
    model = build_model(workload.model, workload.model_options, workload.dtype, seed).to(device).eval()
    load_weights(model, file)
    num = len(ids) if samples is None else samples
    if num > len(ids):
        raise ConfigError("is more than the data have", "--samples", str(num), f"at most {len(ids)}, or omit it for all")
    refuse_repeated(ids[:num], "workload.data")
    begin_s = time.perf_counter()
    outputs = []
    with torch.inference_mode():
        for first in range(0, num, workload.batch_size):
            last = min(first + workload.batch_size, num)
            outputs.append(model(read(first, last).to(device)).reshape(last - first, -1).to("cpu", torch.float32).numpy())
            if progress is not None:
                progress(last, num)
    values = np.concatenate(outputs)
    write_vectors(path, ids[:num], values)
    return {
        "model": workload.model,
        "checkpoint": str(file),
        "checkpoint_sha256": file_digest(file),
        "data": workload.data,
        "samples": num,
        "length": values.shape[1],
        "num_not_finite": int((~np.isfinite(values).all(axis=1)).sum()),
        "wall_s": time.perf_counter() - begin_s,
        "skipped": [],
    }


def open_samples(workload: Workload, seed: int) -> tuple[Sequence[str], Callable[[int, int], torch.Tensor]]:
    """Return the ids of a workload's samples, and a function that reads the model's inputs.

    The function returns the inputs, ``(last - first, ...)``, of samples ``first`` to ``last - 1``. Raises
    ``ConfigError`` for data that cannot be read or do not fit the model; so does the function, which names a
    broken sample.
    """
    # no batch is too small for an evaluation
    check_model(dataclasses.replace(workload, batch_size=max(2, workload.batch_size)))
    dtype = getattr(torch, workload.dtype)
    if data_source(workload) != "imagenet":
        inputs = read_data(workload, seed).inputs

        def read_rows(first: int, last: int) -> torch.Tensor:
            rows = numbers_of(np.ascontiguousarray(inputs[first:last]), dtype)
            return rows.to(dtype) if rows.is_floating_point() else rows

        return [str(place) for place in range(len(inputs))], read_rows
    root, size = Path(workload.data.partition(":")[2]), sizes(workload, "images")
    listed = read_list(root, "val", model_option(workload, "classes"))

    def read_pictures(first: int, last: int) -> torch.Tensor:
        with ThreadPoolExecutor(size["workers"]) as threads:
            pictures = list(threads.map(lambda place: evaluation_picture(root, listed, place, size["image_size"]), range(first, last)))
        return normalise(torch.from_numpy(np.stack(pictures)), dtype)

    return listed.paths, read_pictures


@torch.no_grad()
def load_weights(model: nn.Module, file: Path) -> None:
    """Load the tensors of a safetensors file, or of ``torch.save(model.state_dict(), file)``, into the model.

    Nothing in the file is executed. Names, shapes and types must be the model's own; tied weights may be
    stored under any of their names. Raises ``ConfigError`` for a file that is damaged or has anything else,
    and for one that differs; nothing is loaded then.
    """
    hint = "torch.save(model.state_dict(), FILE) writes such a file, and so does fleet.save_persistables"
    if not file.is_file():
        raise ConfigError("no such file", _CHECKPOINT, str(file), "a file of weights, or a folder that fleet.save_persistables wrote")
    found = read_part(file, hint)
    if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        keys = f"keys {name_some([str(key) for key in found])}" if isinstance(found, Mapping) else type(found).__name__
        raise ConfigError("is not a table of tensors by name", f"{_CHECKPOINT} {file}", keys, hint)
    own = model_tensors(model)
    first_names = {id(tensor): name for name, tensor in own.items()}
    names = {name: first_names[id(tensor)] for name, tensor in model.state_dict(keep_vars=True).items()}
    stored: dict[str, torch.Tensor] = {str(names.get(name, name)): value for name, value in found.items()}
    hint = "the model, with the options, that was saved: workload.model, model_options and dtype"
    refuse_another_model(model, stored, None, f"{_CHECKPOINT} {file}", hint)
    for name, value in stored.items():
        own[name].copy_(value)
