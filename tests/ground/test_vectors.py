"""Files of vectors: what is written is read, whoever wrote it, and what is not vectors is refused with its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fleetbench.errors import ConfigError
from fleetbench.vectors import Vectors, read_vectors, write_vectors

NUMBERS = np.array([[0.1, -2.5e-20, 3.0], [1 / 3, 2**24, -0.0], [np.float32(1e38), 7.0, 1e-45]], np.float32)
IDS = ["val/é 1.JPEG", "007", "7"]


def _written(path: Path) -> Path:
    write_vectors(path, IDS, NUMBERS)
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """To the bit, in the order of writing, with ids that look like numbers as they are."""
    found = read_vectors(_written(tmp_path / "v.parquet"))
    assert found.ids == tuple(IDS)
    assert found.values.tobytes() == NUMBERS.tobytes()
    assert found.length == 3


def test_the_columns_are_what_any_reader_expects(tmp_path: Path) -> None:
    """Text, and float32 lists of one fixed size; pyarrow alone says so."""
    table = pq.read_table(_written(tmp_path / "v.parquet"))
    assert table.schema.field("id").type == pa.string()
    assert table.schema.field("vector").type == pa.list_(pa.float32(), 3)
    assert table.column("vector").to_pylist()[1] == [float(np.float32(1 / 3)), 2.0**24, 0.0]


def test_parquet_of_others_is_read(tmp_path: Path) -> None:
    """Lists without a fixed size, ids that are whole numbers, columns in any order, several row groups."""
    table = pa.table({"when": [1, 2, 3], "vector": pa.array(NUMBERS.tolist(), pa.list_(pa.float32())), "id": [3, 1, 2]})
    pq.write_table(table, tmp_path / "online.parquet", row_group_size=2)
    found = read_vectors(tmp_path / "online.parquet")
    assert found.ids == ("3", "1", "2")
    assert found.values.tobytes() == NUMBERS.tobytes()


COLUMNS = {
    "float64": ({"id": ["a"], "vector": pa.array([[1.0]], pa.list_(pa.float64()))}, "lists of float32"),
    "float16": ({"id": ["a"], "vector": pa.array([[np.float16(1)]], pa.list_(pa.float16()))}, "lists of float32"),
    "no list": ({"id": ["a"], "vector": pa.array([1.0], pa.float32())}, "lists of float32"),
    "no id": ({"name": ["a"], "vector": pa.array([[1.0]], pa.list_(pa.float32()))}, "needs id"),
    "no vector": ({"id": ["a"], "v": pa.array([[1.0]], pa.list_(pa.float32()))}, "and vector, lists"),
    "numbers as ids": ({"id": [1.5], "vector": pa.array([[1.0]], pa.list_(pa.float32()))}, "needs id, text"),
    "two lengths": ({"id": ["a", "b"], "vector": pa.array([[1.0], [1.0, 2.0]], pa.list_(pa.float32()))}, "several lengths"),
    "missing number": ({"id": ["a"], "vector": pa.array([[1.0, None]], pa.list_(pa.float32()))}, "is missing"),
    "missing vector": ({"id": ["a", "b"], "vector": pa.array([[1.0], None], pa.list_(pa.float32()))}, "is missing"),
    "missing fixed": ({"id": ["a", "b"], "vector": pa.array([[1.0], None], pa.list_(pa.float32(), 1))}, "is missing"),
    "missing id": ({"id": ["a", None], "vector": pa.array([[1.0], [2.0]], pa.list_(pa.float32()))}, "is missing"),
    "twice": ({"id": ["a", "a"], "vector": pa.array([[1.0], [2.0]], pa.list_(pa.float32()))}, "a sample comes twice"),
    "empty": ({"id": pa.array([], pa.string()), "vector": pa.array([], pa.list_(pa.float32()))}, "holds no vectors"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_that_are_no_vectors_are_refused(tmp_path: Path, name: str) -> None:
    """Other types are not cast in silence; nothing may be missing."""
    columns, said = COLUMNS[name]
    pq.write_table(pa.table(columns), tmp_path / "online.parquet")
    with pytest.raises(ConfigError, match=said) as caught:
        read_vectors(tmp_path / "online.parquet")
    assert "online.parquet" in str(caught.value.where)
    assert caught.value.hint


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    """Absent, of another kind, cut short, and a folder that was never finished."""
    whole = _written(tmp_path / "v.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:-20])
    (tmp_path / "v.csv").write_bytes(b"id,v\na,1\n")
    said = {"absent.parquet": "cannot be read", "cut.parquet": "is damaged", "v.csv": "is damaged, or of another kind"}
    for name, phrase in said.items():
        with pytest.raises(ConfigError, match=phrase) as caught:
            read_vectors(tmp_path / name)
        assert name in str(caught.value)
        assert caught.value.hint
    folder = tmp_path / "run"
    folder.mkdir()
    _written(folder / "vectors.parquet")
    with pytest.raises(ConfigError, match="not a complete evaluation"):
        read_vectors(folder)
    (folder / "manifest.json").write_text('{"schema": 1}')
    with pytest.raises(ConfigError, match="digests are missing"):
        read_vectors(folder)


def test_an_error_names_some_ids_only() -> None:
    """Three of them, and how many more."""
    with pytest.raises(ConfigError) as caught:
        Vectors(tuple("aabbccddee"), np.zeros((10, 1), np.float32), "here")
    assert caught.value.value == "'a', 'b', 'c' and 2 more"
