"""Checkpoint: the parts of a training's state on disk, replaced atomically.

PATH/save-00000007/manifest.json  number of trainers, and digests of every part and of itself
PATH/save-00000007/model.pt       parameters and buffers by name; of several models: model-1.pt, ... for the others
PATH/save-00000007/*.pt           the other parts: plain data with tensors, by torch.save

Each save has its own folder. Its manifest is written last and atomically, which puts the save in force;
only then is the previous save removed. A kill at any time leaves the old save or the new one, and at most
one folder that the next save removes. Nothing on disk is ever executed (``weights_only``).
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import PickleError
from typing import Any

import numpy as np
import torch

from fleetbench.digests import MANIFEST, atomic_write, check_files, file_digest, read_json, reading, sealed_json, sync, writing
from fleetbench.errors import ConfigError, EnvironmentLacks

SCHEMA = 3

_KIND = "fleetbench checkpoint"
_FOLDER = re.compile(r"save-(?!0{8})(\d{8})")
_ANOTHER = "it was damaged since it was saved, or another version wrote it: take another checkpoint"
_NUMPY_TYPES = (type(np.dtype(code)) for code in np.typecodes["All"] if code != "O")
_OF_NUMPY = [np.ndarray, np.dtype, np.zeros(0).__reduce__()[0], np.float64(0).__reduce__()[0], *_NUMPY_TYPES]
"""Types and functions that unpickling NumPy arrays and scalars needs."""


@dataclass(frozen=True, slots=True)
class Save:
    """A complete save: its folder and its manifest."""

    folder: Path
    manifest: Mapping[str, Any]

    def read(self, name: str, *, mmap: bool = False) -> Any:
        """Read a part of this save; ``mmap``: its tensors stay on disk until they are used. Raises as ``file`` does."""
        return read_part(self.file(name), mmap=mmap)

    def file(self, name: str) -> Path:
        """Return a part's file. Raises ``ConfigError`` if it is missing or differs from what was written."""
        check_files(self.folder, self.manifest["files"], [name], _ANOTHER)
        return self.folder / name


class Draft:
    """A save in progress, below ``root``.

    Call ``begin``, then ``write`` on every trainer that has a part, then ``commit`` once. ``discard`` gives
    up before ``commit``.
    """

    def __init__(self, root: Path, number: int) -> None:
        self._root = root
        self.folder = root / f"save-{number:08d}"

    def begin(self) -> None:
        """Make an empty folder, once, before any trainer writes.

        Raises ``EnvironmentLacks`` if it cannot be written.
        """
        with writing(self.folder):
            if not self._root.is_dir():
                self._root.mkdir(parents=True, exist_ok=True)
                sync(self._root.parent)
            if self.folder.exists():
                shutil.rmtree(self.folder)
            self.folder.mkdir()

    def write(self, name: str, part: Any) -> str:
        """Write a part and return its digest. Raises as ``write_part`` does."""
        path = self.folder / name
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)  # another trainer made it; it may not be visible here yet
            write_part(path, part)
            return file_digest(path)

    def commit(self, manifest: Mapping[str, Any], parts: Mapping[str, str]) -> None:
        """Put the save in force; ``parts`` maps names to digests.

        Raises ``EnvironmentLacks`` if another trainer's part is not here.
        """
        if missing := [path for path in map(self.folder.joinpath, parts) if not path.is_file()]:
            self.discard()
            hint = "name a folder on a file system that all trainers share"
            raise EnvironmentLacks("another trainer wrote this part, and it is not here", str(missing[0]), hint=hint)
        path = self.folder / MANIFEST
        with writing(path):
            sync(self._root)  # the folder is on disk before its manifest
            with atomic_write(path, durable=True) as partial:
                partial.write_text(sealed_json({"schema": SCHEMA, "kind": _KIND, **manifest, "files": dict(parts)}), encoding="utf-8")

    def sweep(self) -> None:
        """Remove every other save from the root. Call it once all trainers know that this one is in force."""
        for path in self._root.iterdir():
            if _FOLDER.fullmatch(path.name) and path != self.folder:
                shutil.rmtree(path, ignore_errors=True)  # a leftover does no harm: its number is lower

    def discard(self) -> None:
        """Remove the folder with everything written so far."""
        shutil.rmtree(self.folder, ignore_errors=True)


def last_save(root: Path) -> int:
    """Return the number of the save in force below ``root``: the last complete one; 0 if there is none."""
    named = [_FOLDER.fullmatch(path.parent.name) for path in root.glob(f"save-*/{MANIFEST}")]
    return max((int(found[1]) for found in named if found is not None), default=0)


def open_save(root: Path, number: int) -> Save:
    """Open a complete save. Raises ``ConfigError`` if it is missing, damaged or of another version."""
    if number == 0:
        hint = "fleet.save_persistables writes one; predicate=lambda name: True loads a file of tensors as well"
        raise ConfigError("there is no checkpoint", str(root), hint=hint)
    folder = root / f"save-{number:08d}"
    path = folder / MANIFEST
    with reading(path, _ANOTHER):
        manifest = read_json(path.read_text(encoding="utf-8"))
    if manifest.get("kind") != _KIND or manifest.get("schema") != SCHEMA:
        told = f"{manifest.get('kind')!r}, schema {manifest.get('schema')!r}"
        hint = f"this version reads schema {SCHEMA} of a {_KIND}; predicate=lambda name: True loads the model's file beside it"
        raise ConfigError("is not a manifest of this version", str(path), told, hint)
    return Save(folder, manifest)


def model_part(number: int) -> str:
    """Return the name of the part with a model's parameters and buffers, under their own names."""
    return f"model-{number}.pt" if number else "model.pt"


def write_part(path: Path, part: Any) -> None:
    """Write a part by ``torch.save`` to ``path``, and sync it to disk.

    Raises ``EnvironmentLacks`` if the disk refuses it, ``ConfigError`` for data that could not be read back.
    """
    try:
        with writing(path, RuntimeError):
            torch.save(part, path)
        _load(path, mmap=True)
    except (AttributeError, TypeError, PickleError) as error:
        hint = "give numbers, text, lists, dictionaries, arrays and tensors, such as scheduler.state_dict()"
        raise ConfigError("cannot be saved as plain data", path.name, str(error), hint) from error
    sync(path)


def read_part(path: Path, hint: str = "fleet.save_persistables writes such files", *, mmap: bool = False) -> Any:
    """Read a part, with tensors on the CPU.

    Raises ``ConfigError`` for another kind of file, and for one that would execute code.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with reading(path, hint, SafetensorError, PickleError, RuntimeError):
        return load_file(path) if path.suffix == ".safetensors" else _load(path, mmap=mmap)


def _load(path: Path, *, mmap: bool) -> Any:
    with torch.serialization.safe_globals(_OF_NUMPY):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except PickleError as error:  # its text says how to execute the contents
            found = re.search(r"(?:GLOBAL |<class ')([^ ']+)", str(error))
            raise PickleError(f"it holds a {found[1]}" if found else "it is not a file of torch.save") from error
