"""File kinds: a user's file read whole, gzip or not; and what it seems to be, if it is no table."""

import gzip
from pathlib import Path

from fleetbench.digests import check_file, reading
from fleetbench.errors import ConfigError

MOST_BYTES = 2**28
"""Bytes of a file, decompressed: larger ones are refused."""
_GZIP = b"\x1f\x8b"


def read_file(path: str | Path, hint: str, where: str | None = None, most: int | None = None) -> bytes:
    """All bytes of a file, decompressed where it is gzip; ``where``: what errors call it, by default its path.

    Raises ``ConfigError`` where it cannot be read, or has more than ``most`` bytes, or 256 MiB.
    """
    most = most or MOST_BYTES
    data = begin_of(path, hint, where or str(path), most + 1)
    if len(data) > most:
        raise ConfigError(f"is larger than {most // 2**20} MiB", where or str(path), hint=hint)
    return data


def begin_of(path: str | Path, hint: str, where: str, size: int) -> bytes:
    """The first ``size`` bytes of a file, decompressed where it is gzip. Raises ``ConfigError`` where it cannot be read."""
    check_file(Path(path))
    with reading(where, hint), Path(path).open("rb") as file:
        is_gzip = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        return (gzip.GzipFile(fileobj=file) if is_gzip else file).read(size)


def text_of(data: bytes) -> str | None:
    """The text, in UTF-8 or after a mark of UTF-16; none where the bytes are none."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", errors="replace")
    return None if b"\0" in data[:4096] else data.decode("utf-8-sig", errors="replace")


def kind_of(data: bytes) -> str | None:
    """What a file seems to be, as words after "it seems to be"; none of any other text, such as a table."""
    text = text_of(data)
    if text is None:
        return "binary data"
    return "JSON, such as a trace of torch.profiler" if text.lstrip().startswith(("{", "[{")) else None
