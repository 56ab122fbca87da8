"""Vectors: outputs of the last layer for every sample, by the sample's id; their files and differences.

A file is Parquet with the columns ``id`` (text or whole numbers) and ``vector`` (lists of float32).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fleetbench.digests import MANIFEST, check_file, read_manifest, reading
from fleetbench.errors import ConfigError

Values = npt.NDArray[np.float32]

FILE = "vectors.parquet"
"""Name of the file in an evaluation's folder."""
ID, VECTOR = "id", "vector"
"""Columns of the file: strings, and lists of float32 of one fixed size."""
WORST = 10
"""Number of samples with the largest differences that a comparison lists."""

_NAMED = 3
"""Largest number of ids that an error lists."""


@dataclass(frozen=True, slots=True)
class Vectors:
    """One vector per sample. Raises ``ConfigError`` if an id occurs twice."""

    ids: tuple[str, ...]
    values: Values
    """Vectors, shape ``(samples, length)``."""
    source: str
    """Source of the vectors, for errors and tables."""

    def __post_init__(self) -> None:
        refuse_repeated(self.ids, self.source)

    @property
    def length(self) -> int:
        """Length of a vector."""
        return int(self.values.shape[1])


def refuse_repeated(ids: Sequence[str], where: str) -> None:
    """Raise ``ConfigError`` for ids that occur more than once, listing some."""
    names = pd.Index(ids)
    if repeated := names[names.duplicated()].unique().tolist():
        raise ConfigError("a sample comes twice", where, name_some(repeated), "one vector for every id")


def name_some(ids: Sequence[str]) -> str:
    """Return the first few ids, and how many more there are."""
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return ", ".join(repr(name) for name in ids[:_NAMED]) + more


def write_vectors(path: Path, ids: Sequence[str], values: Values) -> None:
    """Write vectors ``(samples, length)`` with their ids, as Parquet. Raises ``OSError`` if writing fails."""
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    # no two ids, and hardly two numbers, are alike
    pq.write_table(pa.table({ID: pa.array(ids, pa.string()), VECTOR: vectors}), path, use_dictionary=False)


def read_vectors(path: Path) -> Vectors:
    """Read the vectors of a file, or of an evaluation's folder.

    Raises ``ConfigError`` for a file that cannot be read, types other than float32, lists of several lengths,
    or an id that occurs twice.
    """
    if path.is_dir():
        if not (path / MANIFEST).is_file() or not (path / FILE).is_file():
            raise ConfigError("not a complete evaluation", str(path), hint="an evaluation's folder below runs/, or a file of vectors")
        read_manifest(path, "evaluate again")
        path /= FILE
    check_file(path)
    with reading(path, "Parquet with the columns id and vector (lists of float32), or the folder of an evaluation", pa.ArrowException):
        table = pq.read_table(path)
    types = dict(zip(table.schema.names, table.schema.types, strict=True))
    ids, vectors = (types.get(name, pa.null()) for name in (ID, VECTOR))
    is_named = pa.types.is_string(ids) or pa.types.is_large_string(ids) or pa.types.is_integer(ids)
    if not is_named or getattr(vectors, "value_type", None) != pa.float32():  # no silent casts
        hint = "write the ids that the evaluation has, and vectors as float32"
        found = ", ".join(f"{name}: {kind}" for name, kind in types.items())
        raise ConfigError(f"needs {ID}, text or whole numbers, and {VECTOR}, lists of float32", str(path), found, hint)
    numbers = pc.list_flatten(table[VECTOR])
    lengths = pc.unique(pc.list_value_length(table[VECTOR])).to_pylist()
    if table[ID].null_count or numbers.null_count or len(lengths) != 1 or not lengths[0]:
        found = f"vectors of lengths {', '.join(map(str, lengths[:4])) or 'none'}"
        raise ConfigError("needs an id and a whole vector of one length for every sample", str(path), found, "leave no null and no gap")
    return Vectors(tuple(map(str, table[ID].to_pylist())), numbers.to_numpy().reshape(len(table), lengths[0]), str(path))


def compare_vectors(offline: Vectors, online: Vectors, tolerance: float) -> dict[str, Any]:
    """Compare vectors by their samples' ids, in any order.

    Returns JSON data, with None for non-finite numbers.

    A sample's ``share`` is the largest absolute difference of a component over the largest magnitude in the
    offline vector. It is infinite if a vector holds NaN or infinity, or if only the offline vector is zero.
    ``num_past`` counts samples with a share above ``tolerance``; ``worst`` lists the largest. ``num_equal``
    counts vectors that are bitwise equal, except for the sign of zero.

    Raises ``ConfigError`` for vectors of different lengths, and for samples that only one side has.
    """
    a, b = offline.values, online.values[_rows(offline, online)]  # noqa: PD011  # no table of pandas'
    finite = (np.isfinite(a) & np.isfinite(b)).all(axis=1, keepdims=True)
    x, y = (np.where(finite, values, 0).astype(np.float64) for values in (a, b))
    difference = np.where(finite, np.abs(y - x), np.inf).max(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(difference == 0, 0.0, difference / np.abs(x).max(axis=1))
    num_past = int((share > tolerance).sum())
    worst = np.argsort(-share, kind="stable")[:WORST]
    return {
        "offline": offline.source,
        "online": online.source,
        "samples": len(a),
        "length": offline.length,
        "tolerance": tolerance,
        "num_past": num_past,
        "num_not_finite": int((~finite).sum()),
        "num_equal": int((difference == 0).sum()),
        "worst": [{"id": offline.ids[row], "share": float(share[row]) if np.isfinite(share[row]) else None} for row in worst],
        "passed": num_past == 0,
    }


def _rows(offline: Vectors, online: Vectors) -> npt.NDArray[np.intp]:
    """Return the row of the online vector for every offline sample."""
    if offline.length != online.length:
        hint = f"both of one layer of one model: {offline.source} has {offline.length}"
        raise ConfigError("vectors of another length", online.source, f"{online.length} numbers", hint)
    evaluated, returned = pd.Index(offline.ids), pd.Index(online.ids)
    rows = returned.get_indexer(evaluated)
    missing, unknown = evaluated[rows < 0].tolist(), returned[~returned.isin(evaluated)].tolist()
    if missing:
        hint = "ask the service for every sample, or evaluate only the first N by --samples N"
        raise ConfigError(f"{len(missing)} of {len(rows)} samples have no vector", online.source, name_some(missing), hint)
    if unknown:
        hint = f"{offline.source} has ids such as {offline.ids[0]!r}; evaluate all that the service was sent, or drop these"
        raise ConfigError(f"{len(unknown)} samples were not evaluated", online.source, name_some(unknown), hint)
    return rows
