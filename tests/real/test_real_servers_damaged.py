"""Damaged checkpoints of servers: a file whose bits or length differ from what was written is refused, or has the same content."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_job import dice

from fleetbench.errors import ConfigError
from fleetbench.plan.servers.rules import ServerRules, Shards, Table
from fleetbench.workloads.server_updates import OPTIONS
from real.servers.checkpoints import load_shard, shard_path, write_shard
from real.servers.parameters import Shard, Spec

FLIPS = 500


def saved(folder: Path, optimizer: str) -> tuple[Path, Shard]:
    """A trained shard's file, and what is in it."""
    chance = np.random.default_rng(7)
    spec = Spec(
        rules=ServerRules(mode="asynchronous", trainers=2, servers=1),
        shards=Shards(servers=1, dense=40, tables=(Table(name="words", rows=30, width=3),)),
        dense=("d 40",),
        dtype="float32",
        optimizer=optimizer,
        options=OPTIONS[optimizer],
    )
    shard = Shard(spec, 0)
    for array in (*shard.arrays, *(held for slots in shard.optimizer.state for held in slots.values())):
        array[...] = chance.standard_normal(array.shape)
    shard.optimizer.steps[:] = [5, 3]
    assert write_shard(folder, shard, 5) == ""
    return shard_path(folder, 0, 1), shard


def content_of(held: tuple[Shard, int]) -> tuple[Any, ...]:
    """All that a server begins from."""
    shard, version = held
    state = [(slot, array.tobytes()) for slots in shard.optimizer.state for slot, array in slots.items()]
    return shard.spec, shard.optimizer.steps, [array.tobytes() for array in shard.arrays], state, version


def outcome(path: Path, text: bytes, good: tuple[Any, ...]) -> str:
    """What becomes of a server that begins from this file."""
    path.write_bytes(text)
    try:
        back = load_shard(path.parent, 0, 1)
    except ConfigError as error:
        return "refused" if (error.exit_code, error.where) == (2, str(path)) else "refused elsewhere"
    assert back is not None
    return "the same" if content_of(back) == good else "believed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", ["sgd", pytest.param("momentum", marks=pytest.mark.slow), pytest.param("adam", marks=pytest.mark.slow)]
)
def test_no_damaged_shard_is_believed(optimizer: str, tmp_path: Path) -> None:
    """500 single flipped bits, and the file cut at every 64th byte; the sound file is taken."""
    path, _ = saved(tmp_path, optimizer)
    sound = path.read_bytes()
    back = load_shard(tmp_path, 0, 1)
    assert back is not None
    good = content_of(back)
    chance, found = dice(1), Counter[str]()
    for bit in chance.sample(range(8 * len(sound)), FLIPS):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        found[outcome(path, bytes(damaged), good)] += 1
    for length in range(0, len(sound), 64):
        found[outcome(path, sound[:length], good)] += 1
    assert found.keys() <= {"refused", "the same"}, found
    assert found["refused"] > 0.9 * found.total()
    assert outcome(path, sound, good) == "the same"
