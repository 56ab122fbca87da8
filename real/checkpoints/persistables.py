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
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fleetbench.config import encode, flat
from fleetbench.errors import ConfigError
from fleetbench.plan.fusion import Cost
from fleetbench.plan.state import State
from fleetbench.strategy import DistributedStrategy
from real.checkpoints.checkpoint import MODEL, Save
from real.communication.communicators import strategy_digest
from real.engine.carried import Carried
from real.engine.engine import Engine
from real.engine.planning import Progress

SHARED = "training.pt"
"""Name of the part with the shared state besides the model: progress, optimizers, and tables of
``Carried``."""
_SHARED_TABLES = ("origin", "velocity", "landed")
Tensors = Mapping[str, torch.Tensor]
_HINT = "build the model, and freeze what is frozen, as when it was saved; predicate=lambda name: ... loads some of it"


def own_part(rank: int) -> str:
    """Return the name of the part with one trainer's own state."""
    return f"rank-{rank:05d}.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """State that a trainer has read and checked against its model and its optimizer."""

    progress: Progress
    model: Tensors
    """Shared parameters and this trainer's buffers."""
    parameters: Tensors = field(default_factory=dict)
    """This trainer's parameters by name, within an open round; else empty."""
    carried: Carried = field(default_factory=Carried)
    optimizers: Sequence[Mapping[str, Any]] = ()
    """Data of each optimizer, for ``unpack_optimizer``."""
    random: Tensors = field(default_factory=dict)
    extra: Any = None


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


def capture(
    engine: Engine, progress: Progress, optimizers: Sequence[Mapping[str, Any]], extra: Any, *, has_parted: bool
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a model's state to save between two steps: shared parts by name, this trainer's part, the manifest.

    Every trainer calls it; the shared parts are complete on each. Tensors are the training's own: write them
    before it continues. ``has_parted``: some trainer's parameters differ from those on which all agreed.
    ``optimizers``: packed ones. ``extra``: the script's object.
    """
    executor, communicators = engine.executor, engine.communicators
    carried, model = executor.carried(), model_tensors(engine.model)
    tables = {item.name: getattr(carried, item.name) for item in dataclasses.fields(carried)}
    shared = {name: dict(tables.pop(name)) for name in _SHARED_TABLES}
    if not has_parted:
        shared["origin"] = {}
    own = {
        "carried": {**tables, "used": sorted(carried.used), "loss": None if carried.loss is None else carried.loss.detach()},
        "parameters": {name: model[name].detach() for name in shared["origin"]},
        "buffers": {name: tensor for name, tensor in model.items() if communicators.trainers > 1 and not isinstance(tensor, nn.Parameter)},
        "optimizers": optimizers if executor.combination.is_local and communicators.trainers > 1 else [],
        "random": {"cpu": torch.get_rng_state()},  # dropout draws from it
        "extra": extra,
    }
    if communicators.device.type == "cuda":
        own["random"]["cuda"] = torch.cuda.get_rng_state(communicators.device)
    manifest = {
        "strategy": encode(engine.strategy),
        "strategy_digest": strategy_digest(engine.strategy),
        "trained": [name for name, parameter in engine.model.named_parameters() if parameter.requires_grad],
        "parted": has_parted,
    }
    parts = {
        MODEL: model | executor.averages() if has_parted else model,
        SHARED: {**shared, "progress": encode_progress(progress), "optimizers": optimizers},
    }
    return parts, own, manifest


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


def refuse_another_strategy(manifest: Mapping[str, Any], strategy: DistributedStrategy, where: str) -> None:
    """Raise ``ConfigError``, naming the fields that differ, unless the strategy is the saved one."""
    if manifest["strategy_digest"] == strategy_digest(strategy):
        return
    saved, here = dict(flat(manifest["strategy"])), dict(flat(encode(strategy)))
    fields = [f"{name}: saved {saved.get(name)!r}, here {here.get(name)!r}" for name in here | saved if saved.get(name) != here.get(name)]
    hint = "use that strategy, or restart from the averaged model: fleet.load_persistables(..., resynchronize=True)"
    raise ConfigError("was saved under another strategy", where, "; ".join(fields[:3]) or "the same fields, read by another version", hint)


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


def read(engine: Engine, save: Save, rank: int) -> Restored:
    """Read the parts that this trainer needs, for ``restore``. Raises ``ConfigError`` if they do not fit."""
    where, own, shared = save.where, save.read(own_part(rank)), save.read(SHARED)
    saved = {**save.read(MODEL), **own["buffers"]}
    refuse_another_model(engine.model, saved, save.manifest["trained"], where)
    tensors, tables = model_tensors(engine.model), {name: shared[name] for name in _SHARED_TABLES}
    for found in (own["parameters"], *tables.values()):
        refuse_misfits(tensors, found, where)
    return Restored(
        progress=decode_progress(shared["progress"]),
        model=saved,
        parameters=own["parameters"],
        carried=Carried(**{**own["carried"], **tables, "used": frozenset(own["carried"]["used"])}),
        optimizers=own["optimizers"] or shared["optimizers"],
        random=own["random"],
        extra=own["extra"],
    )


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
        groups, own = data["groups"], groups_of(optimizer, *models)
        if len(groups) != len(own):
            raise ConfigError("has another number of parameter groups", where, f"saved {len(groups)}, here {len(own)}", hint)
        for number, (names, others) in enumerate(zip(groups, own, strict=True)):
            if names != others:
                pairs = zip_longest(names, others, fillvalue="no more")
                differs = next(f"saved {a!r}, here {b!r}" for a, b in pairs if a != b)
                raise ConfigError(f"group {number} holds other parameters, or in another order", where, differs, hint)


@torch.no_grad()
def restore(engine: Engine, found: Restored, optimizers: Sequence[torch.optim.Optimizer], where: str) -> None:
    """Continue from ``found``, which every trainer has checked, with the optimizers whose data it has.

    Raises ``ConfigError`` if another plan would result.
    """
    device = engine.communicators.device
    sums = {name: total.to(device) for name, total in found.carried.sums.items()}
    loss = None if found.carried.loss is None else found.carried.loss.to(device)
    origin = found.carried.origin or found.model
    engine.resume(found.progress, dataclasses.replace(found.carried, origin=origin, sums=sums, loss=loss), where)
    for optimizer, data in zip(optimizers, found.optimizers, strict=True):
        unpack_optimizer(optimizer, data)
    _replace(engine, {**found.model, **found.parameters})
    if "cpu" in found.random:
        torch.set_rng_state(found.random["cpu"])
    if "cuda" in found.random and device.type == "cuda":
        torch.cuda.set_rng_state(found.random["cuda"], device)


@torch.no_grad()
def put(engine: Engine, chosen: Mapping[str, torch.Tensor]) -> None:
    """Replace some of the model's tensors, the same on every trainer; training continues from them."""
    engine.executor.storage.rebase(chosen)
    _replace(engine, chosen)


@torch.no_grad()
def _replace(engine: Engine, values: Tensors) -> None:
    own = model_tensors(engine.model)
    for name, value in values.items():
        own[name].copy_(value)
    engine.communicators.order_lanes()
    engine.note_parameters()


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "none"
