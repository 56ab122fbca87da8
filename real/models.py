"""The registry's models, by the names of the experiment file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature

import torch
from torch import nn

from fleetbench.errors import ConfigError
from fleetbench.workload import ModelOption, Workload


def mlp(features: int = 32, classes: int = 10, hidden: int = 64, depth: int = 2) -> nn.Module:
    """A perceptron of ``depth`` hidden layers of ``hidden`` units; input ``(batch, ...)`` of ``features`` numbers."""
    layers: list[nn.Module] = [nn.Flatten()]
    width = features
    for _ in range(depth):
        layers += [nn.Linear(width, hidden), nn.ReLU()]
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, classes))


def digits_mlp(hidden: int = 256, depth: int = 2) -> nn.Module:
    """``mlp`` for 8 x 8 digits in 10 classes."""
    return mlp(features=64, classes=10, hidden=hidden, depth=depth)


def digits_cnn(channels: int = 32, hidden: int = 128) -> nn.Module:
    """Two convolutions and two linear layers for 8 x 8 digits in 10 classes; input ``(batch, 8, 8)``."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * 16, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )


DIGITS_FEATURES = 64

MODELS: Mapping[str, Callable[..., nn.Module]] = {"mlp": mlp, "digits_mlp": digits_mlp, "digits_cnn": digits_cnn}


def check_model(workload: Workload) -> None:
    """Raise ``ConfigError`` for an unknown model or option, or one that does not fit the data."""
    _check_options(workload.model, workload.model_options)
    features = workload.model_options.get("features", 32)
    if workload.model == "mlp" and workload.data == "digits" and features != DIGITS_FEATURES:
        hint = 'set it to 64, or workload.data = "synthetic"'
        raise ConfigError("the digits have 64 features", "workload.model_options.features", repr(features), hint)


def _check_options(name: str, options: Mapping[str, ModelOption]) -> None:
    if name not in MODELS:
        raise ConfigError("not a model that can be executed", "workload.model", repr(name), f"one of {', '.join(MODELS)}")
    known = signature(MODELS[name]).parameters
    for option, value in options.items():
        if option not in known:
            raise ConfigError("not an option of this model", f"workload.model_options.{option}", hint=f"{name} takes {', '.join(known)}")
        if type(value) is not int or value < 1:
            raise ConfigError(
                "must be a whole number of at least 1", f"workload.model_options.{option}", repr(value), f"for example {option} = 2"
            )


def build_model(name: str, options: Mapping[str, ModelOption], dtype: str, seed: int) -> nn.Module:
    """The model with initial parameters that depend on ``seed`` alone; torch's global generator is left as it was."""
    _check_options(name, options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name](**options).to(getattr(torch, dtype))
