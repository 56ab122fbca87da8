"""Vectors: what the last layer gave for every sample, by the sample's id; their files, and how far two sets of them are apart.

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

from fleetbench.digests import MANIFEST, check_file, read_manifest, reading
from fleetbench.errors import ConfigError

Values = npt.NDArray[np.float32]

FILE = "vectors.parquet"
"""Name of the file in an evaluation's folder."""
ID, VECTOR = "id", "vector"
"""Columns of the file: strings, and lists of float32 of one fixed size."""
WORST = 10
"""Samples that a comparison names."""

_NAMED = 3
"""Ids that an error names, where there are more."""


@dataclass(frozen=True, slots=True)
class Vectors:
    """A vector a sample. Raises ``ConfigError`` where an id comes twice."""

    ids: tuple[str, ...]
    values: Values
    """``(samples, length)``."""
    source: str
    """Where they come from, for errors and tables."""

    def __post_init__(self) -> None:
        refuse_repeated(self.ids, self.source)

    @property
    def length(self) -> int:
        """Numbers of a vector."""
        return int(self.values.shape[1])


def refuse_repeated(ids: Sequence[str], where: str) -> None:
    """Raise ``ConfigError`` for ids that come more than once, naming some."""
    names = pd.Index(ids)
    if repeated := names[names.duplicated()].unique().tolist():
        raise ConfigError("a sample comes twice", where, name_some(repeated), "one vector for every id")


def name_some(ids: Sequence[str]) -> str:
    """The first few ids, and how many more there are."""
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return ", ".join(repr(name) for name in ids[:_NAMED]) + more


def write_vectors(path: Path, ids: Sequence[str], values: Values) -> None:
    """Write vectors ``(samples, length)`` with their ids, as Parquet. Raises ``OSError`` where the disk refuses."""
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    # no two ids, and hardly two numbers, are alike
    pq.write_table(pa.table({ID: pa.array(ids, pa.string()), VECTOR: vectors}), path, use_dictionary=False)


def read_vectors(path: Path) -> Vectors:
    """The vectors of a file, or of an evaluation's folder.

    Raises ``ConfigError`` for a file that cannot be read, that holds other types than float32, lists of
    several lengths, or an id twice.
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
    if not is_named or getattr(vectors, "value_type", None) != pa.float32():  # nothing is cast in silence
        hint = "write the ids that the evaluation has, and vectors as float32"
        found = ", ".join(f"{name}: {kind}" for name, kind in types.items())
        raise ConfigError(f"needs {ID}, text or whole numbers, and {VECTOR}, lists of float32", str(path), found, hint)
    numbers = pc.list_flatten(table[VECTOR])
    lengths = pc.unique(pc.list_value_length(table[VECTOR])).to_pylist()
    if table[ID].null_count or numbers.null_count or len(lengths) != 1 or not lengths[0]:
        hint = "an id and a vector, of one length above 0 and with no number missing, for every sample"
        raise ConfigError("holds missing numbers, no vectors, or vectors of several lengths", str(path), f"lengths {lengths[:4]}", hint)
    return Vectors(tuple(map(str, table[ID].to_pylist())), numbers.to_numpy().reshape(len(table), lengths[0]), str(path))


def compare_vectors(offline: Vectors, online: Vectors, tolerance: float) -> dict[str, Any]:
    """Lay vectors side by side by their samples' ids, in whatever order either has them; as JSON's data, None for what is not finite.

    Of a sample: ``cosine`` of the angle (1 where both vectors are zero, 0 where one is); ``difference``, the largest absolute one of a
    number, which is at place ``component``; ``relative``, its share of the largest magnitude in the offline vector. Where a vector
    holds NaN or infinity, or only the offline one is zero, ``relative`` is infinite. A sample whose ``relative`` is above ``tolerance``
    is past it; ``worst`` holds those with the largest. ``num_equal`` counts vectors equal to the bit, but for the sign of a zero.

    Raises ``ConfigError`` for vectors of another length, and for samples that only one side has.
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
    """Of every offline sample the row of its online vector."""
    if offline.length != online.length:
        hint = f"both of one layer of one model: {offline.source} has {offline.length}"
        raise ConfigError("vectors of another length", online.source, f"{online.length} numbers", hint)
    evaluated, returned = pd.Index(offline.ids), pd.Index(online.ids)
    rows = returned.get_indexer(evaluated)
    missing, unknown = evaluated[rows < 0].tolist(), returned[~returned.isin(evaluated)].tolist()
    if missing or unknown:
        what = f"{len(missing)} of {len(rows)} samples have no vector, and {len(unknown)} were not evaluated"
        hint = f"{offline.source} has ids such as {offline.ids[0]!r}; evaluate only the first N by --samples N"
        raise ConfigError(what, online.source, name_some(missing or unknown), hint)
    return rows


def _differences(offline: Vectors, online: Vectors) -> pd.DataFrame:
    """A row a sample, in the order of ``offline``; see ``compare_vectors``."""
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
    """Of shares, those that are infinite count in ``max`` alone."""
    finite = values[np.isfinite(values)]
    return {"max": float(values.max()), "p95": float(finite.quantile(0.95)), "mean": float(finite.mean())}
