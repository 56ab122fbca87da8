"""External models: what ``--model package.module:factory`` on the command line names, and the data that it is fed with.

No file ever names one: importing runs code. The factory takes no arguments and returns

- a model, which is trained on the experiment's data with cross-entropy, as a registry model is; or
- a model, one batch of inputs (a tensor, or several as a tuple) and a loss: what is called with the
  model's output and returns a scalar. That batch is then every step's.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.workloads.models.data_options import data_source

WHERE = "--model"
_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_RETURNS = "a model, or (model, inputs, loss): inputs are one batch, loss(output) a scalar"
_FED_LIKE = {"digits": "digits_mlp", "pydocs": "bert_base", "text": "bert_base", "imagenet": "resnet50", "criteo": "wide_deep"}
"""Data to the registry model that is fed with them."""

Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class External:
    """What a factory returned; ``inputs`` and ``loss`` are none where the experiment's data are meant."""

    model: nn.Module
    inputs: tuple[torch.Tensor, ...] | None = None
    loss: Loss | None = None

    def computed_loss(self, model: nn.Module) -> torch.Tensor:
        """Of ``model`` on the factory's own batch. Raises ``ConfigError`` for what is no scalar."""
        assert self.inputs is not None
        assert self.loss is not None
        found = self.loss(model(*self.inputs))
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            got = f"a tensor of shape {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
            raise ConfigError("the factory's loss is one number", WHERE, got, "return loss.mean(), or another scalar tensor")
        return found

    def to(self, device: torch.device, dtype: torch.dtype) -> External:
        """The same on a device; numbers that are no integers in ``dtype``."""
        inputs = None
        if self.inputs is not None:
            inputs = tuple(item.to(device, dtype if item.is_floating_point() else None) for item in self.inputs)
        return External(self.model.to(device, dtype), inputs, self.loss)


def load_external(name: str, seed: int, *, trains: bool = True) -> External:
    """Import and call the factory, with torch's random numbers from ``seed``.

    Modules of the working directory are found, behind all others. ``trains``: some parameter is to
    require gradients. Raises ``ConfigError`` for what is
    no factory of a model.
    """
    factory = _factory(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            made = factory()
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"the factory raised {type(error).__name__}: {error}", WHERE, name, "it is called without arguments"
            ) from error
    return _checked(made, name, trains=trains)


def _factory(name: str) -> Callable[[], Any]:
    if not _NAME.fullmatch(name):
        raise ConfigError("names a factory of models", WHERE, repr(name), "--model package.module:factory")
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"cannot be imported: {error}", WHERE, name, "modules of the working directory and of the environment are found"
        ) from error
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise ConfigError(f"raises {type(error).__name__} when it is imported: {error}", WHERE, name, f"mend {module}") from error
    if not hasattr(imported, attribute):
        raise ConfigError(f"{module} has no {attribute}", WHERE, name, f"define {attribute} in {module}, or name what is there")
    found = getattr(imported, attribute)
    if not callable(found):
        raise ConfigError("is nothing that can be called", WHERE, name, f"it is to return {_RETURNS}")
    return found  # type: ignore[no-any-return]  # whatever the user's module holds


def _checked(made: Any, name: str, *, trains: bool) -> External:
    if isinstance(made, nn.Module):
        model, inputs, loss = made, None, None
    elif isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module) and callable(made[2]):
        model, inputs, loss = made
        inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        if not isinstance(inputs, tuple | list) or not inputs or not all(isinstance(item, torch.Tensor) and item.dim() for item in inputs):
            raise ConfigError(
                "the inputs are no batch of tensors", WHERE, name, "a tensor, or a tuple of some, with samples in the first dimension"
            )
        inputs = tuple(inputs)
    else:
        raise ConfigError(f"the factory returned {type(made).__name__}", WHERE, name, f"it is to return {_RETURNS}")
    if trains and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("has no parameter that is trained", WHERE, name, "at least one needs requires_grad = True")
    return External(model, inputs, loss)


def named(experiment: Experiment, name: str) -> Experiment:
    """The experiment of that model: what ``sim`` reads, and what the profile's tables are kept under."""
    return experiment.replace(workload=dataclasses.replace(experiment.workload, model=name, model_options={}))


def stand_in(experiment: Experiment, external: External) -> Experiment:
    """The experiment with a registry model that is fed with the same data, so that these can be prepared.

    Raises ``ConfigError`` for data that nobody can shape for the model, and for a batch of another size.
    """
    workload = experiment.workload
    if external.inputs is not None:
        rows = external.inputs[0].shape[0]
        if rows != workload.batch_size:
            raise ConfigError(
                f"the factory's batch has {rows} samples",
                "workload.batch_size",
                str(workload.batch_size),
                f"--set workload.batch_size={rows}",
            )
        samples = 5 * workload.batch_size * experiment.cluster.trainers
        changes: dict[str, Any] = {"model": "mlp", "data": "synthetic", "data_options": {"samples": samples}}
    else:
        source = data_source(workload)
        if source not in _FED_LIKE:
            hint = f"let the factory return (model, inputs, loss), or set workload.data to {', '.join(_FED_LIKE)}"
            raise ConfigError("nobody knows what this model is fed with", "workload.data", repr(workload.data), hint)
        changes = {"model": _FED_LIKE[source]}
    return experiment.replace(workload=dataclasses.replace(workload, model_options={}, **changes))


def refuse_misfit(name: str, inputs: torch.Tensor, error: Exception) -> ConfigError:
    """What to say where the model does not take the experiment's batches."""
    shape = f"inputs {tuple(inputs.shape)} of {inputs.dtype}"
    hint = "let the factory return (model, inputs, loss), or choose workload.data that fit; the output must be (batch, classes)"
    return ConfigError(
        f"does not take the data's batches: {type(error).__name__}: {str(error).splitlines()[0]}", f"{WHERE} {name}", shape, hint
    )
