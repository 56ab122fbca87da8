"""Checkpoints of a server: its shard and its optimizer's state, in one .npz file that is replaced atomically.

numpy reads the file, and zip's CRC-32 of every array detects damage. A job that begins from it takes the parameters and
the optimizer's state, but has its own rules. While a server writes, trainers wait for its answers.
"""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fleetbench.digests import atomic_write, reading
from fleetbench.errors import ConfigError
from real.servers.parameters import Shard, Spec

_HEAD = "head"
"""Name of the array with the JSON of everything that is no array."""


def shard_path(folder: Path, server: int, servers: int) -> Path:
    """Return the path of a server's shard."""
    return folder / f"shard-{server:05d}-of-{servers:05d}.npz"


def write_shard(folder: Path, shard: Shard, version: int) -> str:
    """Write a server's checkpoint after ``version`` updates; return the error, or an empty string.

    After an error, the previous checkpoint is still there.
    """
    head = {"spec": shard.spec.to_json().decode(), "steps": shard.optimizer.steps, "version": version}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            atomic_write(shard_path(folder, shard.server, shard.spec.rules.servers), durable=True) as partial,
            partial.open("wb") as file,
        ):
            np.savez(file, **{_HEAD: np.frombuffer(json.dumps(head).encode(), np.uint8)}, **_arrays(shard))  # type: ignore[arg-type]  # no array is called allow_pickle
    except (OSError, ValueError) as error:  # ValueError: no folder can have that name
        return str(error)
    return ""


def _arrays(shard: Shard) -> dict[str, np.ndarray[Any, Any]]:
    """Return the parameters and the optimizer's state, by name."""
    found = {f"parameters.{number}": array for number, array in enumerate(shard.arrays)}
    return found | {f"state.{number}.{slot}": array for number, slots in enumerate(shard.optimizer.state) for slot, array in slots.items()}


def load_shard(folder: Path, server: int, servers: int) -> tuple[Shard, int] | None:
    """Return the shard in a server's checkpoint and its number of updates; ``None`` if there is no checkpoint.

    Raises ``ConfigError`` for a checkpoint that cannot be used.
    """
    path = shard_path(folder, server, servers)
    if not path.exists():
        others = sorted(folder.glob("shard-*-of-*"))
        if others and f"-of-{servers:05d}.npz" not in others[0].name:
            what = f"holds shards of another number of servers than {servers}, or of another version"
            raise ConfigError(what, str(folder), others[0].name, "start as many servers as wrote it")
        return None
    hint = "take another checkpoint: it was damaged since it was saved, or another version wrote it; or remove it to begin again"
    damage = (zipfile.BadZipFile, RuntimeError)
    with reading(path, hint, *damage), path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        head = json.loads(file[_HEAD].tobytes())
        shard = Shard(Spec.from_json(head["spec"]), server)
        for name, array in _arrays(shard).items():
            array[...] = file[name]
        shard.optimizer.steps[:] = head["steps"]
        return shard, head["version"]
