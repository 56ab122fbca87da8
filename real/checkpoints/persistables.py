"""Persistables: which state of a training is saved, by which trainer, and how a training continues from it.

Rank 0 writes the shared state: its parameters, its buffers, its optimizer's state, and the strategy's
progress. Every trainer writes its own: its random numbers, the script's ``extra``, its buffers (batch-norm
statistics follow a trainer's own batches), gradients summed but not yet applied, and under Local SGD the
optimizer's state and, within a round, the parameters.

Within a round of Local SGD the shared model is the average of the current models, computed on a copy, so
that the training is not disturbed. With an outer optimizer or fragments it is the model on which trainers
last agreed; a pending exchange of a fragment is awaited, and its mean is saved with the outer momentum.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fleetbench.config import encode, flat
from fleetbench.errors import ConfigError
from fleetbench.plan.fusion import Cost
from fleetbench.plan.state import State
from fleetbench.strategy import DistributedStrategy
from real.engine.carried import Carried
from real.engine.engine import Engine
from real.engine.planning import Progress

SHARED = "training.pt"
"""Name of the part with the shared state besides models' tensors: progress, optimizers, and tables of ``Carried``."""
_SHARED_TABLES = ("origin", "velocity", "landed")
Tensors = Mapping[str, torch.Tensor]
_HINT = "build the model, and freeze what is frozen, as when it was saved; predicate=lambda name: ... loads some of it"


def own_part(rank: int) -> str:
    """Return the name of the part with one trainer's own state."""
    return f"rank-{rank:05d}.pt"


class Captured(NamedTuple):
    """A model's state to save between two steps. Tensors are the training's own: write them before it continues."""

    tensors: Tensors
    """Parameters and buffers that trainers share."""
    shared: dict[str, Any]
    own: dict[str, Any]
    """State that only this trainer has."""


class Restored(NamedTuple):
    """A model's state that a trainer has read and checked."""

    progress: Progress
    carried: Carried
    tensors: Tensors
    """This trainer's parameters and buffers."""


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by their first names.

    Raises ``ConfigError`` if ``state_dict()`` holds more.
    """
    stored = model.state_dict(keep_vars=True)
    found: dict[str, torch.Tensor] = {**dict(model.named_parameters())}
    found |= {name: buffer for name, buffer in model.named_buffers() if name in stored}
    known = {id(tensor) for tensor in found.values()}
    extra = [name for name, value in stored.items() if id(value) not in known]
    if extra:
        what = "holds state that is neither a parameter nor a buffer"
        raise ConfigError(what, f"the model's {extra[0]}", type(stored[extra[0]]).__name__, "register it as a buffer, or save it as extra=")
    return found


def capture(engine: Engine, progress: Progress, *, has_parted: bool) -> Captured:
    """Return a model's state. Every trainer calls it; tensors and shared state are complete on each.

    ``has_parted``: some trainer's parameters differ from those on which all agreed.
    """
    executor, model = engine.executor, model_tensors(engine.model)
    carried = executor.carried()
    tables = {item.name: getattr(carried, item.name) for item in dataclasses.fields(carried)}
    shared: dict[str, Any] = {name: dict(tables.pop(name)) for name in _SHARED_TABLES}
    if not has_parted:
        shared["origin"] = {}
    shared |= {
        "progress": encode_progress(progress),
        "strategy": engine.strategy.changes(),
        "trained": [name for name, parameter in engine.model.named_parameters() if parameter.requires_grad],
        "parted": has_parted,
    }
    own = {
        "carried": {**tables, "used": sorted(carried.used), "loss": None if carried.loss is None else carried.loss.detach()},
        "parameters": {name: model[name].detach() for name in shared["origin"]},
        "buffers": {name: tensor for name, tensor in model.items() if not isinstance(tensor, nn.Parameter)},
    }
    tensors = model | executor.averages() if has_parted else model
    return Captured({name: tensor.detach() for name, tensor in tensors.items()}, shared, own)


def pack_optimizer(optimizer: torch.optim.Optimizer, *models: nn.Module) -> dict[str, Any]:
    """Return the optimizer as plain data with tensors."""
    return {"class": type(optimizer).__qualname__, "groups": groups_of(optimizer, *models), "state": optimizer.state_dict()}


def groups_of(optimizer: torch.optim.Optimizer, *models: nn.Module) -> list[list[str]]:
    """Return the names of each group's parameters; empty names stand for untrained parameters outside the models.

    With several models, a name begins with its model's number.
    """
    pairs = zip(prefixes(models), models, strict=True)
    names = {id(parameter): prefix + name for prefix, model in pairs for name, parameter in model.named_parameters()}
    return [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]


def prefixes(models: Sequence[object]) -> list[str]:
    """Return what comes before each model's names where those of several models are together."""
    return [f"{number}." for number in range(len(models))] if len(models) > 1 else [""]


def unpack_optimizer(optimizer: torch.optim.Optimizer, data: Mapping[str, Any]) -> None:
    """Load data from ``pack_optimizer``. State keeps the type in which it was saved.

    Torch casts every tensor of a state except ``step`` to the parameter's type, and spoils text and counters.
    """
    optimizer.load_state_dict(data["state"])
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, saved in data["state"].get("state", {}).items():
        if isinstance(index, int) and isinstance(own := optimizer.state.get(parameters[index]), dict):
            for key in own.keys() & saved.keys() - {"step"}:
                own[key] = pytree.tree_map_only(torch.Tensor, partial(torch.Tensor.to, device=parameters[index].device), saved[key])


