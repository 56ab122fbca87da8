"""Persistables: what of a training is saved, by whom, and how a training goes on from it.

Shared, and written by rank 0: parameters, the model's buffers and the optimizer's state as rank 0 has
them, and how far the strategy has come. A trainer's own: its random numbers, what the script added, its
buffers (batch-norm statistics move with a trainer's own batches), a sum of gradients that waits for its
update, and under Local SGD the optimizer's state and, within a round, the parameters.

Within a round of Local SGD the shared model is what an averaging would give now, made on a copy: the
training itself is not disturbed. With an outer optimizer or fragments it is what trainers agreed on last;
a fragment's exchange that is under way is waited for, and its mean is saved beside the outer momentum.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from fleetbench.config import encode, flat
from fleetbench.errors import ConfigError
from fleetbench.plan.fusion import Cost
from fleetbench.plan.state import State
from fleetbench.strategy import DistributedStrategy
from real.checkpoints.checkpoint import MODEL, Part, Save
from real.communication.communicators import strategy_digest
from real.engine.engine import Engine
from real.engine.executor import Carried
from real.engine.planning import Progress

OPTIMIZER = "optimizer.safetensors"
SNAPSHOT = "snapshot.safetensors"
"""Within a round of Local SGD: the values that deltas are measured from."""
OUTER = "outer.safetensors"
"""The outer optimizer's momentum, and the mean distances of the fragment in flight."""

_TAG = "$"
"""Key of what JSON has no type for."""
Tensors = dict[str, torch.Tensor]
Packed = tuple[Sequence[Mapping[str, Any]], Mapping[str, torch.Tensor]]
"""Optimizers as ``pack_optimizer`` makes them, and their tensors."""
_HINT = "build the model, and freeze what is frozen, as when it was saved; predicate=lambda name: ... loads some of it"


def own_part(rank: int) -> str:
    """Name of the part with what one trainer has of its own."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a trainer has read, checked against its model and its optimizer."""

    progress: Progress
    model: Mapping[str, torch.Tensor]
    """Shared parameters and this trainer's buffers."""
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Of this trainer, where a round is open."""
    carried: Carried = field(default_factory=Carried)
    optimizers: Packed = ((), {})
    """As ``unpack_optimizer`` takes them."""
    random: Mapping[str, torch.Tensor] = field(default_factory=dict)
    extra: Any = None


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by the first of their names. Raises ``ConfigError`` where ``state_dict()`` holds more."""
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
    engine: Engine, progress: Progress, extra: tuple[Any, Tensors], *, has_parted: bool
) -> tuple[dict[str, Part], Part, dict[str, Any]]:
    """Everything to save between two steps: the shared parts by name, complete on every trainer, this trainer's own, and the manifest.

    Every trainer calls it. Tensors are still those of the training: write them before it goes on.
    ``has_parted``: some trainer's parameters have left what all agreed on. ``extra``: the script's, packed.
    """
    executor, communicators = engine.executor, engine.communicators
    carried = executor.carried()
    model = model_tensors(engine.model)
    shared = {MODEL: Part(model | executor.averages() if has_parted else model)}
    tensors: Tensors = dict(extra[1])
    plain: dict[str, Any] = {"rank": communicators.rank, "used": sorted(carried.used), "merged": carried.merged, "extra": extra[0]}
    if has_parted:
        shared[SNAPSHOT] = Part(dict(carried.origin))
        tensors |= {f"parameter/{name}": model[name] for name in carried.origin}
    if carried.velocity or carried.landed:
        velocity = {f"velocity/{name}": own for name, own in carried.velocity.items()}
        shared[OUTER] = Part(velocity | {f"landed/{name}": own for name, own in carried.landed.items()})
    tensors |= {f"residual/{name}": own for name, own in carried.residual.items()}
    if communicators.trainers > 1:
        tensors |= {f"buffer/{name}": tensor for name, tensor in model.items() if not isinstance(tensor, nn.Parameter)}
    if engine.optimizers:
        state: Tensors = {}
        shared[OPTIMIZER] = Part(state, [pack_optimizer(one, engine.model, state, "state") for one in engine.optimizers])
        if executor.combination.is_local and communicators.trainers > 1:
            plain["optimizer"] = [pack_optimizer(one, engine.model, tensors, "optimizer") for one in engine.optimizers]
    plain["sparse"] = {}
    for name, total in carried.sums.items():
        if total.is_sparse:
            plain["sparse"][name] = total.is_coalesced()
            tensors |= {f"sum.indices/{name}": total._indices(), f"sum.values/{name}": total._values()}  # noqa: SLF001  # a sum need not be coalesced, and what coalesces it later must add in the same order
        else:
            tensors[f"sum/{name}"] = total
    if carried.loss is not None:
        tensors["loss"] = carried.loss
    tensors["random/cpu"] = torch.get_rng_state()  # from which dropout draws
    if communicators.device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(communicators.device)
    manifest = {
        "trainers": communicators.trainers,
        "strategy": encode(engine.strategy),
        "strategy_digest": strategy_digest(engine.strategy),
        "progress": encode_progress(progress),
        "trained": [name for name, parameter in engine.model.named_parameters() if parameter.requires_grad],
        "parted": has_parted,
    }
    return shared, Part(tensors, plain), manifest


