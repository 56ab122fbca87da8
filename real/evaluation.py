"""Evaluation: the last layer's vector of every sample of a data set, by one process.

All samples in the data's own order: nothing is held out, shuffled or augmented. Ids are places, from 0, in the data (digits,
synthetic, text, a factory's own inputs), and the paths of ``val.txt`` for pictures.

A model outside the registry is what ``--model package.module:factory`` returns; no file ever names one, because importing runs code.
The factory takes no arguments and returns a model, which is evaluated on the data of the experiment's registry model, in whose place it
is, or a model, the inputs of a whole data set (a tensor, or several as a tuple) and a loss, which plays no part.
"""

import contextlib
import dataclasses
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fleetbench.digests import file_digest
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.vectors import Values, name_some, refuse_repeated, write_vectors
from fleetbench.workload import Workload
from fleetbench.workloads.data.data import read_data
from fleetbench.workloads.data.images import evaluation_picture, read_list
from fleetbench.workloads.data.reader import normalise
from fleetbench.workloads.models.registry import build_model, check_model, data_source, model_option, sizes
from real.checkpoints.checkpoint import model_file, read_part
from real.checkpoints.persistables import model_tensors, refuse_another_model
from real.communication.device import device_of

_CHECKPOINT = "--checkpoint"
_MODEL = "--model"


@dataclass(frozen=True, slots=True)
class Samples:
    """A data set by the places of its samples."""

    ids: Sequence[str]
    read: Callable[[int, int], tuple[torch.Tensor, ...]]
    """The model's inputs ``(last - first, ...)`` of samples ``first`` up to ``last``; raises ``ConfigError`` naming a broken sample."""


