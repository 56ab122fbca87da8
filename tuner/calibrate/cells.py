"""Cells: measurements to calibrate by, read from a CSV file or from nccl-tests' output."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleetbench.config import nearest
from fleetbench.digests import read_text
from fleetbench.errors import ConfigError

SECONDS, RATE, SIZE, WEIGHT, SD = "seconds", "samples_per_s", "all_reduce_bytes", "weight", "sd"
_COLUMNS = (SECONDS, RATE, SIZE, WEIGHT, SD)
_AS_TOML = {"True": "true", "False": "false"}
"""How Python writes truth, and how TOML does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement: what was changed of the experiment, and one of ``seconds`` and ``samples_per_s``."""

    where: str
    """File and line."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Dotted keys of the experiment and their values, as ``--set`` takes them."""
    seconds: float | None = None
    """Of a step, or of one bare all-reduce."""
    samples_per_s: float | None = None
    """Of all trainers together."""
    all_reduce_bytes: int | None = None
    """Of every rank's buffer, where a bare all-reduce was timed."""
    weight: float = 1.0
    """Of the cell's squared residual."""
    sd: float | None = None
    """Standard deviation of what was measured, in its unit."""
    ranks: int | None = None
    """Where the file says how many ranks took part."""

    @property
    def name(self) -> str:
        """What tells it from others."""
        size = [] if self.all_reduce_bytes is None else [f"all-reduce of {self.all_reduce_bytes:,} bytes"]
        return ", ".join([*(f"{key}={value}" for key, value in self.settings.items()), *size]) or "as declared"


def read_cells(path: str | Path) -> tuple[Cell, ...]:
    """Read a CSV file whose columns are keys of the experiment and what was measured, or the output of nccl-tests' ``all_reduce_perf``.

    An empty value leaves what the experiment declares. Raises ``ConfigError`` with the line for what cannot be read.
    """
    lines = read_text(path, "name a CSV file of measurements, or nccl-tests' output").splitlines()
    titles = [line.lstrip("# ").split() for line in lines if line.startswith("#")]
    header = next((words for words in titles if words[:2] == ["size", "count"] and "time" in words), None)
    cells = _of_csv(lines, str(path)) if header is None else _of_nccl_tests(lines, titles, header, str(path))
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
            if not any(text.strip() for text in row) or row[0].startswith("#"):
                continue
            if not columns:
                columns = [text.strip() for text in row]
                _check_columns(columns, where)
            elif len(row) != len(columns):
                raise ConfigError(f"needs {len(columns)} values", where, str(len(row)), "quote a value that holds a comma")
            else:
                cells.append(_cell({key: text.strip() for key, text in zip(columns, row, strict=True)}, where))
    except csv.Error as error:
        raise ConfigError(f"is no CSV: {error}", f"{path}, line {rows.line_num}", hint='write " inside quotes twice') from None
    return tuple(cells)


def _check_columns(columns: Sequence[str], where: str) -> None:
    for column in columns:
        if "." not in column and column not in _COLUMNS:
            hint = f"keys of the experiment such as cluster.nodes, and {', '.join(_COLUMNS)}{nearest(column, _COLUMNS)}"
            raise ConfigError("is no column of measurements", where, repr(column), hint)
    if len(set(columns)) < len(columns):
        raise ConfigError("names a column twice", where, repr(max(columns, key=columns.count)), "keep one of them")
    if SECONDS not in columns and RATE not in columns:
        raise ConfigError(f"needs a column {SECONDS} or {RATE}", where, ", ".join(columns), "seconds of a step, or samples of all trainers")


def _cell(row: Mapping[str, str], where: str) -> Cell:
    numbers = {key: _number(row[key], f"{where}, {key}") for key in _COLUMNS if row.get(key)}
    if (SECONDS in numbers) == (RATE in numbers):
        hint = "drop a row that was not measured; leave the other column empty"
        raise ConfigError(f"needs one of {SECONDS} and {RATE}", where, "both" if SECONDS in numbers else "neither", hint)
    if SIZE in numbers and (RATE in numbers or numbers[SIZE] % 1):
        raise ConfigError(f"needs a whole number of bytes, and {SECONDS}", f"{where}, {SIZE}", row[SIZE], "for example 1048576")
    return Cell(
        where=where,
        settings={key: _AS_TOML.get(text, text) for key, text in row.items() if text and key not in _COLUMNS},
        seconds=numbers.get(SECONDS),
        samples_per_s=numbers.get(RATE),
        all_reduce_bytes=int(numbers[SIZE]) if SIZE in numbers else None,
        weight=numbers.get(WEIGHT, 1.0),
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


def _of_nccl_tests(lines: Sequence[str], titles: Sequence[Sequence[str]], header: Sequence[str], path: str) -> tuple[Cell, ...]:
    """Rows of ``all_reduce_perf``: the last time of a row, in us, which is the one in place, as training reduces its buckets."""
    operation = next((line.split()[-1] for line in lines if "Collective test starting:" in line), "all_reduce_perf")
    if operation != "all_reduce_perf":
        raise ConfigError("is of another collective", path, operation, "calibrate by all_reduce_perf")
    ranks = len({words[1] for words in titles if words[:1] == ["Rank"] and len(words) > 1})
    column = len(header) - 1 - header[::-1].index("time")
    cells = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if len(words) > column and words[0].isdecimal() and int(words[0]) > 0:
            where = f"{path}, line {number}"
            seconds = _number(words[column], where) * 1e-6
            cells.append(Cell(where=where, seconds=seconds, all_reduce_bytes=int(words[0]), ranks=ranks or None))
    return tuple(cells)
