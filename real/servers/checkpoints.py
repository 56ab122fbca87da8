"""Checkpoints of a server: its shard and its optimizer's state, in one safetensors file that is replaced atomically.

The file contains a SHA-256 of everything that is read from it, and is refused if it is damaged. It holds the state
between two updates; a crash during a save leaves the previous file intact. While a server writes, trainers wait for
its answers. A job that begins from the file takes the parameters and the optimizer's state from it, but has its own
rules. A server that is killed loses the pushes that came after its last file. Files of different servers are from
different moments, unless all trainers asked for them (``fleet.save_persistables``).
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fleetbench.digests import atomic_write, reading
from fleetbench.errors import ConfigError
from real.servers.parameters import Shard, Spec

Arrays = dict[str, np.ndarray[Any, Any]]

_FORMAT = "fleetbench parameter server 3"
_DIGEST = "sha256"


def shard_path(folder: Path, server: int, servers: int) -> Path:
    """Return the path of a server's shard."""
    return folder / f"shard-{server:05d}-of-{servers:05d}.safetensors"


def write_shard(folder: Path, shard: Shard, version: int) -> str:
    """Write a server's checkpoint after ``version`` updates; return the error, or an empty string.

    After an error, the previous checkpoint is still there.
    """
    metadata = {
        "format": _FORMAT,
        "spec": shard.spec.to_json().decode(),
        "server": str(shard.server),
        "steps": json.dumps(shard.optimizer.steps),
        "version": str(version),
    }
    path, tensors = shard_path(folder, shard.server, shard.spec.rules.servers), _arrays(shard)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, durable=True) as partial:
            save_file(tensors, partial, {**metadata, _DIGEST: _digest(tensors, metadata)})
    except (OSError, SafetensorError, ValueError, MemoryError) as error:  # ValueError: no folder can have that name
        return str(error) or type(error).__name__
    return ""


def _arrays(shard: Shard) -> Arrays:
    """Return the parameters and the optimizer's state, by name."""
    found = {f"parameters.{number}": array for number, array in enumerate(shard.arrays)}
    return found | {f"state.{number}.{slot}": array for number, slots in enumerate(shard.optimizer.state) for slot, array in slots.items()}


def _digest(tensors: Arrays, metadata: Mapping[str, str]) -> str:
    """Return the SHA-256 of a file's tensors and metadata, without the digest itself."""
    described = [[name, str(array.dtype), array.shape] for name, array in sorted(tensors.items())]
    told = sorted((key, value) for key, value in metadata.items() if key != _DIGEST)
    found = hashlib.sha256(json.dumps([told, described]).encode())
    for _, array in sorted(tensors.items()):
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def load_shard(folder: Path, server: int, servers: int) -> tuple[Shard, int] | None:
    """Return the shard in a server's checkpoint and its number of updates; ``None`` if there is no checkpoint.

    Raises ``ConfigError`` for a checkpoint that cannot be used.
    """
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


def _decoded(metadata: dict[str, str], tensors: Arrays, server: int) -> tuple[Shard, int]:
    if metadata.get("format") != _FORMAT or _DIGEST not in metadata:
        raise ValueError(f"it has another format than {_FORMAT!r}, or no digest")
    if metadata[_DIGEST] != (found := _digest(tensors, metadata)):
        raise ValueError(f"it is not what was saved: its SHA-256 is {found[:16]}..., saved {metadata[_DIGEST][:16]!r}...")
    shard = Shard(Spec.from_json(metadata["spec"]), server)
    if int(metadata["server"]) != server:
        raise ValueError(f"it is of server {metadata['server']}")
    for name, array in _arrays(shard).items():
        array[...] = tensors[name]
    shard.optimizer.steps[:] = [int(steps) for steps in json.loads(metadata["steps"])]
    return shard, int(metadata["version"])
