"""Files of users: gzip or not, in either encoding."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from fleetbench.errors import ConfigError
from fleetbench.file_kinds import read_file, text_of


def test_text_is_read_in_either_encoding() -> None:
    """UTF-8 with and without a mark, and UTF-16 as PowerShell writes it; a byte that is none does not matter."""
    for data in (b"seconds", b"\xef\xbb\xbfseconds", "seconds".encode("utf-16")):
        assert text_of(data) == "seconds"
    assert text_of(b"node\xff 1") == "node\ufffd 1"


def test_gzip_is_read_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is larger when it is decompressed, cut off, or no file at all is refused with a hint."""
    monkeypatch.setattr("fleetbench.file_kinds.MOST_BYTES", 2**20)
    (tmp_path / "bomb").write_bytes(gzip.compress(bytes(2**22)))
    (tmp_path / "cut").write_bytes(gzip.compress(b"seconds" * 100)[:-9])
    (tmp_path / "whole").write_bytes(gzip.compress(b"seconds" * 100))
    assert read_file(tmp_path / "whole", "name a table") == b"seconds" * 100
    for name in ("bomb", "cut", "none", "."):
        with pytest.raises(ConfigError, match="HINT: name a table"):
            read_file(tmp_path / name, "name a table")
