"""Vectors: what the last layer gave for every sample, by the sample's id; their files, and how far two sets of them are apart.

A file is Parquet with the columns ``id`` (text or whole numbers) and ``vector`` (lists of float32).
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
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
_ROW_GROUP = 2**22
"""Numbers of a row group, 16 MiB: what is held before it is written."""
_CHUNK = 2**20
"""Numbers that are laid side by side at once, in float64."""
_ONE_LENGTH = "a vector of the same number of numbers for every sample"


@dataclass(frozen=True, slots=True)
class Vectors:
    """A vector a sample. Raises ``ConfigError`` where an id comes twice."""

    ids: tuple[str, ...]
    values: Values
    """``(samples, length)``."""
    source: str
    """Where they come from, for errors and tables."""

    def __post_init__(self) -> None:
        assert self.values.dtype == np.float32
        assert self.values.shape[:1] == (len(self.ids),)
        assert self.values.ndim == 2
        refuse_repeated(self.ids, self.source)

    @property
    def length(self) -> int:
        """Numbers of a vector."""
        return int(self.values.shape[1])


def refuse_repeated(ids: Sequence[str], where: str) -> None:
    """Raise ``ConfigError`` for ids that come more than once, naming some."""
    if len(set(ids)) < len(ids):
        repeated = [name for name, number in Counter(ids).items() if number > 1]
        raise ConfigError("a sample comes twice", where, name_some(repeated), "one vector for every id")


def name_some(ids: Sequence[str]) -> str:
    """The first few ids, and how many more there are."""
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return ", ".join(repr(name) for name in ids[:_NAMED]) + more


def write_vectors(path: Path, batches: Iterable[tuple[Sequence[str], Values]]) -> int:
    """Write vectors ``(samples, length)`` with their ids, as Parquet, and return their length. After an error no file is there.

    Raises ``ConfigError`` for vectors of several lengths, and where there are none; ``OSError`` where the disk refuses.
    """
    held: list[pa.Table] = []
    length = 0
    with contextlib.ExitStack() as opened:
        opened.push(lambda error, *_: path.unlink(missing_ok=True) if error else None)  # a Ctrl-C too leaves no half of a file
        for ids, values in batches:
            if not length:
                length = int(values.shape[1])
                types = [pa.field(ID, pa.string(), nullable=False), pa.field(VECTOR, pa.list_(pa.float32(), length), nullable=False)]
                schema = pa.schema(types)
                # no two ids, and hardly two numbers, are alike
                file = opened.enter_context(pq.ParquetWriter(path, schema, use_dictionary=False))
            if values.shape[1] != length:
                hint = "a vector of one length for every sample"
                raise ConfigError(f"vectors of {values.shape[1]} numbers after vectors of {length}", str(path), ids[0], hint)
            vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), length)
            held.append(pa.table([pa.array(ids, pa.string()), vectors], schema=schema))
            if sum(map(len, held)) * length >= _ROW_GROUP:
                file.write_table(pa.concat_tables(held))
                held.clear()
        if held:
            file.write_table(pa.concat_tables(held))
    if not length:
        raise ConfigError("there is no sample", str(path), hint="data of at least one sample")
    return length


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
    with reading(path, "Parquet, or the folder of an evaluation; docs/evaluate.md converts JSON lines", pa.ArrowException):
        ids, values = _read_parquet(path)
    if not ids or not values.shape[1]:
        raise ConfigError("holds no vectors", str(path), hint="a vector for every sample that was sent to the service")
    return Vectors(tuple(ids), values, str(path))


def _read_parquet(path: Path) -> tuple[list[str], Values]:
    table = pq.read_table(path)
    ids, vectors = ((table.schema.field(name).type if name in table.schema.names else None) for name in (ID, VECTOR))
    is_named = ids is not None and (pa.types.is_string(ids) or pa.types.is_large_string(ids) or pa.types.is_integer(ids))
    if not is_named or vectors is None or getattr(vectors, "value_type", None) != pa.float32():  # nothing is cast in silence
        hint = "write the ids that the evaluation has, and vectors as float32"
        found = ", ".join(f"{field.name}: {field.type}" for field in table.schema)
        raise ConfigError(f"needs {ID}, text or whole numbers, and {VECTOR}, lists of float32", str(path), found, hint)
    numbers = pc.list_flatten(table.column(VECTOR))
    lengths = pc.unique(pc.list_value_length(table.column(VECTOR))).to_pylist()
    if table.column(ID).null_count or numbers.null_count or None in lengths:
        raise ConfigError("an id, a vector or a number is missing", str(path), "null", "a whole vector for every sample")
    if len(lengths) > 1:
        raise ConfigError("vectors have several lengths", str(path), ", ".join(map(str, sorted(lengths)[:4])), _ONE_LENGTH)
    values = numbers.to_numpy().reshape(table.num_rows, lengths[0] if lengths else 0)
    return [str(name) for name in table.column(ID).to_pylist()], values


def compare_vectors(offline: Vectors, online: Vectors, tolerance: float) -> dict[str, Any]:
    """Lay vectors side by side by their samples' ids, in whatever order either has them; as JSON's data, None for what is not finite.

    Of a sample: ``cosine`` of the angle (1 where both vectors are zero, 0 where one is); ``difference``, the largest absolute one of a
    number, which is at place ``component``; ``relative``, its share of the largest magnitude in the offline vector. Where a vector
    holds NaN or infinity, or only the offline one is zero, ``relative`` is infinite. A sample whose ``relative`` is above ``tolerance``
    is past it; ``worst`` holds those with the largest. ``num_equal`` counts vectors equal to the bit, but for the sign of a zero.

    Raises ``ConfigError`` for vectors of another length, and for samples that only one side has.
    """
    rows = _rows(offline, online)
    step = max(1, _CHUNK // offline.length)
    parts = [slice(at, at + step) for at in range(0, len(rows), step)]
    a, b = offline.values, online.values  # noqa: PD011  # no table of pandas'
    found = pd.concat([_differences(a[part], b[rows[part]]) for part in parts], ignore_index=True)
    finite = found[np.isfinite(found["difference"])]
    worst = found.sort_values(["relative", "cosine"], ascending=[False, True], na_position="first").head(WORST)
    num_past = int((~(found["relative"] <= tolerance)).sum())
    figures = {
        "offline": offline.source,
        "online": online.source,
        "samples": len(rows),
        "length": offline.length,
        "tolerance": tolerance,
        "num_past": num_past,
        "num_not_finite": len(found) - len(finite),
        "num_equal": int((found["difference"] == 0).sum()),
        "lowest_cosine": float(finite["cosine"].min()),
        "mean_cosine": float(finite["cosine"].mean()),
        "difference": _spread(finite["difference"]),
        "relative": _spread(finite["relative"]),
        "worst": [{"id": offline.ids[row]} | differences for row, differences in zip(worst.index, worst.to_dict("records"), strict=True)],
        "passed": num_past == 0,
    }
    return dict(json.loads(json.dumps(figures), parse_constant=lambda _: None))


def _rows(offline: Vectors, online: Vectors) -> npt.NDArray[np.intp]:
    """Of every offline sample the row of its online vector."""
    if offline.length != online.length:
        hint = f"both of one layer of one model: {offline.source} has {offline.length}"
        raise ConfigError("vectors of another length", online.source, f"{online.length} numbers", hint)
    rows = pd.Index(online.ids).get_indexer(pd.Index(offline.ids))
    missing = [name for name, row in zip(offline.ids, rows, strict=True) if row < 0]
    if missing:
        hint = "ask the service for every sample, or evaluate only the first N by --samples N"
        raise ConfigError(f"{len(missing)} of {len(offline.ids)} samples have no vector", online.source, name_some(missing), hint)
    if len(online.ids) > len(rows):
        unknown = sorted(set(online.ids) - set(offline.ids), key=online.ids.index)
        hint = f"{offline.source} has ids such as {offline.ids[0]!r}; evaluate all that the service was sent, or drop these"
        raise ConfigError(f"{len(unknown)} samples were not evaluated", online.source, name_some(unknown), hint)
    return rows


def _differences(offline: Values, online: Values) -> pd.DataFrame:
    """A row a sample; see ``compare_vectors``."""
    usable = np.isfinite(offline) & np.isfinite(online)
    finite = np.asarray(usable.all(axis=1))
    a, b = (np.where(finite[:, None], values, 0).astype(np.float64) for values in (offline, online))
    apart, largest = np.abs(b - a), np.abs(a).max(axis=1)
    component = np.where(finite, apart.argmax(axis=1), usable.argmin(axis=1))
    difference = np.where(finite, apart.max(axis=1), np.inf)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    both_zero = ~(a.any(axis=1) | b.any(axis=1))
    cosine = np.where(both_zero, 1.0, (a * b).sum(axis=1) / np.where(norms > 0, norms, 1.0)).clip(-1.0, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(difference == 0, 0.0, difference / largest)
    at = np.arange(len(offline)), component
    return pd.DataFrame(
        {
            "cosine": np.where(finite, cosine, np.nan),
            "difference": difference,
            "relative": relative,
            "component": component,
            "offline": offline[at],
            "online": online[at],
        }
    )


def _spread(values: pd.Series) -> dict[str, float]:
    """Of shares, those that are infinite count in ``max`` alone."""
    finite = values[np.isfinite(values)]
    return {"max": float(values.max()), "p95": float(finite.quantile(0.95)), "mean": float(finite.mean())}
