"""Checkpoint of a sharded training: trainers of a shard group write their rows, and any number of trainers reads them.

    PATH/save-00000007/shard-00002.safetensors  rank 2's rows, as PARAMETER and PARAMETER//SLOT
    PATH/save-00000007/training.pt              the training's progress, and the optimizer without those rows
    PATH/save-00000007/rank-00002.pt            rank 2's buffers, its random numbers, and the script's ``extra``

With workers that update alone, the trainers of every worker write rows. As in ``real.checkpoints.checkpoint``, a save
is complete or not there at all, and nothing in it is executed. ``torch.distributed.checkpoint`` is not used, because
its format begins with a pickle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fleetbench.config import encode
from fleetbench.digests import reading
from fleetbench.errors import ConfigError
from fleetbench.plan.loss_scaling import Scale
from fleetbench.plan.sharding import degree_of
from fleetbench.plan.state import State as RoundsState
from real.checkpoints.checkpoint import Save, open_save
from real.checkpoints.meeting import Meeting
from real.checkpoints.persistables import (
    SHARED,
    model_tensors,
    own_part,
    pack_optimizer,
    refuse_another_model,
    refuse_other_optimizers,
    unpack_optimizer,
)
from real.checkpoints.saving import ANOTHER, LOAD, SAVE, SEVERAL_FOLDERS, Loaded, in_force, put_in_force
from real.engine.refusals import refuse_open
from real.sharding.engine import ShardedEngine

Tensors = dict[str, torch.Tensor]
State = dict[int, dict[str, Any]]
"""State of an optimizer, by index of the parameter and name of the slot."""
_OUTER = "outer momentum"
"""Name of the slot of the outer optimizer's momentum."""
_SHARDS = "shards"
"""Key of the manifest for the number of trainers in a shard group."""


def save(engine: ShardedEngine, meeting: Meeting, path: Path, *, extra: object) -> None:
    """Save between two updates. Every trainer calls it. Raises as ``real.checkpoints.saving.save`` does."""
    engine.between_steps(SAVE)
    refuse_open(engine.rounds is None or engine.rounds.has_agreed, 0, SAVE)
    model, degree = model_tensors(engine.model), _degree(engine)
    packed = pack_optimizer(engine.optimizer, engine.model)
    state, rows = _split(packed, model)
    meeting.meet(SAVE)
    meeting.same(str(path), "saves elsewhere", SAVE, SEVERAL_FOLDERS)
    hint = "save after the same step on every trainer"
    meeting.same(str(engine.num_done), "is at another step", SAVE, hint)
    sharded = {name: own for name, own in model.items() if isinstance(own, DTensor)}
    rows |= {name: own.to_local() for name, own in sharded.items()}
    if engine.rounds is not None:
        rows |= {f"{name}//{_OUTER}": own for name, own in engine.by_name(engine.rounds.velocity).items()}
    shared = {
        "step": engine.num_done,
        "epoch": engine.epoch,
        "scale": None if engine.scale is None else dataclasses.astuple(engine.scale),
        "rounds": None if engine.rounds is None else engine.rounds.decider.state.to_dict(),
        "optimizer": {**packed, "state": {**packed["state"], "state": state}},
        "tensors": {name: (list(own.shape), own.dtype) for name, own in sharded.items()},
    }
    own: dict[str, Any] = {
        "buffers": {name: own for name, own in model.items() if name not in sharded},
        "random": {"cpu": torch.get_rng_state()},
        "extra": extra,
    }
    if engine.communicators.device.type == "cuda":
        own["random"]["cuda"] = torch.cuda.get_rng_state(engine.communicators.device)
    parts = {own_part(meeting.rank): own, **({_part(meeting.rank): rows} if meeting.rank < degree or engine.rounds is not None else {})}
    told = {
        "trainers": meeting.trainers,
        "strategy": encode(engine.strategy),
        "trained": [*engine.parameters],
        _SHARDS: degree,
    }
    put_in_force(meeting, path, {SHARED: shared}, parts, told)


