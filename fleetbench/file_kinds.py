"""Files of users: read whole, gzip or not."""

import gzip
from pathlib import Path

from fleetbench.digests import check_file, reading
from fleetbench.errors import ConfigError

MOST_BYTES = 2**28
"""Largest size of a file in bytes, decompressed. Larger files are refused."""
_GZIP = b"\x1f\x8b"


def read_file(path: str | Path, hint: str, where: str | None = None, most: int | None = None) -> bytes:
    """Return all bytes of a file, decompressed if it is gzip; ``where`` is its name in errors.

    Raises ``ConfigError`` if it cannot be read, or has more than ``most`` bytes (default: 256 MiB).
    """
    most = most or MOST_BYTES
    check_file(Path(path))
    with reading(where or str(path), hint), Path(path).open("rb") as file:
        is_gzip = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        data = (gzip.GzipFile(fileobj=file) if is_gzip else file).read(most + 1)
    if len(data) > most:
        raise ConfigError(f"is larger than {most // 2**20} MiB", where or str(path), hint=hint)
    return data


def text_of(data: bytes) -> str | None:
    """Return the text, in UTF-8, or UTF-16 with a byte-order mark; none if the bytes are no text."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", errors="replace")
    return None if b"\0" in data[:4096] else data.decode("utf-8-sig", errors="replace")
