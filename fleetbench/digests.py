"""Digests: files carry a digest, so that damage is detected and damaged files are refused.

- Text that a user may edit, such as a strategy: the first line is ``# sha256 = HEX``, a digest of the other
  lines. Without that line the text is accepted as it is.
- JSON: the key ``sha256`` holds a digest of all other keys.
- Folders: ``manifest.json`` holds the digest of every other file under ``files``, and its own.
"""

import contextlib
import glob
import hashlib
import json
import os
import re
import secrets
import stat
import time
import tomllib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fleetbench.errors import ConfigError, EnvironmentLacks

MANIFEST = "manifest.json"

_KEY = "sha256"
_FIRST = f"# {_KEY} = "
_PARTIAL = ".partial"
_LONGEST_S = 3600.0
"""Seconds without a change after which a partial file is considered abandoned."""
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
_COPIES = 4
"""Number of copies of a table in memory while it is read."""
_NO_MANIFEST: tuple[type[Exception], ...] = (OSError, *_MALFORMED)
"""Exceptions raised by reading a manifest that is missing or was written by another program."""


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
    wins. With ``durable``, the file and its directory entry are flushed to the disk, and partial files of
    killed writers are removed.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_PARTIAL}")
    try:
        yield partial
        if durable:
            sync(partial)
        partial.replace(path)
        if durable:
            sync(path.parent)
            _sweep(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _sweep(path: Path) -> None:
    """Remove old partial files, which killed writers of ``path`` have left."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.*{_PARTIAL}"):
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < time.time() - _LONGEST_S:
                left.unlink()


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
        where = re.sub(rf"\.[0-9a-f]{{8}}{re.escape(_PARTIAL)}$", "", str(getattr(error, "filename", None) or path))
        raise EnvironmentLacks(f"cannot be written: {said}", where, hint="make room there, or name another folder") from None


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file atomically. Raises ``EnvironmentLacks`` if writing fails."""
    with writing(path), atomic_write(path) as partial:
        partial.write_bytes(data if isinstance(data, bytes) else data.encode())


def refuse_large_table(file: Any, where: str) -> None:
    """Raise ``EnvironmentLacks`` for a Parquet file whose table does not fit into free memory.

    A few compressed bytes may stand for billions of numbers. ``file`` is a path or an open file.
    """
    import psutil
    from pyarrow import parquet

    metadata = parquet.read_metadata(file)
    groups = [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]
    needed, free = _COPIES * max(8 * metadata.num_rows * metadata.num_columns, sum(groups)), psutil.virtual_memory().available
    if needed > free:
        size = f"{metadata.num_rows:,} rows of {metadata.num_columns} columns"
        what = f"its {size} take {needed / 2**30:.3g} GiB of memory to be read"
        raise EnvironmentLacks(what, where, f"{free / 2**30:.3g} GiB free", "read it on a machine with more memory")


def read_text(path: str | Path, hint: str) -> str:
    """Return the text of a file, without a byte-order mark.

    Raises ``ConfigError`` if it cannot be read, or differs from the manifest of its folder.
    """
    check_file(Path(path))
    with reading(path, hint):
        try:
            return Path(path).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"not a text file: {error}", str(path), hint=hint) from None


def sealed(text: str) -> str:
    """Return the text preceded by a line with its digest."""
    return f"{_FIRST}{_sha256(text)}\n{text}"


def read_toml(text: str, where: str, hint: str) -> dict[str, Any]:
    """Parse the text of a TOML file.

    Raises ``ConfigError`` if it is not TOML, or its digest line does not match.
    """
    first, _, rest = text.partition("\n")
    if first.startswith(_FIRST.rstrip(" =")) and first != _FIRST + _sha256(rest):
        edited = "remove the line after editing (the first); a file that you did not edit is damaged: write it again"
        raise ConfigError("is not what was written: its digest differs", where, hint=edited)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of five thousand digits, or a thousand brackets
        raise ConfigError(f"not TOML: {error}", where, hint=hint) from None


def sealed_json(data: Mapping[str, Any]) -> str:
    """Return ``data`` and its digest as JSON text."""
    plain = json.loads(json.dumps(data))
    return json.dumps({_KEY: json_digest(plain), **plain}, indent=1)


def read_json(text: str) -> dict[str, Any]:
    """Return the data in a text of ``sealed_json``, without the digest, which is optional.

    Raises ``ValueError`` if the digest does not match.
    """
    return _opened(text)[0]


def _opened(text: str) -> tuple[dict[str, Any], bool]:
    """Return the data of a JSON text, and whether it had a digest."""
    data = json.loads(text)
    if not isinstance(data, dict):
        raise TypeError("holds no table")
    said = data.pop(_KEY, None)
    if said is not None and said != json_digest(data):
        raise ValueError("its digest differs from what was written")
    return data, said is not None


def digests_of(folder: Path) -> dict[str, str]:
    """Return the digest of every file in a folder by name, for its manifest."""
    return {path.name: file_digest(path) for path in sorted(folder.iterdir()) if path.is_file() and path.name != MANIFEST}


def read_manifest(folder: Path, hint: str) -> dict[str, Any]:
    """Return a folder's manifest after checking all files.

    Raises ``ConfigError`` if a file does not match, or if the manifest has no digests.
    """
    path = folder / MANIFEST
    with reading(path, hint):
        manifest, is_sealed = _opened(path.read_text(encoding="utf-8"))
        files = manifest.get("files")
        if "schema" not in manifest or not is_sealed or not isinstance(files, dict):
            raise ValueError("its schema or digests are missing")
    check_files(folder, files, files, hint)
    return manifest


def check_file(path: Path) -> None:
    """Raise ``ConfigError`` for a device, or a file that does not match its digest in its folder's manifest.

    Files that no manifest lists are not checked.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # the function that reads the file reports the reason
        return
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise ConfigError("is a device, not a file", str(path), hint="name a file")
    try:
        manifest, is_ours = _opened((path.parent / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        is_known = path.name in files
    except _NO_MANIFEST:
        return
    if is_ours and is_known:
        check_files(path.parent, files, [path.name], "it was changed after its run: change a copy in another folder")


def check_files(folder: Path, files: Mapping[str, str], names: Iterable[str], hint: str) -> None:
    """Raise ``ConfigError`` if one of the files ``names`` of a folder does not match its digest in ``files``."""
    for name in names:
        path = folder / name
        with reading(path, hint):
            if file_digest(path) != files[name]:
                raise ConfigError("is not what was written: its digest differs", str(path), hint=hint)


def digest_of(path: str | Path, hint: str) -> str:
    """Return the digest of a file's content. Raises ``ConfigError`` if it cannot be read."""
    check_file(Path(path))
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
