"""Checkpoint: parts of a training's state on disk, replaced as one.

    PATH/save-00000007/manifest.json  what was saved, by whom, and the digest of every part and of itself
    PATH/save-00000007/*.safetensors  the parts: tensors, and beside them plain data as JSON in the file's header

A save fills a folder of its own; its manifest, which is written last and at a stroke, puts it in force, and
only then the one before goes. Whatever is killed, and whenever, leaves the old save or the new one, and
at most a folder that the next save removes. Nothing on disk is ever executed.
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fleetbench.digests import MANIFEST, atomic_write, file_digest, read_json, reading, sealed_json, sync, writing
from fleetbench.errors import ConfigError, EnvironmentLacks

SCHEMA = 1
MODEL = "model.safetensors"
"""Name of the part with parameters and buffers, under their own names."""

_KIND = "fleetbench checkpoint"
_PLAIN = "fleetbench"
_FOLDER = re.compile(r"save-(?!0{8})(\d{8})")
_ANOTHER = "it was damaged since it was saved, or another version wrote it: take another checkpoint"


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors by name, on any device, and plain data."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    plain: Any = None


@dataclass(frozen=True, slots=True)
class Save:
    """A complete save: where it lies, and its manifest."""

    folder: Path
    manifest: Mapping[str, Any]

    def read(self, name: str) -> Part:
        """A part of this save. Raises ``ConfigError`` as ``file`` does."""
        return read_part(self.file(name))

    def file(self, name: str) -> Path:
        """A part's file, looked through. Raises ``ConfigError`` where it is missing, or not what was written."""
        path = self.folder / name
        with reading(path, "a checkpoint moves as a whole folder"):
            expected = self.manifest["parts"][name]["sha256"]
            found = file_digest(path)
        if found != expected:
            what = "is not what was saved: its SHA-256 is another"
            raise ConfigError(what, str(path), f"{found[:16]}..., saved {expected[:16]}...", _ANOTHER)
        return path


class Draft:
    """A save on its way, below ``root``.

    ``begin``, then ``write`` by every trainer that has a part, then ``commit``, once; ``discard`` gives up before that.
    """

    def __init__(self, root: Path, number: int) -> None:
        self._root = root
        self.folder = root / f"save-{number:08d}"

    def begin(self) -> None:
        """Clear the place; once, before any trainer writes. Raises ``EnvironmentLacks`` where nothing can be written."""
        with writing(self.folder):
            if not self._root.is_dir():
                self._root.mkdir(parents=True, exist_ok=True)
                sync(self._root.parent)
            if self.folder.exists():
                shutil.rmtree(self.folder)
            self.folder.mkdir()

    def write(self, name: str, part: Part) -> str:
        """Write a part; its digest. Raises ``EnvironmentLacks`` where the disk does not take it, ``ConfigError`` for what fits no file."""
        path = self.folder / name
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)  # made by another trainer, and perhaps not seen here yet
            write_part(path, part)
            return file_digest(path)

    def commit(self, manifest: Mapping[str, Any], parts: Mapping[str, str]) -> None:
        """Put the save in force; ``parts`` have digests. Raises ``EnvironmentLacks`` where a part of another trainer is not here."""
        if missing := [path for path in map(self.folder.joinpath, parts) if not path.is_file()]:
            self.discard()
            hint = "name a folder on a file system that all trainers share"
            raise EnvironmentLacks("another trainer wrote this part, and it is not here", str(missing[0]), hint=hint)
        described = {name: {"sha256": digest} for name, digest in parts.items()}
        path = self.folder / MANIFEST
        with writing(path):
            sync(self._root)  # the folder is there for good before it counts
            with atomic_write(path, durable=True) as partial:
                partial.write_text(sealed_json({"schema": SCHEMA, "kind": _KIND, **manifest, "parts": described}), encoding="utf-8")

    def sweep(self) -> None:
        """Remove every other save of this folder; once all trainers know that this one is in force."""
        for path in self._root.iterdir():
            if _FOLDER.fullmatch(path.name) and path != self.folder:
                shutil.rmtree(path, ignore_errors=True)  # what cannot be removed does no harm: its number is lower

    def discard(self) -> None:
        """Remove what was written so far."""
        shutil.rmtree(self.folder, ignore_errors=True)


def last_save(root: Path) -> int:
    """Number of the save in force below ``root``, which is the last one that is complete; 0 where there is none."""
    named = [_FOLDER.fullmatch(path.parent.name) for path in root.glob(f"save-*/{MANIFEST}")]
    return max((int(found[1]) for found in named if found is not None), default=0)


def open_save(root: Path, number: int) -> Save:
    """A complete save. Raises ``ConfigError`` for one that is missing, damaged or of another version."""
    folder = root / f"save-{number:08d}"
    path = folder / MANIFEST
    with reading(path, _ANOTHER):
        manifest = read_json(path.read_text(encoding="utf-8"))
    if manifest.get("kind") != _KIND or manifest.get("schema") != SCHEMA:
        told = f"{manifest.get('kind')!r}, schema {manifest.get('schema')!r}"
        raise ConfigError("is no manifest of this version", str(path), told, f"this version reads schema {SCHEMA} of a {_KIND}")
    return Save(folder, manifest)


def model_file(root: Path) -> Path:
    """A folder's model: in the save in force, or in the folder itself. Raises ``ConfigError`` as ``open_save`` and ``Save.file`` do."""
    number = last_save(root)
    return open_save(root, number).file(MODEL) if number else root / MODEL


def write_part(path: Path, part: Part) -> None:
    """Write a part to ``path``, to the disk itself. Raises ``ConfigError`` for tensors of which a file can hold none."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    for name, tensor in part.tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise ConfigError("has no plain memory to save", f"tensor {name}", f"{tensor.layout} of {tensor.dtype}", "convert it before")
    metadata = {"format": "pt"} | ({} if part.plain is None else {_PLAIN: json.dumps(part.plain)})
    try:
        with writing(path, SafetensorError):  # whose text holds the operating system's
            save_file(_apart(part.tensors), path, metadata=metadata)
    except (KeyError, ValueError) as error:
        types = ", ".join(sorted({str(tensor.dtype) for tensor in part.tensors.values()}))
        raise ConfigError(
            f"cannot be written as safetensors: {error}", str(path), types, "keep such tensors out of the model's state"
        ) from error
    sync(path)


def read_part(path: Path) -> Part:
    """A safetensors file's tensors, on the CPU, and its plain data. Raises ``ConfigError`` for a file that is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dictionary
        return Part(tensors, json.loads(metadata[_PLAIN]) if _PLAIN in metadata else None)
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"is no safetensors file: {error}", str(path), hint="fleet.save_persistables writes such files") from None


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors on the CPU, contiguous, and none in another's memory."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        own = tensor.detach()
        alone = own.untyped_storage().nbytes() == own.nbytes and own.untyped_storage().data_ptr() not in seen
        if own.device.type != "cpu" or not own.is_contiguous() or not alone:
            own = own.to("cpu", copy=True, memory_format=torch.contiguous_format)
        seen.add(own.untyped_storage().data_ptr())
        found[name] = own
    return found
