"""Checkpoints of a server: its shard, its optimizer's state and which requests are in it, in one safetensors file, replaced at a stroke.

The file holds a SHA-256 of all that is read from it: of one that was damaged nothing is believed.
A server freezes a moment, which copies it, and goes on while the copy is written.

What is guaranteed: a file is one moment between two updates, whole, or the one before it. A server
that begins from it goes on from that moment: a push that is in it is not applied again, and one that was
not yet acknowledged is sent again by its trainer. Another job that begins from it brings its own rules: the
parameters and the optimizer's state are the file's. What is lost: the pushes that were acknowledged
after the file was written; trainers say how many. Shards of different servers are not of one moment.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fleetbench.digests import Unverified, reading
from fleetbench.errors import ConfigError
from fleetbench.plan.servers.states import ServerState, state_of
from real.servers.shard import Shard
from real.servers.spec import Spec

_FORMAT = "fleetbench parameter server 2"
_WITHOUT_DIGEST = "fleetbench parameter server 1"
"""The format before; one flipped bit does not make it of the other."""
_DIGEST = "sha256"


@dataclass(frozen=True, slots=True)
class Saved:
    """What a server begins from."""

    shard: Shard
    state: ServerState
    applied: dict[int, int] = field(default_factory=dict)
    """Session of a trainer's connection to the last of its requests that is in the shard."""
    left: tuple[int, ...] = ()
    """Read from a file: trainers that had ended; they have not, where another job begins from it."""
    lost: tuple[int, ...] = ()
    """... and trainers that had fallen silent."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """One moment of a server, in memory of its own."""

    name: str
    """Of the file."""
    tensors: dict[str, np.ndarray[Any, Any]]
    metadata: dict[str, str]


def shard_path(folder: Path, server: int, servers: int) -> Path:
    """Where a server's shard lies."""
    return folder / f"shard-{server:05d}-of-{servers:05d}.safetensors"


def freeze(saved: Saved) -> Frozen:
    """Copy what a checkpoint holds."""
    shard = saved.shard
    tensors = {f"parameters.{number}": array.copy() for number, array in enumerate(shard.arrays)}
    for number, slots in enumerate(shard.optimizer.state):
        tensors |= {f"state.{number}.{slot}": array.copy() for slot, array in slots.items()}
    metadata = {
        "format": _FORMAT,
        "spec": shard.spec.to_json().decode(),
        "server": str(shard.server),
        "steps": json.dumps(shard.optimizer.steps),
        "state": json.dumps(saved.state._asdict()),
        "applied": json.dumps({str(session): number for session, number in saved.applied.items()}),
    }
    return Frozen(shard_path(Path(), shard.server, shard.spec.rules.servers).name, tensors, metadata)


def digest(tensors: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str]) -> str:
    """SHA-256 of all that a file holds, but of itself."""
    described = [[name, str(array.dtype), array.shape] for name, array in sorted(tensors.items())]
    told = sorted((key, value) for key, value in metadata.items() if key != _DIGEST)
    found = hashlib.sha256(json.dumps([told, described]).encode())
    for _, array in sorted(tensors.items()):
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def write(folder: Path, frozen: Frozen) -> Path:
    """Write a checkpoint; the one before stays until this one is complete. Raises ``OSError``."""
    path = folder / frozen.name
    folder.mkdir(parents=True, exist_ok=True)
    for abandoned in folder.glob(f"{path.stem}.*.partial"):  # by a life of this server that was killed while it wrote
        abandoned.unlink(missing_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        save_file(frozen.tensors, partial, {**frozen.metadata, _DIGEST: digest(frozen.tensors, frozen.metadata)})
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(path)
    except SafetensorError as error:  # whose text holds the operating system's
        raise OSError(str(error)) from error
    finally:
        partial.unlink(missing_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return path


def save_shard(folder: Path, saved: Saved) -> Path:
    """Freeze and write. Raises ``OSError``."""
    return write(folder, freeze(saved))


def load_shard(folder: Path, server: int, servers: int) -> Saved | None:
    """The checkpoint of a server; none where there is none. Raises ``ConfigError`` for one that cannot be begun from."""
    path = shard_path(folder, server, servers)
    if not path.exists():
        others = sorted(folder.glob("shard-*-of-*.safetensors"))
        if others and not any(other.name.endswith(f"-of-{servers:05d}.safetensors") for other in others):
            what = f"holds shards of another number of servers than {servers}"
            raise ConfigError(what, str(folder), others[0].name, "start as many servers as wrote it")
        return None
    hint = "take another checkpoint: it was damaged since it was saved, or another version wrote it; or remove it to begin anew"
    with reading(path, hint, SafetensorError), safe_open(path, framework="np") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        return _decoded(metadata, tensors, server)


def _decoded(metadata: dict[str, str], tensors: dict[str, np.ndarray[Any, Any]], server: int) -> Saved:
    if metadata.get("format") == _WITHOUT_DIGEST:
        message = f"the shard of server {server} was written without a digest: whether it is whole is not known"
        warnings.warn(message, Unverified, stacklevel=2)
    elif metadata.get("format") != _FORMAT or _DIGEST not in metadata:
        raise ValueError(f"it has another format than {_FORMAT!r}, or no digest")
    elif metadata[_DIGEST] != (found := digest(tensors, metadata)):
        raise ValueError(f"it is not what was saved: its SHA-256 is {found[:16]}..., saved {metadata[_DIGEST][:16]!r}...")
    shard = Shard(Spec.from_json(metadata["spec"]), server)
    if int(metadata["server"]) != server:
        raise ValueError(f"it is of server {metadata['server']}")
    for number, array in enumerate(shard.arrays):
        _fill(array, tensors[f"parameters.{number}"])
        for slot, held in shard.optimizer.state[number].items():
            _fill(held, tensors[f"state.{number}.{slot}"])
    shard.optimizer.steps[:] = [int(steps) for steps in json.loads(metadata["steps"])]
    shard.mark_all()
    state = state_of("server", json.loads(metadata["state"]))
    assert isinstance(state, ServerState)
    applied = {int(session): int(number) for session, number in json.loads(metadata["applied"]).items()}
    # Who had arrived, met or left belongs to processes that may be others by now.
    blank = state._replace(joining=(), arrived=(), met=(), left=(), lost=(), stopped=False)
    return Saved(shard, blank, applied, state.left, state.lost)


def _fill(array: np.ndarray[Any, Any], saved: np.ndarray[Any, Any]) -> None:
    if array.shape != saved.shape or array.dtype != saved.dtype:
        raise ValueError(f"an array of {saved.dtype} and shape {saved.shape} instead of {array.dtype} and {array.shape}")
    array[...] = saved
