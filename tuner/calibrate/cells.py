"""Cells: measurements for a calibration, read from a CSV file or from the output of a benchmark."""

import csv
import math
import re
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
SECONDS, RATE, SIZE, WEIGHT, SD = "seconds", "samples_per_s", "all_reduce_bytes", "weight", "sd"
EPOCH, EPOCH_SAMPLES = "epoch_s", "epoch_samples"
"""Columns with the seconds and the samples of an epoch, which together give a rate."""
_COLUMNS = (SECONDS, RATE, SIZE, WEIGHT, SD, EPOCH, EPOCH_SAMPLES)
_AS_TOML = {"True": "true", "False": "false"}
"""TOML's spelling of Python's booleans."""
_CALLED: dict[tuple[str, float], str] = {
    ("cluster.nodes", 1.0): "nodes num_nodes n_nodes nnodes",
    ("cluster.trainers_per_node", 1.0): "gpus/node num_gpus/node ranks/node trainers/node processes/node ppn",
    (GPUS, 1.0): "gpus num_gpus n_gpus ngpus total_gpus ranks num_ranks world_size trainers",
    ("workload.batch_size", 1.0): "local_batch batch_size batch/gpu samples/gpu",
    (GLOBAL_BATCH, 1.0): "global_batch total_batch global_batch_size",
    (EPOCH, 1.0): "epoch_seconds seconds/epoch s/epoch",
    (EPOCH_SAMPLES, 1.0): "samples/epoch images/epoch",
    (SECONDS, 1.0): "s step_s step_seconds step_time_s step_time_seconds seconds/step s/step time_s",
    (SECONDS, 1e-3): "ms step_ms step_time_ms ms/step time_ms",
    (SECONDS, 1e-6): "us time_us",
    (RATE, 1.0): "samples/s images/s imgs/s img/s examples/s sequences/s seqs/s",
    (SIZE, 1.0): "bytes size_bytes message_bytes buffer_bytes",
}
"""Other names of columns, as ``_plain`` spells them, by column and the factor on its values."""
_MOST_WEIGHT = 1e9
_INDEX = ("", "unnamed:_0", "index")
"""Names of a first column in which pandas numbers the rows."""


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
    weight: float = 1.0
    """Weight of the cell's squared residual."""
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
    first = next((line for line in lines if line.strip() and not line.startswith("#")), "")
    delimiter = next((one for one in ",;\t" if one in first), ",")
    rows = csv.reader(lines, strict=True, skipinitialspace=True, delimiter=delimiter)
    columns: list[tuple[str, float]] = []
    cells = []
    try:
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if not any(text.strip() for text in row) or row[0].startswith("#"):
                continue
            if not columns:
                columns = _columns(row, where)
            elif len(row) != len(columns):
                raise ConfigError(f"needs {len(columns)} values", where, str(len(row)), "quote a value that holds a comma")
            else:
                cells.append(_cell(columns, [text.strip() for text in row], where))
    except csv.Error as error:
        raise ConfigError(f"is no CSV: {error}", f"{path}, line {rows.line_num}", hint='write " inside quotes twice') from None
    return tuple(cells)


def _plain(name: str) -> str:
    """Return a column's name with ``/`` for "per" and ``_`` for spaces: ``images/s`` for ``Images per sec``."""
    name = re.sub(r"[\s_-]+", "_", re.sub(r"[()\[\]]", " ", name.strip().lower())).strip("_")
    name = re.sub(r"/(?:sec|seconds?)$", "/s", re.sub(r"_?(?:/|_per_)_?", "/", name))
    return re.sub(r"^(?:throughput|total|mean|avg|average)_(?=.)", "", name)


def _columns(names: Sequence[str], where: str) -> list[tuple[str, float]]:
    """Return each column's key and the factor on its values; the key is empty if it only numbers the rows."""
    called = {name: column for column, names in _CALLED.items() for name in names.split()}
    found = []
    for place, name in enumerate(names):
        own = name.strip()
        if place == 0 and len(names) > 1 and _plain(own) in _INDEX:
            found.append(("", 1.0))
        elif "." in own or own in _COLUMNS:
            found.append((own, 1.0))
        elif (known := called.get(_plain(own))) is not None:
            found.append(known)
        else:
            usual = f"{', '.join(_COLUMNS)}, nodes, gpus, images/s{nearest(own, (*_COLUMNS, *called))}"
            hint = f"keys of the experiment such as cluster.nodes, and {usual}"
            raise ConfigError("is no column of measurements", where, repr(own), hint)
    keys = [key for key, _ in found]
    if len(set(keys)) < len(keys):
        raise ConfigError("names a column twice", where, repr(max(keys, key=keys.count)), "keep one of them")
    if SECONDS not in keys and RATE not in keys and not {EPOCH, EPOCH_SAMPLES} <= {*keys}:
        what, hint = f"needs a column {SECONDS} or {RATE}", f"seconds of a step, samples of all trainers, or {EPOCH} and {EPOCH_SAMPLES}"
        raise ConfigError(what, where, ", ".join(names), hint)
    return found


def _cell(columns: Sequence[tuple[str, float]], values: Sequence[str], where: str) -> Cell:
    row = {key: text for (key, _), text in zip(columns, values, strict=True) if key and text}
    numbers = {key: _number(row[key], f"{where}, {key}") for key in _COLUMNS if key in row}
    if {EPOCH, EPOCH_SAMPLES} <= numbers.keys() and RATE not in numbers:
        numbers[RATE] = numbers[EPOCH_SAMPLES] / numbers[EPOCH]
        if SD in numbers:  # of the epoch's seconds
            numbers[SD] *= numbers[RATE] / numbers[EPOCH]
    if (SECONDS in numbers) == (RATE in numbers):
        hint = "drop a row that was not measured; leave the other column empty"
        raise ConfigError(f"needs one of {SECONDS} and {RATE}", where, "both" if SECONDS in numbers else "neither", hint)
    if SIZE in numbers and (RATE in numbers or numbers[SIZE] % 1):
        raise ConfigError(f"needs a whole number of bytes, and {SECONDS}", f"{where}, {SIZE}", row[SIZE], "for example 1048576")
    if numbers.get(WEIGHT, 1.0) > _MOST_WEIGHT:
        hint = "a row counts so many times"
        raise ConfigError(f"must be at most {_MOST_WEIGHT:g}", f"{where}, {WEIGHT}", row[WEIGHT], hint)
    unit = dict(columns).get(SECONDS, 1.0) if SECONDS in numbers else 1.0
    return Cell(
        where=where,
        settings={key: _as_toml(text) for key, text in row.items() if key not in _COLUMNS},
        seconds=numbers[SECONDS] * unit if SECONDS in numbers else None,
        samples_per_s=numbers.get(RATE),
        all_reduce_bytes=int(numbers[SIZE]) if SIZE in numbers else None,
        weight=numbers.get(WEIGHT, 1.0),
        sd=numbers[SD] * unit if SD in numbers else None,
    )


def _as_toml(text: str) -> str:
    """Return a setting as ``--set`` takes it, without the ``.0`` that pandas adds to whole numbers."""
    return re.sub(r"^(-?\d+)\.0+$", r"\1", _AS_TOML.get(text, text))


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError("must be a number above zero", where, repr(text), "for example 0.125, without a unit")
    return value