def pack_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Tensors, name: str) -> dict[str, Any]:
    """The optimizer as plain data; its tensors go to ``tensors``, under names that begin with ``name``.

    Raises ``ConfigError`` for state that is no plain data.
    """
    return {
        "class": type(optimizer).__qualname__,
        "groups": groups_of(optimizer, model),
        "state": pack(optimizer.state_dict(), tensors, name, "the optimizer"),
    }


def groups_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """The names of each group's parameters in the model; empty names for others, which are not trained."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]


def refuse_other(optimizer: torch.optim.Optimizer, model: nn.Module, data: Mapping[str, Any], where: str) -> None:
    """Raise ``ConfigError`` unless ``data`` was packed from an optimizer of the same class, with the same groups."""
    own = type(optimizer).__qualname__
    if data["class"] != own:
        raise ConfigError("is another optimizer's", where, f"saved {data['class']}, here {own}", "use the optimizer that was saved")
    groups = groups_of(optimizer, model)
    if len(data["groups"]) != len(groups):
        counts = f"saved {len(data['groups'])}, here {len(groups)}"
        raise ConfigError("has another number of parameter groups", where, counts, "build the optimizer as it was built when it was saved")
    for number, (saved, here) in enumerate(zip(data["groups"], groups, strict=True)):
        if saved != here:
            differs = next((f"{a!r}, here {b!r}" for a, b in zip(saved, here, strict=False) if a != b), f"{len(saved)}, here {len(here)}")
            hint = "build the groups as they were saved"
            raise ConfigError(f"group {number} holds other parameters, or in another order", where, f"saved {differs}", hint)


def unpack_optimizer(optimizer: torch.optim.Optimizer, data: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Load what ``pack_optimizer`` made. State keeps the type it was saved in."""
    state = unpack(data["state"], tensors)
    optimizer.load_state_dict(state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, saved in state.get("state", {}).items():
        if isinstance(index, int) and parameters[index] in optimizer.state:
            own = optimizer.state[parameters[index]]
            optimizer.state[parameters[index]] = _uncast(saved, own, parameters[index].device)


def _uncast(saved: Any, loaded: Any, device: torch.device) -> Any:
    """``loaded`` in the types of ``saved``: torch casts all tensors of a state to the parameter's type, and spoils text and counters."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(device)
    if isinstance(saved, str | Counter):
        return saved
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {key: _uncast(saved[key], value, device) if key in saved else value for key, value in loaded.items()}
    if isinstance(saved, list | tuple) and type(loaded) is type(saved) and len(loaded) == len(saved):
        return type(saved)(_uncast(one, other, device) for one, other in zip(saved, loaded, strict=True))
    return loaded


def encode_progress(progress: Progress) -> dict[str, Any]:
    """Plain data."""
    return {
        "state": progress.state.to_dict(),
        "order": [[name, ready] for name, ready in progress.order.items()],
        "settled": progress.settled,
        "cost": None if progress.cost is None else dataclasses.asdict(progress.cost),
        "plan": progress.plan,
    }


def decode_progress(data: Mapping[str, Any]) -> Progress:
    """The progress that ``encode_progress`` wrote. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for anything else."""
    return Progress(
        state=State.from_dict(data["state"]),
        order={str(name): int(ready) for name, ready in data["order"]},
        settled=bool(data["settled"]),
        cost=None if data["cost"] is None else Cost(**data["cost"] | {"lines": tuple(map(tuple, data["cost"].get("lines", ())))}),
        plan=data["plan"],
    )


def refuse_another_strategy(manifest: Mapping[str, Any], strategy: DistributedStrategy, where: str) -> None:
    """Raise ``ConfigError`` naming the fields in which the strategy is not the saved one."""
    if manifest["strategy_digest"] == strategy_digest(strategy):
        return
    saved, here = dict(flat(manifest["strategy"])), dict(flat(encode(strategy)))
    fields = [f"{name}: saved {saved.get(name)!r}, here {here.get(name)!r}" for name in here | saved if saved.get(name) != here.get(name)]
    hint = "use that strategy, or begin again from the averaged model: fleet.load_persistables(..., resynchronize=True)"
    raise ConfigError("was saved under another strategy", where, "; ".join(fields[:3]) or "the same fields, read by another version", hint)


def refuse_another_model(
    model: nn.Module, saved: Mapping[str, torch.Tensor], trained: Sequence[str] | None, where: str, hint: str = _HINT
) -> None:
    """Raise ``ConfigError`` unless names, shapes and types are the model's, and, where it is told, what is trained."""
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
    """Raise ``ConfigError`` for the first saved tensor, in the model's order, whose shape or type is not that of the model's."""
    for name in own:
        value = saved.get(name, own[name])
        if value.shape != own[name].shape or value.dtype != own[name].dtype:
            saved_as, here = (f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}" for tensor in (value, own[name]))
            raise ConfigError(f"{name} has another shape or type", where, f"saved {saved_as}, here {here}", hint)


def read(engine: Engine, save: Save, rank: int) -> Restored:
    """What ``restore`` takes, of the parts that this trainer needs. Raises ``ConfigError`` for what does not fit."""
    manifest, where = save.manifest, str(save.folder)
    own = save.read(own_part(rank))
    saved = {**save.read(MODEL).tensors, **under("buffer/", own.tensors)}
    refuse_another_model(engine.model, saved, manifest["trained"], where)
    tensors = model_tensors(engine.model)
    parameters, origin = under("parameter/", own.tensors), save.read(SNAPSHOT).tensors if manifest["parted"] else {}
    outer = read_outer(save)
    velocity, landed = under("velocity/", outer), under("landed/", outer)
    for found in (parameters, origin, velocity, landed):
        refuse_misfits(tensors, found, where)
    return Restored(
        progress=decode_progress(manifest["progress"]),
        model=saved,
        parameters=parameters,
        carried=Carried(
            origin=origin,
            velocity=velocity,
            landed=landed,
            residual=under("residual/", own.tensors),
            sums=dict(_sums(own, tensors)),
            merged=own.plain["merged"],
            used=frozenset(own.plain["used"]),
            loss=own.tensors.get("loss"),
        ),
        optimizers=read_optimizers(engine, save, own),
        random=under("random/", own.tensors),
        extra=unpack(own.plain["extra"], own.tensors),
    )


def read_outer(save: Save) -> Mapping[str, torch.Tensor]:
    """What an outer optimizer and fragments have left: ``velocity/`` and ``landed/`` by parameter."""
    return save.read(OUTER).tensors if OUTER in save.manifest["parts"] else {}


def read_optimizers(engine: Engine, save: Save, own: Part | None = None) -> Packed:
    """The optimizers that were saved, a trainer's ``own`` where it has some. Raises ``ConfigError`` where the engine has others."""
    where = str(save.folder)
    if OPTIMIZER not in save.manifest["parts"]:
        if engine.optimizers:
            raise ConfigError("was saved without an optimizer", where, hint="load the model alone: predicate=lambda name: True")
        return [], {}
    if not engine.optimizers:
        hint = "call fleet.distributed_optimizer before, or load the model alone: predicate=lambda name: True"
        raise ConfigError("there is no optimizer yet", "fleet.load_persistables", hint=hint)
    part = save.read(OPTIMIZER)
    found = (part.plain, part.tensors) if own is None or "optimizer" not in own.plain else (own.plain["optimizer"], own.tensors)
    saved = found[0] if isinstance(found[0], list) else [found[0]]  # as there once was one alone
    if len(saved) != len(engine.optimizers):
        kinds = ", ".join(data["class"] for data in saved), ", ".join(type(one).__qualname__ for one in engine.optimizers)
        hint = "give fleet.distributed_optimizer those that were saved, in their order, before the load"
        raise ConfigError("has another number of optimizers", where, f"saved {kinds[0]}, here {kinds[1]}", hint)
    for optimizer, data in zip(engine.optimizers, saved, strict=True):
        refuse_other(optimizer, engine.model, data, where)
    return saved, found[1]


@torch.no_grad()
def restore(engine: Engine, found: Restored, where: str) -> None:
    """Go on from there. Every trainer calls it with what it has checked. Raises ``ConfigError`` where another plan would come of it."""
    device = engine.communicators.device
    sums = {name: total.to(device) for name, total in found.carried.sums.items()}
    loss = None if found.carried.loss is None else found.carried.loss.to(device)
    origin = found.carried.origin or found.model
    engine.resume(found.progress, dataclasses.replace(found.carried, origin=origin, sums=sums, loss=loss), where)
    for optimizer, data in zip(engine.optimizers, found.optimizers[0], strict=False):
        unpack_optimizer(optimizer, data, found.optimizers[1])
    own = model_tensors(engine.model)
    for name, value in (*found.model.items(), *found.parameters.items()):
        own[name].copy_(value)
    engine.communicators.order_lanes()
    engine.note_parameters()
    if "cpu" in found.random:
        torch.set_rng_state(found.random["cpu"].clone())
    if "cuda" in found.random and device.type == "cuda":
        torch.cuda.set_rng_state(found.random["cuda"].clone(), device)


@torch.no_grad()
def put(engine: Engine, chosen: Mapping[str, torch.Tensor]) -> None:
    """Replace some of the model's tensors, the same on every trainer; training goes on from them."""
    own = model_tensors(engine.model)
    for name, value in chosen.items():
        own[name].copy_(value)
    engine.executor.storage.rebase(chosen)
    engine.communicators.order_lanes()
    engine.note_parameters()


def under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors whose names begin with ``prefix``, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _sums(own: Part, model: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from under("sum/", own.tensors).items()
    indices, values = under("sum.indices/", own.tensors), under("sum.values/", own.tensors)
    for name, coalesced in own.plain["sparse"].items():
        total = torch.sparse_coo_tensor(
            indices[name].clone(),
            values[name].clone(),
            model[name].shape,
            device="cpu",
            is_coalesced=coalesced,
            check_invariants=False,
        )
        yield name, total


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "none"


def pack(value: Any, tensors: Tensors, name: str, where: str) -> Any:
    """``value`` for ``json.dumps``; the tensors in it go to ``tensors``, under names that begin with ``name``.

    Values are what schedulers and optimizers call their ``state_dict()``: numbers, text, lists, tuples, dictionaries with any plain keys,
    counters, numpy's arrays, and tensors. Reading them back gives the same types and, for floats, the same bits. None can be code.
    Raises ``ConfigError`` for anything else, naming ``where`` it was given and the place in it.
    """
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "text": repr(float(value))}
    if isinstance(value, torch.Tensor):
        key = name
        while key in tensors:
            key += "'"
        tensors[key] = value.detach()
        return {_TAG: "tensor", "name": key}
    if isinstance(value, np.generic | np.ndarray):
        return _pack_numpy(value, tensors, name, where)
    if isinstance(value, list | tuple):
        items = [pack(item, tensors, f"{name}/{index}", where) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple", "items": items}
    if isinstance(value, Mapping):
        return _pack_mapping(value, tensors, name, where)
    raise _no_plain_data(value, name, where)


def _no_plain_data(value: Any, name: str, where: str) -> ConfigError:
    what = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    hint = "give numbers, text, lists, dictionaries, arrays and tensors, such as scheduler.state_dict()"
    return ConfigError("can be saved as no plain data", f"{where}: {name}", what, hint)


def _pack_numpy(value: Any, tensors: Tensors, name: str, where: str) -> Any:
    if isinstance(value, np.generic):
        return pack(value.item(), tensors, name, where)
    try:
        tensor = torch.from_numpy(np.array(value, order="C"))  # a copy, which may be written to
    except (TypeError, ValueError):
        raise _no_plain_data(value, name, where) from None
    return {_TAG: "array", "of": pack(tensor, tensors, name, where)}


def _pack_mapping(value: Mapping[Any, Any], tensors: Tensors, name: str, where: str) -> Any:
    counts = isinstance(value, Counter)
    if not counts and all(type(key) is str for key in value) and _TAG not in value:
        return {key: pack(item, tensors, f"{name}/{key}", where) for key, item in value.items()}
    pairs = [[pack(key, tensors, name, where), pack(item, tensors, f"{name}/{key}", where)] for key, item in value.items()]
    return {_TAG: "counter" if counts else "map", "items": pairs}


def unpack(data: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that ``pack`` was given, tensors copied. Raises ``ValueError`` or ``KeyError`` for what ``pack`` never wrote."""
    if isinstance(data, list):
        return [unpack(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    return _unpack_mapping(data, tensors)


def _unpack_mapping(data: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    match data.get(_TAG):
        case None:
            return {key: unpack(item, tensors) for key, item in data.items()}
        case "float":
            return float(data["text"])
        case "tensor":
            return tensors[data["name"]].clone()
        case "array":
            return unpack(data["of"], tensors).numpy()
        case "tuple":
            return tuple(unpack(item, tensors) for item in data["items"])
        case "map" | "counter" as kind:
            pairs = {unpack(key, tensors): unpack(item, tensors) for key, item in data["items"]}
            return Counter(pairs) if kind == "counter" else pairs
        case other:
            raise ValueError(f"no kind of plain data: {other!r}")
