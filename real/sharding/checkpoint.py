"""Checkpoint of a sharded training: trainers of a shard group write their rows, and any number of trainers reads them.

    PATH/save-00000007/shard-00002.pt  rank 2's rows of parameters, optimizer and outer momentum
    PATH/save-00000007/training.pt     the training's progress
    PATH/save-00000007/rank-00002.pt   rank 2's buffers, its random numbers, and the script's ``extra``

With workers that update alone, the trainers of every worker write rows. As in ``real.checkpoints.checkpoint``, a save
is complete or not there at all, and nothing in it is executed. ``torch.distributed.checkpoint`` is not used: its
metadata are a pickle, and its state of an optimizer comes from a step of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from fleetbench.config import encode
from fleetbench.digests import reading
from fleetbench.errors import ConfigError
from fleetbench.plan.loss_scaling import Scale
from fleetbench.plan.sharding import degree_of
from fleetbench.plan.state import State
from real.checkpoints.checkpoint import open_save
from real.checkpoints.meeting import Meeting
from real.checkpoints.persistables import (
    SHARED,
    model_tensors,
    own_part,
    pack_optimizer,
    random_state,
    refuse_another_model,
    refuse_other_optimizers,
    set_random_state,
    unpack_optimizer,
)
from real.checkpoints.saving import ANOTHER, LOAD, SAVE, SEVERAL_FOLDERS, Loaded, in_force, put_in_force
from real.engine.refusals import refuse_open
from real.sharding.engine import ShardedEngine

_SHARDS = "shards"
"""Key of the manifest for the number of trainers in a shard group."""
_ROWS = "fleetbench: rows"
"""Key of a trainer's rows, in place of a sharded tensor. No attribute and no option is called so."""


def save(engine: ShardedEngine, meeting: Meeting, path: Path, *, extra: object) -> None:
    """Save between two updates. Every trainer calls it. Raises as ``real.checkpoints.saving.save`` does."""
    _meet(engine, meeting, path, SAVE)
    meeting.same(str(engine.num_done), "is at another step", SAVE, "save after the same step on every trainer")
    model, rounds, rank = model_tensors(engine.model), engine.rounds, meeting.rank
    degree = degree_of(engine.strategy.sharding_configs, engine.communicators.trainers)
    shared = {
        "step": engine.num_done,
        "epoch": engine.epoch,
        "scale": None if engine.scale is None else dataclasses.astuple(engine.scale),
        "rounds": None if rounds is None else rounds.decider.state.to_dict(),
    }
    own = {
        "buffers": {name: value for name, value in model.items() if not isinstance(value, DTensor)},
        "random": random_state(engine.communicators.device),
        "extra": extra,
    }
    rows = {
        "model": {name: value for name, value in model.items() if isinstance(value, DTensor)},
        "optimizer": pack_optimizer(engine.optimizer, engine.model),
    }
    rows = pytree.tree_map_only(torch.Tensor, _rows_of(next(iter(rows["model"].values()))), rows)
    rows["velocity"] = {} if rounds is None else {name: {_ROWS: value} for name, value in rounds.velocity.items()}
    parts = {own_part(rank): own} | ({_part(rank): rows} if rank < degree or rounds is not None else {})
    told = {"trainers": meeting.trainers, "strategy": encode(engine.strategy), "trained": [*engine.parameters], _SHARDS: degree}
    put_in_force(meeting, path, {SHARED: shared}, parts, told)


