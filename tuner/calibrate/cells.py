"""Cells: measurements for a calibration, read from a CSV file or from the output of a benchmark."""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleetbench.collective_logs import all_reduces
from fleetbench.config import nearest
from fleetbench.digests import read_text
from fleetbench.errors import ConfigError

GPUS = "gpus"
"""Setting of a cell: number of trainers on all nodes together."""
GLOBAL_BATCH = "global_batch"
"""Setting of a cell: samples per step of all trainers together."""
SECONDS, RATE, SIZE, SD = "seconds", "samples_per_s", "all_reduce_bytes", "sd"
_COLUMNS = (SECONDS, RATE, SIZE, SD)
_CALLED = {"nodes": "cluster.nodes", "gpus_per_node": "cluster.trainers_per_node", "local_batch": "workload.batch_size"}
"""Short names of columns, by name: the keys that they stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement: settings that differ from the experiment's, and either ``seconds`` or ``samples_per_s``."""

    where: str
    """File and line of the measurement."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Values, as ``--set`` takes them, by dotted key of the experiment, ``GPUS`` or ``GLOBAL_BATCH``."""
    seconds: float | None = None
    """Seconds of a step, or of one bare all-reduce; None if ``samples_per_s`` was measured."""
    samples_per_s: float | None = None
    """Samples per second of all trainers together; None if ``seconds`` were measured."""
    all_reduce_bytes: int | None = None
    """Bytes of every rank's buffer in a bare all-reduce; None if a step was timed."""
    sd: float | None = None
    """Standard deviation of the measured value, in the same unit; None if unknown."""
    ranks: int | None = None
    """Number of ranks that took part, if the file says so."""

    @property
    def name(self) -> str:
        """Settings and size of the all-reduce, in words."""
        size = [] if self.all_reduce_bytes is None else [f"all-reduce of {self.all_reduce_bytes:,} bytes"]
        return ", ".join([*(f"{key}={value}" for key, value in self.settings.items()), *size]) or "as declared"


def read_cells(path: str | Path, say: Callable[[str], None] = lambda _: None) -> tuple[Cell, ...]:
    """Read a CSV file of settings and measurements, or a benchmark's output, either also as gzip.

    An empty value keeps what the experiment declares. ``say`` is called with what was left out of a
    benchmark's output. Raises ``ConfigError`` with the line that cannot be read.
    """
    hint = "name a CSV file with a column `seconds`, or the output of nccl-tests"
    text = read_text(path, hint)
    found = all_reduces(text, str(path), say)
    if found is not None:
        return tuple(Cell(where=place, seconds=seconds, all_reduce_bytes=nbytes, ranks=ranks) for place, nbytes, seconds, ranks in found)
    cells = _of_csv(text.splitlines(), str(path))
    if not cells:
        raise ConfigError("holds no measurement", str(path), hint="a row for each measurement, below the names of the columns")
    return cells


def _of_csv(lines: Sequence[str], path: str) -> tuple[Cell, ...]:
    rows = csv.reader(lines, strict=True, skipinitialspace=True)
    columns: list[str] = []
    cells = []
    try:
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if not row or row[0].startswith("#"):
                continue
            if not columns:
                columns = _columns(row, where)
            elif len(row) != len(columns):
                raise ConfigError(f"needs {len(columns)} values", where, str(len(row)), "quote a value that holds a comma")
            else:
                cells.append(_cell({key: text.strip() for key, text in zip(columns, row, strict=True) if text.strip()}, where))
    except csv.Error as error:
        raise ConfigError(f"is no CSV: {error}", f"{path}, line {rows.line_num}", hint='write " inside quotes twice') from None
    return tuple(cells)


def _columns(names: Sequence[str], where: str) -> list[str]:
    """Return the key of each column."""
    keys = [_CALLED.get(name.strip(), name.strip()) for name in names]
    known = (*_COLUMNS, GPUS, GLOBAL_BATCH)
    for key in keys:
        if "." not in key and key not in known:
            hint = f"keys of the experiment such as cluster.nodes, {', '.join((*known, *_CALLED))}{nearest(key, (*known, *_CALLED))}"
            raise ConfigError("is no column of measurements", where, repr(key), hint)
    if len(set(keys)) < len(keys):
        raise ConfigError("names a column twice", where, repr(max(keys, key=keys.count)), "keep one of them")
    return keys


def _cell(row: Mapping[str, str], where: str) -> Cell:
    numbers = {key: _number(row[key], f"{where}, {key}") for key in _COLUMNS if key in row}
    if (SECONDS in numbers) == (RATE in numbers):
        hint = "seconds of a step, or samples per second of all trainers; drop a row that was not measured"
        raise ConfigError(f"needs one of {SECONDS} and {RATE}", where, "both" if SECONDS in numbers else "neither", hint)
    if SIZE in numbers and (RATE in numbers or numbers[SIZE] % 1):
        raise ConfigError(f"needs a whole number of bytes, and {SECONDS}", f"{where}, {SIZE}", row[SIZE], "for example 1048576")
    return Cell(
        where=where,
        settings={key: text for key, text in row.items() if key not in _COLUMNS},
        seconds=numbers.get(SECONDS),
        samples_per_s=numbers.get(RATE),
        all_reduce_bytes=int(numbers[SIZE]) if SIZE in numbers else None,
        sd=numbers.get(SD),
    )


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError("must be a number above zero", where, repr(text), "for example 0.125, without a unit")
    return value
