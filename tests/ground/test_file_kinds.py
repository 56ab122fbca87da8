"""File kinds: what a user's file seems to be, against files that the programs of their kinds write."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.file_kinds import kind_of, read_file, text_of


def _written(write: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def _zip(file: io.BytesIO) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.csv", "seconds")


def _picture(kind: str) -> bytes:
    from PIL import Image

    return _written(lambda file: Image.new("RGB", (2, 2)).save(file, kind))


FRAME = pd.DataFrame({"seconds": [1.0]})
KINDS: dict[str, Callable[[], bytes]] = {
    "PNG image": lambda: _picture("PNG"),
    "JPEG image": lambda: _picture("JPEG"),
    "GIF image": lambda: _picture("GIF"),
    "ZIP archive": lambda: _written(_zip),
    "compressed by xz": lambda: lzma.compress(b"seconds"),
    "compressed by gzip twice": lambda: gzip.compress(b"seconds"),
    "Parquet file": lambda: _written(FRAME.to_parquet),
    "NumPy array": lambda: _written(lambda file: np.save(file, np.zeros(3))),
    "binary data": lambda: bytes(range(256)),
    "an empty file": lambda: b" \n",
    "trace of torch.profiler": lambda: json.dumps({"schemaVersion": 1, "traceEvents": []}).encode(),
    "Jupyter notebook": lambda: json.dumps({"cells": [], "nbformat": 4}).encode(),
    "JSON of something else (keys: a, b)": lambda: b'{"a": 1, "b": 2}',
    "JSON of something else": lambda: b"[1, 2, 3]",
    "JSON that ends early": lambda: b'{"a": [1, 2',
    "lines of JSON": lambda: b'{"a": 1}\n{"a": 2}\n',
    "TOML file": lambda: Experiment().to_toml().encode(),
    "HTML page": lambda: b"<!DOCTYPE html>\n<html><body>seconds</body></html>",
    "XML file": lambda: b"<?xml version='1.0'?><a/>",
    "SVG image": lambda: b"<svg xmlns='x'></svg>",
    "Python script": lambda: b"# times\nimport torch\n\nprint(torch.ones(3))\n",
    "YAML file": lambda: b"nodes: 2\ngpus: 16\n",
    "log of NCCL_DEBUG": lambda: b"starts\nnode-a:17:17 [0] NCCL INFO Bootstrap : Using eth0\n",
    "nccl-tests, without a row": lambda: b"# nThread 1 nGpus 8 minBytes 8 maxBytes 8 step: 2(factor)\n# Using devices\n",
    "an OSU benchmark": lambda: b"# OSU MPI Bandwidth Test v7.4\n# Size      Bandwidth (MB/s)\n1      2.3\n",
}
TABLES = (b"seconds\n0.1\n", b",nodes, seconds\n0,2,0.1\n", b"# a table\ncluster.nodes;seconds\n2;0,1\n", b"words of a text\n")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_named_for_what_it_seems_to_be(kind: str) -> None:
    """Each by its own words."""
    assert kind in (kind_of(KINDS[kind]()) or "")


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_no_kind(table: bytes) -> None:
    """Whether it is one of measurements, its columns say."""
    assert kind_of(table) is None


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
