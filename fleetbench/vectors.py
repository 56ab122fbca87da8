"""Vectors: what the last layer gave for every sample, by the sample's id, and the Parquet file that keeps them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from fleetbench.errors import ConfigError, EnvironmentLacks

Values = npt.NDArray[np.float32]

ID, VECTOR = "id", "vector"
"""Columns of the file: strings, and lists of float32 of one fixed size."""
NAMED = 3
"""Ids that an error names, where there are more."""

_ROW_GROUP = 2**22
"""Numbers of a row group, 16 MiB: what is held before it is written."""


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


class VectorWriter:
    """Writes a file of vectors batch by batch. A context manager: the file has its name once it is left without an error.

    Before that, and after an error, nothing is there. Raises ``ConfigError`` for an id that comes
    twice, for vectors of several lengths, and where nothing was added; ``EnvironmentLacks`` where the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial")
        self._file: Any = None
        self._ids: list[str] = []
        self._values: list[Values] = []
        self._seen: set[str] = set()
        self.length = 0
        """Numbers of a vector, once there is one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            if self._file is not None:
                self._file.close()
            self._partial.unlink(missing_ok=True)

    def add(self, ids: Sequence[str], values: Values) -> None:
        """Add vectors ``(samples, length)``."""
        if not self._seen:
            self.length = int(values.shape[1])
        elif values.shape[1] != self.length:
            hint = "a vector of one length for every sample; --layer NAME takes another layer's"
            raise ConfigError(f"vectors of {values.shape[1]} numbers behind vectors of {self.length}", str(self._path), ids[0], hint)
        refuse_repeated([*(name for name in ids if name in self._seen), *ids], str(self._path))
        self._seen.update(ids)
        self._ids += ids
        self._values.append(values)
        if len(self._ids) * self.length >= _ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        if not self._ids:
            return
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(self._values).reshape(-1)), self.length)
        schema = pa.schema([pa.field(ID, pa.string(), nullable=False), pa.field(VECTOR, vectors.type, nullable=False)])
        with _written(self._path):
            if self._file is None:
                self._file = pq.ParquetWriter(self._partial, schema, use_dictionary=False)  # no two ids, and hardly two numbers, are alike
            self._file.write_table(pa.table([pa.array(self._ids, pa.string()), vectors], schema=schema))
        self._ids, self._values = [], []

    def _finish(self) -> None:
        if not self._seen:
            raise ConfigError("there is no sample", str(self._path), hint="data of at least one sample")
        self._flush()
        with _written(self._path):
            self._file.close()
            self._file = None
            self._partial.replace(self._path)


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    """Turn what the disk refuses inside the ``with`` into ``EnvironmentLacks`` that names ``path``."""
    try:
        yield
    except OSError as error:
        raise EnvironmentLacks(
            f"cannot be written: {error.strerror or error}", str(path), hint="name another folder with --out DIR"
        ) from None


def refuse_repeated(ids: Sequence[str], where: str) -> None:
    """Raise ``ConfigError`` for ids that come more than once, naming some."""
    if len(set(ids)) < len(ids):
        repeated = [name for name, number in Counter(ids).items() if number > 1]
        raise ConfigError("a sample comes twice", where, name_some(repeated), "one vector for every id")


def name_some(ids: Sequence[str]) -> str:
    """The first few ids, and how many more there are."""
    more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
    return ", ".join(repr(name) for name in ids[:NAMED]) + more
