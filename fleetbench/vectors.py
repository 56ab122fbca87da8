"""Vectors: outputs of the last layer for every sample, by the sample's id; their files and differences.

A file is Parquet with the columns ``id`` (text or whole numbers) and ``vector`` (lists of float32).
"""

import json
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

from fleetbench.digests import MANIFEST, check_file, read_manifest, reading, refuse_large_table
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
        refuse_large_table(path, str(path))
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
    if table[ID].null_count or numbers.null_count or None in lengths:
        raise ConfigError("an id, a vector or a number is missing", str(path), "null", "a whole vector for every sample")
    if not any(lengths):
        raise ConfigError("holds no vectors", str(path), hint="a vector for every sample that was sent to the service")
    if len(lengths) > 1:
        hint = "a vector of the same number of numbers for every sample"
        raise ConfigError("vectors have several lengths", str(path), ", ".join(map(str, sorted(lengths)[:4])), hint)
    return Vectors(tuple(map(str, table[ID].to_pylist())), numbers.to_numpy().reshape(len(table), lengths[0]), str(path))


def compare_vectors(offline: Vectors, online: Vectors, tolerance: float) -> dict[str, Any]:
    """Compare vectors by their samples' ids, in any order.

    Returns JSON data, with None for non-finite numbers.

    For each sample: ``cosine`` of the angle (1 if both vectors are zero, 0 if one is); ``difference``, the
    largest absolute difference of a component, whose index is ``component``; and ``relative``, its ratio to
    the largest magnitude in the offline vector. ``relative`` is infinite if a vector holds NaN or infinity,
    or if only the offline vector is zero. ``num_past`` counts samples with ``relative`` above ``tolerance``;
    ``worst`` lists the largest. ``num_equal`` counts vectors that are bitwise equal, except for the sign of
    zero.

    Raises ``ConfigError`` for vectors of different lengths, and for samples that only one side has.
    """
    found = _differences(offline, online)
    finite = found[np.isfinite(found["difference"])]
    worst = found.sort_values(["relative", "cosine"], ascending=[False, True], na_position="first").head(WORST)
    num_past = int((~(found["relative"] <= tolerance)).sum())
    figures = {
        "offline": offline.source,
        "online": online.source,
        "samples": len(found),
        "length": offline.length,
        "tolerance": tolerance,
        "num_past": num_past,
        "num_not_finite": len(found) - len(finite),
        "num_equal": int((found["difference"] == 0).sum()),
        "lowest_cosine": float(finite["cosine"].min()),
        "mean_cosine": float(finite["cosine"].mean()),
        "difference": _spread(finite["difference"]),
        "relative": _spread(finite["relative"]),
        "worst": worst.to_dict("records"),
        "passed": num_past == 0,
    }
    return dict(json.loads(json.dumps(figures), parse_constant=lambda _: None))


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


def _differences(offline: Vectors, online: Vectors) -> pd.DataFrame:
    """Return a row per sample, in the order of ``offline``; see ``compare_vectors``."""
    a, b = offline.values, online.values[_rows(offline, online)]  # noqa: PD011  # no table of pandas'
    usable = np.isfinite(a) & np.isfinite(b)
    finite = np.asarray(usable.all(axis=1))
    x, y = (np.where(finite[:, None], values, 0).astype(np.float64) for values in (a, b))
    apart, largest = np.abs(y - x), np.abs(x).max(axis=1)
    component = np.where(finite, apart.argmax(axis=1), usable.argmin(axis=1))
    difference = np.where(finite, apart.max(axis=1), np.inf)
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    both_zero = ~(x.any(axis=1) | y.any(axis=1))
    cosine = np.where(both_zero, 1.0, (x * y).sum(axis=1) / np.where(norms > 0, norms, 1.0)).clip(-1.0, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(difference == 0, 0.0, difference / largest)
    at = np.arange(len(a)), component
    return pd.DataFrame(
        {
            "id": offline.ids,
            "cosine": np.where(finite, cosine, np.nan),
            "difference": difference,
            "relative": relative,
            "component": component,
            "offline": a[at],
            "online": b[at],
        }
    )


def _spread(values: pd.Series) -> dict[str, float]:
    """Return ``max``, ``p95`` and ``mean``. Infinite values only count in ``max``."""
    finite = values[np.isfinite(values)]
    return {"max": float(values.max()), "p95": float(finite.quantile(0.95)), "mean": float(finite.mean())}
