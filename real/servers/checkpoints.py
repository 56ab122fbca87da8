"""Checkpoints of a server: its shard, its optimizer's state and which requests are in it, in one safetensors file, replaced at a stroke.

The file holds a SHA-256 of all that is read from it: of one that was damaged nothing is believed.
While a server writes, trainers wait for its answers.

What is guaranteed: a file is one moment between two updates, whole, or the one before it. A server
that begins from it goes on from that moment: a push that is in it is not applied again, and one that was
not yet acknowledged is sent again by its trainer. Another job that begins from it brings its own rules: the
parameters and the optimizer's state are the file's. What is lost: the pushes that were acknowledged
after the file was written; trainers say how many. Shards of different servers are not of one moment.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fleetbench.digests import atomic_write, reading
from fleetbench.errors import ConfigError
from fleetbench.plan.servers.states import ServerState, state_of
from real.servers.parameters import Shard, Spec

Arrays = dict[str, np.ndarray[Any, Any]]

_FORMAT = "fleetbench parameter server 2"
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
    """Trainers that had left when it was written."""
    lost: tuple[int, ...] = ()


def shard_path(folder: Path, server: int, servers: int) -> Path:
    """Where a server's shard lies."""
    return folder / f"shard-{server:05d}-of-{servers:05d}.safetensors"


def _content(saved: Saved) -> tuple[Arrays, dict[str, str]]:
    shard = saved.shard
    tensors = {f"parameters.{number}": np.ascontiguousarray(array) for number, array in enumerate(shard.arrays)}
    for number, slots in enumerate(shard.optimizer.state):
        tensors |= {f"state.{number}.{slot}": np.ascontiguousarray(array) for slot, array in slots.items()}
    metadata = {
        "format": _FORMAT,
        "spec": shard.spec.to_json().decode(),
        "server": str(shard.server),
        "steps": json.dumps(shard.optimizer.steps),
        "state": json.dumps(saved.state._asdict()),
        "applied": json.dumps({str(session): number for session, number in saved.applied.items()}),
    }
    return tensors, metadata


def _digest(tensors: Arrays, metadata: Mapping[str, str]) -> str:
    """SHA-256 of all that a file holds, but of itself."""
    described = [[name, str(array.dtype), array.shape] for name, array in sorted(tensors.items())]
    told = sorted((key, value) for key, value in metadata.items() if key != _DIGEST)
    found = hashlib.sha256(json.dumps([told, described]).encode())
    for _, array in sorted(tensors.items()):
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _write(path: Path, tensors: Arrays, metadata: dict[str, str]) -> None:
    """Write a checkpoint; the one before stays until this one is complete. Raises ``OSError`` or ``SafetensorError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, durable=True) as partial:
        save_file(tensors, partial, {**metadata, _DIGEST: _digest(tensors, metadata)})


def load_shard(folder: Path, server: int, servers: int) -> Saved | None:
    """The checkpoint of a server; none where there is none. Raises ``ConfigError`` for one that cannot be begun from."""
    path = shard_path(folder, server, servers)
    if not path.exists():
        others = sorted(folder.glob("shard-*-of-*.safetensors"))
        if others and not any(other.name.endswith(f"-of-{servers:05d}.safetensors") for other in others):
            what = f"holds shards of another number of servers than {servers}"
            raise ConfigError(what, str(folder), others[0].name, "start as many servers as wrote it")
        return None
    hint = "take another checkpoint: it was damaged since it was saved, or another version wrote it; or remove it to begin again"
    with reading(path, hint, SafetensorError), safe_open(path, framework="np") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        return _decoded(metadata, tensors, server)


def _decoded(metadata: dict[str, str], tensors: Arrays, server: int) -> Saved:
    if metadata.get("format") != _FORMAT or _DIGEST not in metadata:
        raise ValueError(f"it has another format than {_FORMAT!r}, or no digest")
    if metadata[_DIGEST] != (found := _digest(tensors, metadata)):
        raise ValueError(f"it is not what was saved: its SHA-256 is {found[:16]}..., saved {metadata[_DIGEST][:16]!r}...")
    shard = Shard(Spec.from_json(metadata["spec"]), server)
    if int(metadata["server"]) != server:
        raise ValueError(f"it is of server {metadata['server']}")
    for number, array in enumerate(shard.arrays):
        array[...] = tensors[f"parameters.{number}"]
        for slot, held in shard.optimizer.state[number].items():
            held[...] = tensors[f"state.{number}.{slot}"]
    shard.optimizer.steps[:] = [int(steps) for steps in json.loads(metadata["steps"])]
    state = state_of("server", json.loads(metadata["state"]))
    assert isinstance(state, ServerState)
    applied = {int(session): int(number) for session, number in json.loads(metadata["applied"]).items()}
    # Who had arrived, met or left belongs to processes that may be others by now.
    blank = state._replace(joining=(), arrived=(), met=(), left=(), lost=(), stopped=False)
    return Saved(shard, blank, applied, state.left, state.lost)


class Writer:
    """Writes a server's checkpoints: its own, at intervals and at its end, and others that trainers ask for.

    ``moment`` gives what is to be saved; ``say`` hears of a checkpoint that could not be written.
    """

    def __init__(self, moment: Callable[[], Saved], say: Callable[[str], None], folder: Path) -> None:
        self._moment, self._say = moment, say
        self._folders = {os.path.realpath(folder)}
        self.own: Path | None = None
        """Where the server's own go; none: it has none."""
        self._every_s: float | None = None
        self.due_at = 0.0
        """When it writes the next of these, if it writes any at intervals."""

    def allow(self, folder: Path) -> None:
        """Trainers may ask for checkpoints below this folder, too."""
        self._folders.add(os.path.realpath(folder))

    def refusal(self, folder: Path) -> str:
        """Why a trainer's checkpoint is not written there, wherever links lead; empty where it is."""
        where = Path(os.path.realpath(folder))
        if any(where.is_relative_to(own) for own in self._folders):
            return ""
        own = " or ".join(sorted(self._folders))
        return f"{where} is not below {own}, where trainers may have this server write; fleet.run_server(save_to=...) names another folder"

    def every(self, seconds: float | None, folder: Path | None) -> None:
        """The server's own go to ``folder``, and are due every so many seconds; none: at its end alone."""
        self._every_s, self.own, self.due_at = seconds, folder, time.monotonic() + (seconds or 0.0)
        if folder is not None:
            self.allow(folder)

    @property
    def is_due(self) -> bool:
        """Whether one of the server's own is."""
        return self._every_s is not None and self.own is not None and time.monotonic() >= self.due_at

    def write(self, folder: Path | None = None) -> str:
        """Write what there is now to a folder, or as one of the server's own; the error, empty where it was written."""
        if folder is None:
            folder, self.due_at = self.own, time.monotonic() + (self._every_s or 0.0)
        assert folder is not None
        saved = self._moment()
        try:
            _write(shard_path(folder, saved.shard.server, saved.shard.spec.rules.servers), *_content(saved))
        except (OSError, SafetensorError, ValueError, MemoryError) as error:  # ValueError: no folder has that name
            why = str(error) or type(error).__name__
            self._say(f"no checkpoint in {folder}: {why}")
            return why
        return ""