def encode_progress(progress: Progress) -> dict[str, Any]:
    """Return the progress as plain data."""
    cost = None if progress.cost is None else dataclasses.asdict(progress.cost)
    own = {"order": dict(progress.order), "settled": progress.settled, "plan": progress.plan}
    return {"state": progress.state.to_dict(), "cost": cost, **own}


def decode_progress(data: Mapping[str, Any]) -> Progress:
    """Return the progress that ``encode_progress`` wrote.

    Raises ``KeyError``, ``TypeError`` or ``ValueError`` for anything else.
    """
    cost = None if data["cost"] is None else Cost(**data["cost"])
    return Progress(**{**data, "state": State.from_dict(data["state"]), "cost": cost})


def refuse_another_strategy(changes: Mapping[str, Any], strategy: DistributedStrategy, where: str) -> None:
    """Raise ``ConfigError``, naming the fields that differ, unless the strategy is the one with the saved ``changes``."""
    if changes != strategy.changes():
        saved, here = (dict(flat(encode(one))) for one in (DistributedStrategy.from_dict(changes), strategy))
        differs = [name for name in here | saved if saved.get(name) != here.get(name)]
        fields = [f"{name}: saved {saved.get(name)!r}, here {here.get(name)!r}" for name in differs[:3]]
        hint = "use that strategy, or restart from the averaged model: fleet.load_persistables(..., resynchronize=True)"
        raise ConfigError("was saved under another strategy", where, "; ".join(fields), hint)


def refuse_another_model(
    model: nn.Module, saved: Mapping[str, torch.Tensor], trained: Sequence[str] | None, where: str, hint: str = _HINT
) -> None:
    """Raise ``ConfigError`` unless names, shapes, types and (if given) ``trained`` are the model's."""
    own = model_tensors(model)
    missing, unknown = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    if missing or unknown:
        names = f"not saved: {_some(missing)}; not in the model: {_some(unknown)}"
        raise ConfigError("was saved from another model", where, names, hint)
    refuse_misfits(own, saved, where, hint)
    here = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if trained is not None and list(trained) != here:
        differs = sorted(set(trained) ^ set(here))
        raise ConfigError("was saved while other parameters were trained", where, _some(differs) or "their order", _HINT)


def refuse_misfits(own: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], where: str, hint: str = _HINT) -> None:
    """Raise ``ConfigError`` for the first saved tensor whose shape or type differs from the model's."""
    for name in own:
        value = saved.get(name, own[name])
        if value.shape != own[name].shape or value.dtype != own[name].dtype:
            saved_as, here = (f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}" for tensor in (value, own[name]))
            raise ConfigError(f"{name} has another shape or type", where, f"saved {saved_as}, here {here}", hint)


def restored(engine: Engine, tensors: Tensors, shared: Mapping[str, Any], own: Mapping[str, Any], where: str) -> Restored:
    """Return a saved model's state for this trainer. Raises ``ConfigError`` for another strategy or model."""
    refuse_another_strategy(shared["strategy"], engine.strategy, where)
    tensors = {**tensors, **own["buffers"]}
    refuse_another_model(engine.model, tensors, shared["trained"], where)
    tables = {name: shared[name] for name in _SHARED_TABLES} | {"used": frozenset(own["carried"]["used"])}
    tables["origin"] = tables["origin"] or tensors
    to_device = pytree.tree_map_only(torch.Tensor, partial(torch.Tensor.to, device=engine.communicators.device), own["carried"])
    return Restored(decode_progress(shared["progress"]), Carried(**{**to_device, **tables}), {**tensors, **own["parameters"]})


def refuse_other_optimizers(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], saved: Sequence[Mapping[str, Any]], where: str
) -> None:
    """Raise ``ConfigError`` unless the optimizers have the saved classes and groups of parameters."""
    kinds = [data["class"] for data in saved], [type(one).__qualname__ for one in optimizers]
    if kinds[0] != kinds[1]:
        told, here = (", ".join(names) or "none" for names in kinds)
        hint = "give fleet.distributed_optimizer those that were saved, before the load; predicate=lambda name: True loads only the model"
        raise ConfigError("was saved with other optimizers", where, f"saved {told}, here {here}", hint)
    hint = "build the optimizer's groups as they were built when it was saved"
    for optimizer, data in zip(optimizers, saved, strict=True):
        for number, (names, others) in enumerate(zip_longest(data["groups"], groups_of(optimizer, *models), fillvalue=())):
            if names != others:
                pairs = zip_longest(names, others, fillvalue="no more")
                differs = next(f"saved {a!r}, here {b!r}" for a, b in pairs if a != b)
                raise ConfigError(f"group {number} holds other parameters, or in another order", where, differs, hint)


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of torch's generators, from which dropout draws."""
    return {"cpu": torch.get_rng_state(), **({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})}


def set_random_state(saved: Tensors, device: torch.device) -> None:
    """Continue torch's generators from ``random_state``."""
    torch.set_rng_state(saved["cpu"])
    if "cuda" in saved and device.type == "cuda":
        torch.cuda.set_rng_state(saved["cuda"], device)


@torch.no_grad()
def put(engine: Engine, chosen: Mapping[str, torch.Tensor]) -> None:
    """Replace some of the model's tensors, the same on every trainer; training continues from them."""
    engine.executor.storage.rebase(chosen)
    replace(engine, chosen)


@torch.no_grad()
def replace(engine: Engine, values: Tensors) -> None:
    """Replace some of the model's tensors."""
    own = model_tensors(engine.model)
    for name, value in values.items():
        own[name].copy_(value)
    engine.communicators.order_lanes()
    engine.note_parameters()


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "none"
