"""Files: reading with errors that name the file, atomic writing, and digests that detect damage.

- JSON: the key ``sha256`` holds a digest of all other keys.
- Folders: ``manifest.json`` holds the digest of every other file under ``files``, and its own.
- TOML holds no digest: users may edit it.
"""

import contextlib
import gzip
import hashlib
import json
import os
import secrets
import tomllib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fleetbench.errors import ConfigError, EnvironmentLacks

MANIFEST = "manifest.json"

_KEY = "sha256"
_PARTIAL = ".partial"
_MALFORMED: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    NotImplementedError,
    RecursionError,
    EOFError,
    zlib.error,
)
MOST_BYTES = 2**28
"""Largest size of a file that a user names, decompressed, in bytes."""
_GZIP = b"\x1f\x8b"


@contextlib.contextmanager
def reading(path: str | Path, hint: str, *also: type[Exception]) -> Iterator[None]:
    """Turn errors of reading a file, and exceptions of the types ``also``, into a ``ConfigError`` that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", str(path), hint=hint) from None
    except (*_MALFORMED, *also) as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(f"is damaged, or of another kind: {said}", str(path), hint=hint) from error


@contextlib.contextmanager
def atomic_write(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield the path of a new file, which replaces ``path`` when the ``with`` block ends.

    After an error, it is removed instead. Several processes may write ``path`` at once; the last to finish
    wins. With ``durable``, the file and its directory entry are flushed to the disk.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_PARTIAL}")
    try:
        yield partial
        if durable:
            sync(partial)
        partial.replace(path)
        if durable:
            sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of files, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def writing(path: Path, *also: type[Exception]) -> Iterator[None]:
    """Turn ``OSError``, and exceptions of the types ``also``, into an ``EnvironmentLacks`` that names the file."""
    refused: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except refused as error:
        said = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0] or type(error).__name__
        raise EnvironmentLacks(f"cannot be written: {said}", str(path), hint="make room there, or name another folder") from None


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file atomically. Raises ``EnvironmentLacks`` if writing fails."""
    with writing(path), atomic_write(path) as partial:
        partial.write_bytes(data if isinstance(data, bytes) else data.encode())


def read_file(path: str | Path, hint: str, where: str | None = None, most: int = MOST_BYTES) -> bytes:
    """Return all bytes of a file, decompressed if it is gzip; ``where`` is its name in errors.

    Raises ``ConfigError`` if it cannot be read, is a device, or has more than ``most`` bytes.
    """
    with reading(where or path, hint), Path(path).open("rb") as file:
        if Path(path).is_char_device():
            raise ValueError("it is a device")
        is_gzip = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        data = (gzip.GzipFile(fileobj=file) if is_gzip else file).read(most + 1)
        if len(data) > most:
            raise ValueError(f"it is larger than {most // 2**20} MiB")
    return data


def read_text(path: str | Path, hint: str, where: str | None = None) -> str:
    """Return the text of a file in UTF-8, without a byte-order mark. Raises as ``read_file``."""
    data = read_file(path, hint, where)
    with reading(where or path, hint):
        return data.decode("utf-8-sig")


def read_toml(text: str, where: str, hint: str) -> dict[str, Any]:
    """Parse the text of a TOML file. Raises ``ConfigError`` if it is not TOML."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of five thousand digits, or a thousand brackets
        raise ConfigError(f"not TOML: {error}", where, hint=hint) from None


def sealed_json(data: Mapping[str, Any]) -> str:
    """Return ``data`` and its digest as JSON text."""
    plain = json.loads(json.dumps(data))
    return json.dumps({_KEY: json_digest(plain), **plain}, indent=1)


def read_json(text: str) -> dict[str, Any]:
    """Return the data in a text of ``sealed_json``, without the digest.

    Raises ``ValueError`` if the digest is missing or does not match.
    """
    data = json.loads(text)
    if not isinstance(data, dict):
        raise TypeError("holds no table")
    if data.pop(_KEY, None) != json_digest(data):
        raise ValueError("its digest differs from what was written")
    return data


def digests_of(folder: Path) -> dict[str, str]:
    """Return the digest of every file in a folder by name, for its manifest."""
    return {path.name: file_digest(path) for path in sorted(folder.iterdir()) if path.is_file() and path.name != MANIFEST}


def read_manifest(folder: Path, hint: str) -> dict[str, Any]:
    """Return a folder's manifest after checking all files. Raises ``ConfigError`` if a file does not match."""
    with reading(folder / MANIFEST, hint):
        manifest = read_json((folder / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
    check_files(folder, files, files, hint)
    return manifest


def check_files(folder: Path, files: Mapping[str, str], names: Iterable[str], hint: str) -> None:
    """Raise ``ConfigError`` if one of the files ``names`` of a folder does not match its digest in ``files``."""
    for name in names:
        path = folder / name
        with reading(path, hint):
            if file_digest(path) != files[name]:
                raise ConfigError("is not what was written: its digest differs", str(path), hint=hint)


def digest_of(path: str | Path, hint: str) -> str:
    """Return the digest of a file's content. Raises ``ConfigError`` if it cannot be read."""
    with reading(path, hint):
        return file_digest(Path(path))


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file. Raises ``OSError``."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def json_digest(data: Any) -> str:
    """Return the SHA-256 of data as JSON, independent of the order of keys."""
    return _sha256(json.dumps(data, sort_keys=True))
