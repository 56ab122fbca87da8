"""Evaluation: the last layer's vector of every sample of a data set, by one process."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.result import skip
from fleetbench.vectors import Values, VectorWriter, refuse_repeated
from real.communication.device import device_of
from real.evaluation.samples import Given, Samples, open_samples
from real.evaluation.weights import load_weights, weights_file
from real.external import load_external, refuse_misfit, stand_in
from real.models.data_options import reader
from real.models.registry import build_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is evaluated, beside what the experiment says."""

    checkpoint: Path | None = None
    """Weights of the model; only a factory may do without."""
    model: str | None = None
    """A model outside the registry, ``package.module:factory``."""
    layer: str | None = None
    """Submodule whose output is taken; otherwise the model's own."""
    samples: int | None = None
    """The first so many; otherwise all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What was written."""

    model: str
    checkpoint: str | None
    checkpoint_sha256: str | None
    layer: str | None
    data: str | None
    """``workload.data``; none where the model's factory brought its inputs."""
    samples: int
    length: int
    """Numbers of a vector."""
    num_not_finite: int
    """Samples whose vector holds NaN or infinity."""
    wall_s: float
    """From before the first batch is read to behind the last one."""
    skipped: tuple[dict[str, str], ...]


def evaluate(experiment: Experiment, wanted: Wanted, path: Path, progress: Callable[[int, int], None] | None = None) -> Evaluated:
    """Write the vectors of a data set, as float32, to a Parquet file at ``path``; nothing is there unless all are.

    The model evaluates (no dropout, batch norm by its stored statistics) in ``workload.dtype``, in
    batches of ``workload.batch_size``, the last one as small as it comes; the strategy plays no part.
    Raises ``ConfigError`` for a model, a checkpoint, a layer or data that cannot be evaluated.
    """
    if experiment.run.device == "emulated":
        raise ConfigError("emulated compute gives no vectors", "run.device", "'emulated'", "--set run.device=cpu")
    device = device_of(experiment.run.device)
    file = None if wanted.checkpoint is None else weights_file(wanted.checkpoint)
    model, samples = _model_and_samples(experiment, wanted, device)
    if file is not None:
        load_weights(model, file)
    with contextlib.suppress(NotImplementedError):  # an exported program has no modes, and says so
        model.eval()
    num_samples = len(samples.ids) if wanted.samples is None else wanted.samples
    if num_samples > len(samples.ids):
        raise ConfigError(
            "is more than the data have", "--samples", str(num_samples), f"at most {len(samples.ids)}, or leave it out for all"
        )
    refuse_repeated(samples.ids[:num_samples], "workload.data")
    num_not_finite, begin_s = 0, time.perf_counter()
    with LayerOutput(model, wanted.layer) as output, VectorWriter(path) as writer:
        for first in range(0, num_samples, experiment.workload.batch_size):
            last = min(first + experiment.workload.batch_size, num_samples)
            inputs = tuple(item.to(device) for item in samples.read(first, last))
            values = _vectors(_forward(output, inputs, wanted.model), last - first, wanted)
            writer.add(samples.ids[first:last], values)
            num_not_finite += int((~np.isfinite(values).all(axis=1)).sum())
            if progress is not None:
                progress(last, num_samples)
    return Evaluated(
        model=wanted.model or experiment.workload.model,
        checkpoint=None if file is None else str(file),
        checkpoint_sha256=None if file is None else _sha256(file),
        layer=wanted.layer,
        data=None if isinstance(samples, Given) else experiment.workload.data,
        samples=num_samples,
        length=writer.length,
        num_not_finite=num_not_finite,
        wall_s=time.perf_counter() - begin_s,
        skipped=_skipped(experiment),
    )


def _model_and_samples(experiment: Experiment, wanted: Wanted, device: torch.device) -> tuple[nn.Module, Samples]:
    workload, seed = experiment.workload, experiment.run.seed
    if wanted.model is None:
        samples = open_samples(workload, seed)
        if wanted.checkpoint is None:
            hint = "--checkpoint FILE with its weights: what fleet.save_persistables wrote, or torch.save(model.state_dict(), FILE)"
            raise ConfigError("has random parameters", "workload.model", repr(workload.model), hint)
        return build_model(workload.model, workload.model_options, workload.dtype, seed).to(device), samples
    external = load_external(wanted.model, seed, trains=False).to(device, getattr(torch, workload.dtype))
    if external.inputs is not None:
        return external.model, Given(external.inputs, wanted.model)
    return external.model, open_samples(stand_in(experiment, external).workload, seed)


def _forward(output: LayerOutput, inputs: tuple[torch.Tensor, ...], model: str | None) -> Any:
    if model is None:
        return output.of(inputs)
    try:
        return output.of(inputs)
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:  # the last by an exported program
        raise refuse_misfit(model, inputs[0], error) from error


def _vectors(output: Any, rows: int, wanted: Wanted) -> Values:
    where = f"--layer {wanted.layer}" if wanted.layer else f"--model {wanted.model}" if wanted.model else "workload.model"
    hint = "one tensor is needed, with a row a sample; --layer NAME takes the output of a submodule"
    if not isinstance(output, torch.Tensor):
        raise ConfigError("the output is no tensor", where, type(output).__name__, hint)
    if output.dim() == 0 or len(output) != rows or not output.numel():
        raise ConfigError(f"the output holds no vector for each of {rows} samples", where, f"shape {tuple(output.shape)}", hint)
    if not output.is_floating_point():
        raise ConfigError("the output holds no floating-point numbers", where, str(output.dtype), hint)
    vectors: Values = output.reshape(rows, -1).to("cpu", torch.float32).numpy()
    return vectors


def _skipped(experiment: Experiment) -> tuple[dict[str, str], ...]:
    if reader(experiment.workload) == "dali":
        return (skip("workload.data_options.reader", "an evaluation decodes with Pillow, as the held-out loss does"),)
    return ()


def _sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


class LayerOutput:
    """Takes a submodule's output, or the model's own. A context manager: its hook is gone behind it.

    Raises ``ConfigError`` for a name that is no submodule's.
    """

    def __init__(self, model: nn.Module, layer: str | None) -> None:
        self._model = model
        self._layer = layer
        self._found: list[Any] = []
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> Self:
        if self._layer is not None:
            names = [name for name, _ in self._model.named_modules(remove_duplicate=False) if name]
            if self._layer not in names:
                near = difflib.get_close_matches(self._layer, names, n=5, cutoff=0.3) or names[-5:]
                raise ConfigError(
                    "not a submodule of the model", "--layer", repr(self._layer), f"for example {', '.join(near) or 'none: it has none'}"
                )
            self._hook = self._model.get_submodule(self._layer).register_forward_hook(self._keep)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _keep(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._found.append(output.clone() if isinstance(output, torch.Tensor) else output)  # the next layer may work in place

    @torch.inference_mode()
    def of(self, inputs: tuple[torch.Tensor, ...]) -> Any:
        """The output for a batch. Raises ``ConfigError`` for a submodule that does not run exactly once."""
        self._found.clear()
        output = self._model(*inputs)
        if self._layer is None:
            return output
        if len(self._found) != 1:
            hint = "name a layer that runs once; what is called as a function, or inside an exported program, cannot be named"
            raise ConfigError("does not run once in a forward", f"--layer {self._layer}", f"{len(self._found)} times", hint)
        return self._found[0]
