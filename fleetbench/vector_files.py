"""Files of vectors: the Parquet that an evaluation writes, and what a service's answers may be kept in.

- ``.parquet``: columns ``id`` (text or whole numbers) and ``vector`` (lists of float32);
- ``.jsonl``: a line ``{"id": "17", "vector": [0.5, ...]}`` a sample, whatever else it holds;
- ``.csv``: a header ``id,...``, then a sample a line: its id, and its vector's numbers in order.

Numbers written as text are read as float64 and rounded to float32.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq

from fleetbench.digests import MANIFEST, check_file, read_manifest, reading
from fleetbench.errors import ConfigError
from fleetbench.vectors import ID, VECTOR, Values, Vectors

FILE = "vectors.parquet"
"""Name of the file in an evaluation's folder."""

_JSON_LINE = '{"id": "17", "vector": [0.5, -1.25]}'
_ONE_LENGTH = "a vector of the same number of numbers for every sample"

Read = tuple[list[str], Values]


def read_vectors(path: Path) -> Vectors:
    """The vectors of a file, or of an evaluation's folder.

    Raises ``ConfigError`` for a file that cannot be read, that holds other types than float32, lists of
    several lengths, or an id twice.
    """
    if path.is_dir():
        if not (path / MANIFEST).is_file() or not (path / FILE).is_file():
            hint = "an evaluation's folder below runs/, or a file of vectors"
            raise ConfigError("not a complete evaluation", str(path), hint=hint)
        read_manifest(path, "evaluate again")
        path /= FILE
    check_file(path)
    read = _READERS.get(path.suffix.lower())
    if read is None:
        hint = f"{', '.join(_READERS)}, or the folder of an evaluation"
        raise ConfigError("not a kind of file that vectors are read from", str(path), repr(path.suffix), hint)
    with reading(path, f"a whole {path.suffix} file; docs/evaluate.md shows one", pa.ArrowException):
        ids, values = read(path)
    if not ids or not values.shape[1]:
        raise ConfigError("holds no vectors", str(path), hint="a vector for every sample that was sent to the service")
    return Vectors(tuple(ids), values, str(path))


def _read_parquet(path: Path) -> Read:
    with pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        for name in (ID, VECTOR):
            if name not in schema.names:
                raise ConfigError(f"has no column {name}", str(path), ", ".join(schema.names), f"columns {ID} and {VECTOR}")
        ids, vectors = schema.field(ID).type, schema.field(VECTOR).type
        if not (pa.types.is_string(ids) or pa.types.is_large_string(ids) or pa.types.is_integer(ids)):
            raise ConfigError("ids are text or whole numbers", f"{path}: {ID}", str(ids), "write the ids that the evaluation has")
        lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        if not any(matches(vectors) for matches in lists) or vectors.value_type != pa.float32():
            hint = "cast them to lists of float32 where they are written, so that it is known what is compared"
            raise ConfigError("vectors are lists of float32", f"{path}: {VECTOR}", str(vectors), hint)
        table = file.read(columns=[ID, VECTOR])
    numbers = pc.list_flatten(table.column(VECTOR))
    lengths = pc.unique(pc.list_value_length(table.column(VECTOR))).to_pylist()
    if table.column(ID).null_count or numbers.null_count or None in lengths:
        raise ConfigError("an id, a vector or a number is missing", str(path), "null", "a whole vector for every sample")
    if len(lengths) > 1:
        raise ConfigError("vectors have several lengths", str(path), ", ".join(map(str, sorted(lengths)[:4])), _ONE_LENGTH)
    values = numbers.to_numpy().reshape(table.num_rows, lengths[0] if lengths else 0)
    return [str(name) for name in table.column(ID).to_pylist()], values


def _read_json_lines(path: Path) -> Read:
    ids: list[str] = []
    rows: list[Values] = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            name, row = _json_line(line, f"{path}:{number}")
            if rows and len(row) != len(rows[0]):
                raise ConfigError(f"a vector of {len(row)} numbers behind vectors of {len(rows[0])}", f"{path}:{number}", name, _ONE_LENGTH)
            ids.append(name)
            rows.append(row)
    return ids, np.stack(rows) if rows else np.empty((0, 0), np.float32)


def _json_line(line: str, where: str) -> tuple[str, Values]:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"is no line of JSON: {error}", where, line.strip()[:40], _JSON_LINE) from None
    if not isinstance(data, dict) or type(data.get(ID)) not in (str, int) or not isinstance(data.get(VECTOR), list):
        raise ConfigError(f"has no {ID} and {VECTOR}", where, line.strip()[:40], _JSON_LINE)
    odd = next((item for item in data[VECTOR] if type(item) not in (int, float)), None)
    if odd is not None or None in data[VECTOR]:
        raise ConfigError("a vector holds numbers", where, repr(odd), _JSON_LINE)
    try:
        return str(data[ID]), _rounded(np.array(data[VECTOR], np.float64))
    except OverflowError:
        raise ConfigError("a whole number is too large for float32", where, line.strip()[:40], _JSON_LINE) from None


def _read_csv(path: Path) -> Read:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        header = next(csv.reader(lines), [])
    if len(header) < 2 or header[0].strip() != ID:
        raise ConfigError(f"the header is {ID} and a name for every number", f"{path}:1", ",".join(header[:4]), "id,v0,v1,v2")
    numbers = [str(place) for place in range(len(header) - 1)]
    table = arrow_csv.read_csv(
        path,
        read_options=arrow_csv.ReadOptions(column_names=[ID, *numbers], skip_rows=1),
        convert_options=arrow_csv.ConvertOptions(column_types={ID: pa.string(), **dict.fromkeys(numbers, pa.float64())}, null_values=[""]),
    )
    empty = next((header[place + 1] for place, name in enumerate(numbers) if table.column(name).null_count), None)
    if empty is not None:
        raise ConfigError("a number is missing", str(path), f"column {empty}", "a whole vector for every sample")
    values = np.empty((table.num_rows, len(numbers)), np.float32)
    for place, name in enumerate(numbers):
        values[:, place] = _rounded(table.column(name).to_numpy())
    return [str(name) for name in table.column(ID).to_pylist()], values


def _rounded(numbers: Any) -> Values:
    with np.errstate(over="ignore"):  # what float32 cannot hold is infinite, and no such vector passes
        return np.asarray(numbers, np.float64).astype(np.float32)


_READERS: Mapping[str, Callable[[Path], Read]] = {".parquet": _read_parquet, ".jsonl": _read_json_lines, ".csv": _read_csv}
