"""File kinds: read a user's file, compressed by gzip or not, and describe a file of an unexpected kind."""

import gzip
import json
import re
import tomllib
from pathlib import Path

from fleetbench.digests import check_file, reading
from fleetbench.errors import ConfigError

MOST_BYTES = 2**28
"""Largest size of a file in bytes, decompressed. Larger files are refused."""
MOST_LOOKED_AT = 100_000
"""Number of characters at the start of a text in which patterns are searched."""
_GZIP = b"\x1f\x8b"
_MAGIC: dict[bytes, str] = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"%PDF": "a PDF document",
    b"PK\x03\x04": "a ZIP archive, or a spreadsheet or torch file, which are ZIP archives",
    b"\xfd7zXZ": "a file compressed by xz",
    b"BZh": "a file compressed by bzip2",
    b"\x28\xb5\x2f\xfd": "a file compressed by zstd",
    b"7z\xbc\xaf": "a 7z archive",
    _GZIP: "a file compressed by gzip twice",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x89HDF": "an HDF5 file",
    b"SQLite format 3": "an SQLite database, as Nsight Systems exports",
    b"\x93NUMPY": "a NumPy array",
    b"\x80\x02": "a Python pickle",
    b"\x80\x03": "a Python pickle",
    b"\x80\x04": "a Python pickle",
    b"\x80\x05": "a Python pickle",
    b"\x7fELF": "a program",
}
_TEXT: dict[str, str] = {
    r"<!doctype html|<html": "an HTML page",
    r"<svg|<\?xml[^>]*>\s*<svg": "an SVG image",
    r"<": "an XML file",
    r"#!": "a script",
    r"(?:[^\n]*\n)*?[^\n]*\bnThread \d+ nGpus \d": "the output of nccl-tests, without a row of results",
    r"(?:[^\n]*\n)*?[^\n]*\bOSU \S+ .*Test\b": "the output of an OSU benchmark",
    r"(?:[^\n]*\n)*?[^\n]*\bNCCL (?:INFO|WARN) ": "a log of NCCL_DEBUG",
    r"(?:[^\n]*\n){0,50}?(?:import|from) \w[\w.]*(?: import [^,\n]+)?\n": "a Python script",
    r"(?:#[^\n]*\n)*(?:---\n)?[\w-]+:(?: [^\n]*)?\n(?:[\w-]+:|  |- )": "a YAML file",
}
"""Kinds of text files, by a pattern that matches the beginning of the text."""


def read_file(path: str | Path, hint: str, where: str | None = None, most: int | None = None) -> bytes:
    """Return all bytes of a file, decompressed if it is gzip; ``where`` is its name in errors.

    Raises ``ConfigError`` if it cannot be read, or has more than ``most`` bytes (default: 256 MiB).
    """
    most = most or MOST_BYTES
    data = begin_of(path, hint, where or str(path), most + 1)
    if len(data) > most:
        raise ConfigError(f"is larger than {most // 2**20} MiB", where or str(path), hint=hint)
    return data


def begin_of(path: str | Path, hint: str, where: str, size: int) -> bytes:
    """Return the first ``size`` bytes of a file, decompressed if it is gzip.

    Raises ``ConfigError`` if the file cannot be read.
    """
    check_file(Path(path))
    with reading(where, hint), Path(path).open("rb") as file:
        is_gzip = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        return (gzip.GzipFile(fileobj=file) if is_gzip else file).read(size)


def text_of(data: bytes) -> str | None:
    """Return bytes decoded as UTF-8, or as UTF-16 after a byte-order mark; None if they are not text."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", errors="replace")
    return None if b"\0" in data[:4096] or kind_by_magic(data) else data.decode("utf-8-sig", errors="replace")


def kind_by_magic(data: bytes) -> str | None:
    """Return the kind of file according to its first bytes; None if they do not identify one."""
    named = (name for magic, name in _MAGIC.items() if data.startswith(magic))
    return next(named, "a tar archive" if data[257:262] == b"ustar" else None)


def kind_of(data: bytes) -> str | None:
    """Describe a file in words that complete "it seems to be ..."; None for plain text, such as a table."""
    text = text_of(data)
    if text is None:
        return kind_by_magic(data) or "binary data"
    begin = text.lstrip()
    if not begin:
        return "an empty file"
    if begin[0] in "{[" and (kind := _json_kind(begin)) is not None:
        return kind
    try:
        if tomllib.loads(text):
            return "a TOML file, such as an experiment or a profile"
    except tomllib.TOMLDecodeError:
        pass
    begin = begin[:MOST_LOOKED_AT]
    return next((name for pattern, name in _TEXT.items() if re.match(pattern, begin, re.IGNORECASE)), None)


def _json_kind(text: str) -> str | None:
    try:
        found, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return "JSON that ends early or is damaged" if re.match(r'\{\s*"|\[\s*[\[{"]', text) else None
    if isinstance(found, dict) and "traceEvents" in found:
        return "a trace of torch.profiler, or another Chrome trace"
    if isinstance(found, dict) and "nbformat" in found:
        return "a Jupyter notebook"
    if text[end:].strip():
        return "lines of JSON" if isinstance(found, dict) else None
    keys = ", ".join(map(str, list(found)[:5])) if isinstance(found, dict) else ""
    return f"JSON of something else (keys: {keys})" if keys else "JSON of something else"