@torch.no_grad()
def load(engine: ShardedEngine, meeting: Meeting, path: Path) -> Loaded:
    """Continue from a sharded checkpoint of any number of trainers and any stage. Every trainer calls it.

    A trainer gets its own buffers and random state; if the number of trainers differs, it gets rank 0's buffers, and
    its random state stays. Raises ``ConfigError`` on all trainers if the checkpoint does not fit any of them; nothing
    has changed then.
    """
    _meet(engine, meeting, path, LOAD)
    number = in_force(meeting, path)
    with meeting.together(LOAD):
        found = open_save(path, number)
        with reading(found.folder, ANOTHER):
            where, alike = str(found.folder), found.manifest["trainers"] == meeting.trainers
            if _SHARDS not in found.manifest:
                hint = "load its model.pt into the plain model before fleet.distributed_model"
                raise ConfigError("was saved by a training that was not sharded", where, hint=hint)
            shared, own = found.read(SHARED), found.read(own_part(meeting.rank if alike else 0))
            degree, shards = degree_of(engine.strategy.sharding_configs, meeting.trainers), found.manifest[_SHARDS]
            # Workers' optimizers differ. A worker that is larger than those that saved gets the first one's.
            is_apart = alike and engine.rounds is not None and shared["rounds"] is not None and shards % degree == 0
            first = meeting.rank // shards * shards if is_apart else 0
            trees = [found.read(_part(first + place), mmap=True) for place in range(shards)]
            sizes = {name: torch.cat([tree["model"][name][_ROWS].to("meta") for tree in trees]) for name in trees[0]["model"]}
            refuse_another_model(engine.model, sizes | own["buffers"], found.manifest["trained"], where)
            refuse_other_optimizers([engine.model], [engine.optimizer], [trees[0]["optimizer"]], where)
            model = model_tensors(engine.model)
            like = next(value for value in model.values() if isinstance(value, DTensor))
            rows = pytree.tree_map(_joined(like), *trees, is_leaf=lambda one: isinstance(one, dict) and _ROWS in one)
    for name, tensor in model.items():
        tensor.copy_({**rows["model"], **own["buffers"]}[name])
        tensor.grad = None
    unpack_optimizer(engine.optimizer, rows["optimizer"])
    engine.resume(shared["step"], shared["epoch"], None if shared["scale"] is None else Scale(*shared["scale"]))
    if engine.rounds is not None:
        begun = engine.rounds.decider.state if shared["rounds"] is None else State.from_dict(shared["rounds"])
        velocity = {name: value.to_local() for name, value in rows["velocity"].items()}
        is_same = alike and found.manifest["strategy"] == encode(engine.strategy)
        engine.rounds.resume(begun, velocity, same_strategy=is_same)
    if alike:
        set_random_state(own["random"], engine.communicators.device)
    return Loaded(step=engine.step, epoch=engine.epoch, loaded=tuple(model), extra=own["extra"])


def _meet(engine: ShardedEngine, meeting: Meeting, path: Path, where: str) -> None:
    """Meet between two updates, or rounds."""
    engine.between_steps(where)
    refuse_open(engine.rounds is None or engine.rounds.has_agreed, 0, where)
    meeting.meet(where)
    meeting.same(str(path), "has another folder", where, SEVERAL_FOLDERS)


def _part(rank: int) -> str:
    return f"shard-{rank:05d}.pt"


def _rows_of(like: DTensor) -> Callable[[torch.Tensor], Any]:
    """Return a function from a tensor to what a trainer saves: its rows of one that is sharded as ``like``.

    It raises ``ConfigError`` for other tensors of an optimizer, which may differ between trainers.
    """

    def rows(value: torch.Tensor) -> Any:
        if isinstance(value, DTensor) and value.placements == like.placements:
            return {_ROWS: value.detach().to_local()}
        if value.numel() > 1:
            hint = "use one whose state is like AdamW's"
            raise ConfigError("keeps state that is not sharded as its parameter", "the optimizer", f"shape {list(value.shape)}", hint)
        return value

    return rows


def _joined(like: DTensor) -> Callable[..., Any]:
    """Return a function from what the trainers of a shard group have saved to a tensor that is sharded as ``like``."""

    def joined(*found: Any) -> Any:
        if not isinstance(found[0], dict):
            return found[0].clone() if isinstance(found[0], torch.Tensor) else found[0]
        whole = torch.cat([each[_ROWS] for each in found]).to(like.device)
        mesh = like.device_mesh
        return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(placements=like.placements)

    return joined
