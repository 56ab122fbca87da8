"""Weights: a stored model's parameters and buffers, put into a model that was built elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from fleetbench.errors import ConfigError
from fleetbench.vectors import name_some
from real.checkpoints.checkpoint import model_file, read_part

WHERE = "--checkpoint"

_ENDINGS = (".safetensors", ".pt", ".pth", ".bin")


def weights_file(path: Path) -> Path:
    """The file with the model of a checkpoint, which is that file or its folder. Raises ``ConfigError`` where there is none."""
    file = model_file(path) if path.is_dir() else path
    if not file.is_file():
        raise ConfigError("no such file", WHERE, str(file), "a file of weights, or a folder that fleet.save_persistables wrote")
    if file.suffix == ".pt2":
        hint = "name the weights that it was exported from; or load it in a factory of your own: --model package.module:factory"
        raise ConfigError("torch reads an exported program by unpickling it, which may run anything", WHERE, str(file), hint)
    if file.suffix not in _ENDINGS:
        raise ConfigError("not a kind of file that weights are read from", WHERE, str(file), ", ".join(_ENDINGS))
    return file


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """Tensors by their names: of a safetensors file, or of ``torch.save(model.state_dict(), file)``. Nothing in it is executed.

    Raises ``ConfigError`` for a file that is damaged or holds anything else.
    """
    if file.suffix == ".safetensors":
        return dict(read_part(file).tensors)
    hint = "torch.save(model.state_dict(), FILE) writes such a file, and so does fleet.save_persistables"
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch refuses what is more than tensors, and meets damage, with errors of many kinds
        raise ConfigError(
            f"cannot be read as weights: {(str(error) or type(error).__name__).splitlines()[0]}", WHERE, str(file), hint
        ) from error
    if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        keys = f"keys {name_some([str(key) for key in found])}" if isinstance(found, Mapping) else type(found).__name__
        raise ConfigError("is no table of tensors by their names", f"{WHERE} {file}", keys, hint)
    return dict(found)


@torch.no_grad()
def load_weights(model: nn.Module, file: Path) -> None:
    """Put all of a file's tensors into the model, whose own they must be: names, shapes and types.

    A name that shares its memory with a stored one (tied weights) may be missing. Raises ``ConfigError``
    that names what differs; nothing is loaded then.
    """
    stored = read_weights(file)
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    held = {own[name].data_ptr() for name in stored if name in own and own[name].numel()}
    missing = [name for name, value in own.items() if name not in stored and value.data_ptr() not in held]
    unknown = [name for name in stored if name not in own]
    if missing or unknown:
        what = f"{len(missing)} of the model's {len(own)} tensors are missing" if missing else f"{len(unknown)} tensors are not the model's"
        names = f"missing {name_some(missing) or 'none'}; not the model's {name_some(unknown) or 'none'}"
        hint = "the model, with the options, that was saved: workload.model and workload.model_options, or --model package.module:factory"
        raise ConfigError(what, f"{WHERE} {file}", names, hint)
    for name, value in stored.items():
        if value.shape != own[name].shape:
            hint = "the model options that were saved: workload.model_options"
            shapes = f"{tuple(value.shape)}, the model's is {tuple(own[name].shape)}"
            raise ConfigError(f"{name} has another shape", f"{WHERE} {file}", shapes, hint)
        if value.dtype != own[name].dtype:
            types = f"{value.dtype}, the model's is {own[name].dtype}".replace("torch.", "")
            hint = f"--set workload.dtype={str(value.dtype).removeprefix('torch.')}, or cast what was saved, and know that it was"
            raise ConfigError(f"{name} is of another type", f"{WHERE} {file}", types, hint)
    for name, value in stored.items():
        own[name].copy_(value)