def evaluate(
    experiment: Experiment,
    path: Path,
    *,
    checkpoint: Path | None = None,
    factory: str | None = None,
    samples: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Write the vectors of a data set, as float32, to a Parquet file at ``path``, and return what was evaluated.

    ``checkpoint``: weights of the model; only the model of a ``factory`` (``package.module:factory``) may do without.
    ``samples``: the first so many, otherwise all.

    The model evaluates (no dropout, batch norm by its stored statistics) in ``workload.dtype``, in
    batches of ``workload.batch_size``, the last one as small as it comes; the strategy plays no part.
    Raises ``ConfigError`` for a model, a checkpoint or data that cannot be evaluated.
    """
    if experiment.run.device == "emulated":
        raise ConfigError("emulated compute gives no vectors", "run.device", "'emulated'", "--set run.device=cpu")
    device = device_of(experiment.run.device)
    file = checkpoint if checkpoint is None or not checkpoint.is_dir() else model_file(checkpoint)
    if factory is None and file is None:
        hint = "--checkpoint FILE with its weights: what fleet.save_persistables wrote, or torch.save(model.state_dict(), FILE)"
        raise ConfigError("has random parameters", "workload.model", repr(experiment.workload.model), hint)
    model, data, source = _registry_model(experiment, device) if factory is None else _external_model(experiment, device, factory)
    if file is not None:
        load_weights(model, file)
    with contextlib.suppress(NotImplementedError):  # an exported program has no modes, and says so
        model.eval()
    num = len(data.ids) if samples is None else samples
    if num > len(data.ids):
        raise ConfigError("is more than the data have", "--samples", str(num), f"at most {len(data.ids)}, or leave it out for all")
    refuse_repeated(data.ids[:num], "workload.data")
    where = f"{_MODEL} {factory}" if factory else "workload.model"
    num_not_finite, begin_s = 0, time.perf_counter()

    def batches() -> Iterator[tuple[Sequence[str], Values]]:
        nonlocal num_not_finite
        for first in range(0, num, experiment.workload.batch_size):
            last = min(first + experiment.workload.batch_size, num)
            inputs = tuple(item.to(device) for item in data.read(first, last))
            try:
                with torch.inference_mode():
                    output = model(*inputs)
            except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:  # the last by an exported program
                if factory is None:
                    raise
                what = f"does not take the data's batches: {type(error).__name__}: {str(error).splitlines()[0]}"
                shape = f"inputs {tuple(inputs[0].shape)} of {inputs[0].dtype}"
                hint = "let the factory return (model, inputs, loss), or choose workload.data that fit; the output must be (batch, classes)"
                raise ConfigError(what, f"{_MODEL} {factory}", shape, hint) from error
            values = _vectors(output, last - first, where)
            num_not_finite += int((~np.isfinite(values).all(axis=1)).sum())
            yield data.ids[first:last], values
            if progress is not None:
                progress(last, num)

    length = write_vectors(path, batches())
    return {
        "model": factory or experiment.workload.model,
        "checkpoint": None if file is None else str(file),
        "checkpoint_sha256": None if file is None else file_digest(file),
        "data": source,
        "samples": num,
        "length": length,
        "num_not_finite": num_not_finite,
        "wall_s": time.perf_counter() - begin_s,
        "skipped": [],
    }


def _registry_model(experiment: Experiment, device: torch.device) -> tuple[nn.Module, Samples, str | None]:
    """The experiment's model, its data, and ``workload.data``."""
    workload, seed = experiment.workload, experiment.run.seed
    samples = open_samples(workload, seed)
    return build_model(workload.model, workload.model_options, workload.dtype, seed).to(device), samples, workload.data


def _external_model(experiment: Experiment, device: torch.device, factory: str) -> tuple[nn.Module, Samples, str | None]:
    """The factory's model, what it is fed with, and ``workload.data``; none where the factory brought its inputs."""
    workload, seed = experiment.workload, experiment.run.seed
    dtype = getattr(torch, workload.dtype)
    model, found = load_external(factory, seed)
    model = model.to(device, dtype)
    if found is None:
        return model, open_samples(workload, seed), workload.data
    inputs, rows = [item.to(device, dtype if item.is_floating_point() else None) for item in found], [len(item) for item in found]
    if len(set(rows)) > 1 or not rows[0]:
        hint = "every tensor of inputs has a row for each of the same samples"
        raise ConfigError("the factory's inputs have no sample, or not the same ones", f"{_MODEL} {factory}", f"{rows} rows", hint)
    return model, Samples(_places(rows[0]), lambda first, last: tuple(item[first:last] for item in inputs)), None


def open_samples(workload: Workload, seed: int) -> Samples:
    """A workload's data. Raises ``ConfigError`` for data that cannot be read, or do not fit the model."""
    check_model(dataclasses.replace(workload, batch_size=max(2, workload.batch_size)))  # no batch is too small for an evaluation
    dtype = getattr(torch, workload.dtype)
    if data_source(workload) != "imagenet":
        inputs = read_data(workload, seed).inputs

        def read_rows(first: int, last: int) -> tuple[torch.Tensor, ...]:
            rows = torch.from_numpy(np.ascontiguousarray(inputs[first:last]))
            if rows.dtype == torch.uint8:  # pictures
                return (normalise(rows, dtype),)
            return (rows.to(dtype) if rows.is_floating_point() else rows,)

        return Samples(_places(len(inputs)), read_rows)
    root, size = Path(workload.data.partition(":")[2]), sizes(workload, "images")
    listed = read_list(root, "val", model_option(workload, "classes"))

    def read_pictures(first: int, last: int) -> tuple[torch.Tensor, ...]:
        with ThreadPoolExecutor(size["workers"]) as threads:
            pictures = list(threads.map(lambda place: evaluation_picture(root, listed, place, size["image_size"]), range(first, last)))
        return (normalise(torch.from_numpy(np.stack(pictures)), dtype),)

    return Samples(listed.paths, read_pictures)


def _places(number: int) -> list[str]:
    return [str(place) for place in range(number)]


def _vectors(output: Any, rows: int, where: str) -> Values:
    """The vectors of a batch of ``rows`` samples. Raises ``ConfigError`` for an output that holds none."""
    hint = "one tensor is needed, with a row a sample; --model FACTORY may return a model that gives one"
    if not isinstance(output, torch.Tensor):
        raise ConfigError("the output is no tensor", where, type(output).__name__, hint)
    if output.dim() == 0 or len(output) != rows or not output.numel():
        raise ConfigError(f"the output holds no vector for each of {rows} samples", where, f"shape {tuple(output.shape)}", hint)
    if not output.is_floating_point():
        raise ConfigError("the output holds no floating-point numbers", where, str(output.dtype), hint)
    vectors: Values = output.reshape(rows, -1).to("cpu", torch.float32).numpy()
    return vectors


def load_external(name: str, seed: int) -> tuple[nn.Module, tuple[torch.Tensor, ...] | None]:
    """Import and call a factory, with torch's random numbers from ``seed``: its model, and the inputs of a data set where it has its own.

    Modules of the working directory are found, after all others. Raises ``ConfigError`` for what is no factory of a model.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = pkgutil.resolve_name(name)()
    except (Exception, SystemExit) as error:  # of the user's module, or of its factory
        hint = "--model package.module:factory; modules of the working directory are found, too; the factory takes no arguments"
        raise ConfigError(f"gives no model: {type(error).__name__}: {error}", _MODEL, name, hint) from error
    if isinstance(made, nn.Module):
        return made, None
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module) and callable(made[2])):
        raise ConfigError(f"the factory returned {type(made).__name__}", _MODEL, name, "it is to return a model, or (model, inputs, loss)")
    inputs = (made[1],) if isinstance(made[1], torch.Tensor) else made[1]
    if not isinstance(inputs, tuple | list) or not inputs or not all(isinstance(item, torch.Tensor) and item.dim() for item in inputs):
        hint = "a tensor, or a tuple of some, with samples in the first dimension"
        raise ConfigError("the inputs are no batch of tensors", _MODEL, name, hint)
    return made[0], tuple(inputs)


def named(experiment: Experiment, name: str) -> Experiment:
    """The experiment of that model: what its vectors are stored under."""
    return experiment.replace(workload=dataclasses.replace(experiment.workload, model=name, model_options={}))


def read_weights(file: Path) -> Mapping[str, torch.Tensor]:
    """Tensors by their names: of a safetensors file, or of ``torch.save(model.state_dict(), file)``. Nothing in it is executed.

    Raises ``ConfigError`` for a file that is damaged or holds anything else.
    """
    if not file.is_file():
        raise ConfigError("no such file", _CHECKPOINT, str(file), "a file of weights, or a folder that fleet.save_persistables wrote")
    if file.suffix == ".safetensors":
        return read_part(file).tensors
    hint = "torch.save(model.state_dict(), FILE) writes such a file, and so does fleet.save_persistables"
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch refuses what is more than tensors, and meets damage, with errors of many kinds
        what = f"cannot be read as weights: {(str(error) or type(error).__name__).splitlines()[0]}"
        raise ConfigError(what, _CHECKPOINT, str(file), hint) from error
    if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        keys = f"keys {name_some([str(key) for key in found])}" if isinstance(found, Mapping) else type(found).__name__
        raise ConfigError("is no table of tensors by their names", f"{_CHECKPOINT} {file}", keys, hint)
    return found


@torch.no_grad()
def load_weights(model: nn.Module, file: Path) -> None:
    """Put all of a file's tensors into the model, whose own they must be: names, shapes and types.

    Tied weights may be stored under any of their names. Raises ``ConfigError`` that names what differs; nothing is loaded then.
    """
    own = model_tensors(model)
    first_names = {id(tensor): name for name, tensor in own.items()}
    names = {name: first_names[id(tensor)] for name, tensor in model.state_dict(keep_vars=True).items()}
    stored = {names.get(name, name): value for name, value in read_weights(file).items()}
    hint = "the model, with the options, that was saved: workload.model, model_options and dtype, or --model package.module:factory"
    refuse_another_model(model, stored, None, f"{_CHECKPOINT} {file}", hint)
    for name, value in stored.items():
        own[name].copy_(value)