@torch.no_grad()
def load(engine: ShardedEngine, meeting: Meeting, path: Path) -> Loaded:
    """Continue from a sharded checkpoint of any number of trainers and any stage. Every trainer calls it.

    A trainer gets its own buffers and random state; if the number of trainers differs, it gets rank 0's buffers, and
    its random state stays. Raises ``ConfigError`` on all trainers if the checkpoint does not fit any of them; nothing
    has changed then.
    """
    engine.between_steps(LOAD)
    refuse_open(engine.rounds is None or engine.rounds.has_agreed, 0, LOAD)
    meeting.meet(LOAD)
    meeting.same(str(path), "loads from elsewhere", LOAD, SEVERAL_FOLDERS)
    number = in_force(meeting, path)
    with meeting.together(LOAD), ExitStack() as files:
        found = open_save(path, number)
        with reading(found.folder, ANOTHER):
            where, alike = str(found.folder), found.manifest["trainers"] == meeting.trainers
            if _SHARDS not in found.manifest:
                hint = "load its model.safetensors into the plain model before fleet.distributed_model"
                raise ConfigError("was saved by a training that was not sharded", where, hint=hint)
            shared, own = found.read(SHARED), found.read(own_part(meeting.rank if alike else 0))
            rounds = shared.get("rounds")
            tensors = shared["tensors"].items()
            saved = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in tensors}
            refuse_another_model(engine.model, saved | own["buffers"], found.manifest["trained"], where)
            refuse_other_optimizers([engine.model], [engine.optimizer], [shared["optimizer"]], where)
            keeps_apart = alike and rounds is not None and engine.rounds is not None
            read = _Rows(found, _degree(engine), meeting.rank, files, apart=keeps_apart)
            model = model_tensors(engine.model)
            velocity = dict[str, torch.Tensor]()
            if engine.rounds is not None and engine.rounds.velocity and read.has(_OUTER):
                velocity = {name: read.of(f"{name}//{_OUTER}", own) for name, own in engine.parameters.items() if isinstance(own, DTensor)}
            parameters = {name: read.of(name, own) for name, own in model.items() if isinstance(own, DTensor)}
            state = _joined(shared["optimizer"], model, read)
    for name, tensor in model.items():
        if isinstance(tensor, DTensor):
            tensor.to_local().copy_(parameters[name])
            tensor.grad = None
        else:
            tensor.copy_(own["buffers"][name])
    unpack_optimizer(engine.optimizer, {"state": {**shared["optimizer"]["state"], "state": state}})
    scale = None if shared["scale"] is None else Scale(*shared["scale"])
    engine.resume(shared["step"], shared["epoch"], scale)
    if engine.rounds is not None:
        is_same = alike and found.manifest["strategy"] == encode(engine.strategy)
        begun = engine.rounds.decider.state if rounds is None else RoundsState.from_dict(rounds)
        engine.rounds.resume(begun, engine.by_bucket(velocity) if velocity else (), same_strategy=is_same)
    if alike:
        torch.set_rng_state(own["random"]["cpu"])
        if "cuda" in own["random"] and engine.communicators.device.type == "cuda":
            torch.cuda.set_rng_state(own["random"]["cuda"], engine.communicators.device)
    return Loaded(step=engine.step, epoch=engine.epoch, loaded=tuple(model), extra=own["extra"])


class _Rows:
    """This trainer's rows of the saved tensors, which may be in several files."""

    def __init__(self, save: Save, degree: int, rank: int, files: ExitStack, *, apart: bool) -> None:
        """``apart``: whether each worker reads its own files, since optimizer states differ, or the first worker's."""
        self._save, self._files = save, files
        saved_by = save.manifest[_SHARDS]
        is_within = saved_by % degree == 0  # else a worker would mix the states of several
        self._first_file = rank // saved_by * saved_by if apart and is_within else 0
        self._degree, self._place = degree, rank % degree
        self._opened: dict[int, Any] = {}

    def of(self, key: str, like: DTensor) -> torch.Tensor:
        """Return this trainer's rows of the tensor saved as ``key``, which is sharded like ``like``."""
        rows, saved_by = like.shape[0], self._save.manifest[_SHARDS]
        own, each = _each(rows, self._degree), _each(rows, saved_by)
        first, end = min(rows, self._place * own), min(rows, (self._place + 1) * own)
        pieces = []
        for part in range(saved_by):
            begin, stop = max(first - part * each, 0), min(end - part * each, each)
            if begin < stop:
                pieces.append(self._file(part).get_slice(key)[begin:stop])
        return torch.cat(pieces).to(like.device) if pieces else torch.empty_like(like.to_local())

    def has(self, slot: str) -> bool:
        """Whether a slot was saved for any parameter."""
        return any(key.endswith(f"//{slot}") for key in self._file(0).keys())  # noqa: SIM118  # it is no mapping

    def _file(self, part: int) -> Any:
        if part not in self._opened:
            from safetensors import safe_open

            opened = safe_open(self._save.file(_part(self._first_file + part)), framework="pt")
            self._opened[part] = self._files.enter_context(opened)
        return self._opened[part]


def _degree(engine: ShardedEngine) -> int:
    return degree_of(engine.strategy.sharding_configs, engine.communicators.trainers)


def _part(place: int) -> str:
    return f"shard-{place:05d}.safetensors"


def _each(rows: int, parts: int) -> int:
    """Return the number of rows of every shard except the last ones, as torch cuts them; at least 1."""
    return max(1, -(-rows // parts))


def _split(packed: Mapping[str, Any], model: Mapping[str, torch.Tensor]) -> tuple[State, Tensors]:
    """Return an optimizer's state with types in place of shards, and the shards by name.

    Raises ``ConfigError`` for tensors that are not sharded like their parameter, because they may differ between
    trainers.
    """
    names = [name for group in packed["groups"] for name in group]
    rest: State = {}
    rows: Tensors = {}
    for index, slots in packed["state"]["state"].items():
        like: Any = model[names[index]]
        rest[index] = dict(slots)
        for slot, value in slots.items():
            is_sharded = isinstance(value, DTensor)
            if is_sharded and value.shape == like.shape and value.placements == like.placements:
                rows[f"{names[index]}//{slot}"] = value.to_local()
                rest[index][slot] = {"sharded": value.dtype}
            elif is_sharded or (isinstance(value, torch.Tensor) and value.numel() > 1):
                where, hint = f"optimizer {packed['class']}", "use one whose state is like AdamW's"
                what = "keeps state that is not sharded as its parameter"
                raise ConfigError(what, where, f"{slot} of {names[index]}", hint)
    return rest, rows


def _joined(packed: Mapping[str, Any], model: Mapping[str, torch.Tensor], read: _Rows) -> State:
    """Return the state that ``_split`` took apart, with this trainer's rows."""
    names = [name for group in packed["groups"] for name in group]
    state = {index: dict(slots) for index, slots in packed["state"]["state"].items()}
    for index, slots in state.items():
        for slot, value in slots.items():
            if isinstance(value, dict) and "sharded" in value:
                own: DTensor = torch.zeros_like(model[names[index]], dtype=value["sharded"])
                own.to_local().copy_(read.of(f"{names[index]}//{slot}", own))
                slots[slot] = own
    return state
