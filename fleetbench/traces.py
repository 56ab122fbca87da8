"""Traces: X of ranks and steps recorded in a file, which ``kind = "trace"`` replays.

The file is Parquet or CSV, gzip or not, with one row per rank and step: ``rank``, ``step``, and one of

- ``x``: X itself, at least 0;
- ``compute_s`` (or ``compute_ms``, ``compute_us``, ``compute_ns``), or ``forward_s`` and ``backward_s`` as in
  a run's ``steps.parquet``: seconds of compute. X = compute / base - 1, where ``base`` is the entry's own, or
  else the shortest time in the file.

Steps are replayed in order: the run's step 1 is the trace's first step numbered 1 or higher, and after the
last step the trace starts over. Warm-up steps replay the trace's last steps. Every rank has every step.
"""

from __future__ import annotations

from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fleetbench.digests import reading, refuse_large_table
from fleetbench.errors import ConfigError
from fleetbench.file_kinds import kind_of, read_file, text_of

if TYPE_CHECKING:
    import pandas as pd

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

FORMAT = "Parquet or CSV with the columns rank, step, and x, compute_s, or forward_s and backward_s"
UNITS = {"compute_ms": 1e3, "compute_us": 1e6, "compute_ns": 1e9}
"""Columns that are read as ``compute_s``, with the number of their units per second."""
_PARQUET = b"PAR1"


def replayed(path: str, base_ns: int | None, ranks: Integers, steps: Integers, where: str) -> Floats:
    """Return X by rank and step, shape ``(len(ranks), len(steps))``; ``where`` names the entry in errors.

    Raises ``ConfigError`` for a file that cannot be read, has another format, or lacks a rank or a step, and
    for a ``base`` longer than the shortest time.
    """
    x = _recorded(path, base_ns, where)
    missing = [int(rank) for rank in ranks if rank >= len(x)]
    if missing:
        hint = "fewer trainers, or `fleetbench profile --from` fits it: a fit has draws for any number of ranks"
        raise ConfigError(f"holds ranks 0 to {len(x) - 1}, and none for rank {missing[0]}", where, path, hint)
    return np.asarray(x[ranks][:, (steps - 1) % x.shape[1]])


def read_table(path: str | Path, where: str) -> pd.DataFrame:
    """Return a table from Parquet or CSV, gzip or not. Raises ``ConfigError`` for any other file."""
    import pandas as pd
    from pyarrow import ArrowException

    place, hint = f"{where}: {path}", f"a trace is {FORMAT}"
    data = read_file(path, hint, place)
    is_parquet = data.startswith(_PARQUET)
    if not is_parquet and (kind := kind_of(data)) is not None:
        fits = f"`fleetbench profile --from {path}` reads it" if "torch.profiler" in kind else hint
        raise ConfigError(f"is no table: it seems to be {kind}", place, hint=fits)
    with reading(place, hint, ArrowException):
        if is_parquet:
            refuse_large_table(BytesIO(data), place)
            frame = pd.read_parquet(BytesIO(data))
            frame = frame.reset_index() if {"rank", "step"} & set(frame.index.names) else frame
        else:
            text = text_of(data) or ""
            separator = next((mark for mark in ",;\t" if mark in text.partition("\n")[0]), ",")
            frame = pd.read_csv(StringIO(text), sep=separator, skipinitialspace=True)
    frame = frame.rename(columns={name: str(name).strip().lower() for name in frame.columns})
    for name, units in UNITS.items():
        if name in frame and "compute_s" not in frame:
            frame["compute_s"] = _numbers(frame[name]) / units
    return frame


def by_rank_and_step(frame: pd.DataFrame, values: list[str], where: str, path: str) -> Floats:
    """Return sums of the columns ``values`` as an array by rank and step, without steps below 1.

    Raises ``ConfigError`` if ranks are not numbered from 0, or a rank lacks a step, has one twice, or a value
    is no number.
    """
    frame = frame.assign(rank=_numbers(frame["rank"]), step=_numbers(frame["step"]))
    for name in ("rank", "step"):
        if frame[name].isna().any():
            raise ConfigError(f"holds a {name} that is no number", where, path, "number ranks from 0, and steps from 1")
    kept = frame[frame["step"] >= 1]
    if kept.empty:
        raise ConfigError("has no step numbered 1 or higher", where, path, "steps below 1 are warm-up, which is not replayed")
    numbers = kept[values].apply(_numbers).sum(axis=1, skipna=False)
    groups = kept.assign(_value=numbers).groupby(["rank", "step"])["_value"]
    count, total = groups.count().unstack("step", fill_value=0), groups.sum().unstack("step")  # noqa: PD010  # of series
    if list(total.index) != list(range(len(total))):
        raise ConfigError(f"has ranks {list(total.index)[:8]}, which are not numbered from 0", where, path, "number them 0, 1, 2, ...")
    wrong = np.argwhere(count.to_numpy() != 1)
    if len(wrong):
        rank, column = (int(number) for number in wrong[0])
        raise ConfigError(
            f"has not one number for rank {rank} in step {count.columns[column]:g}", where, path, "every rank has every step, once"
        )
    return total.to_numpy(dtype=np.float64)


def compute_columns(frame: pd.DataFrame) -> list[str] | None:
    """Return the columns that add up to seconds of compute; None if they are missing."""
    for names in (["compute_s"], ["forward_s", "backward_s"]):
        if set(names) <= set(frame.columns):
            return names
    return None


def _numbers(column: Any) -> Any:
    import pandas as pd

    return pd.to_numeric(column, errors="coerce")


def _recorded(path: str, base_ns: int | None, where: str) -> Floats:
    """Return X of the whole file by rank and step."""
    frame = read_table(path, where)
    lacking = [name for name in ("rank", "step") if name not in frame.columns]
    is_x = "x" in frame.columns
    columns = ["x"] if is_x else compute_columns(frame)
    if lacking or columns is None:
        lacks = f"column {lacking[0]}" if lacking else "x and no seconds of compute"
        raise ConfigError(f"has no {lacks}", where, path, f"a trace is {FORMAT}")
    values = by_rank_and_step(frame, columns, where, path)
    if is_x:
        if values.min() < 0:
            raise ConfigError("holds an X below 0", where, path, "stragglers add time: X is at least 0")
        return values
    if values.min() <= 0:
        raise ConfigError("holds a compute time that is not above 0", where, path, f"a trace is {FORMAT}")
    base_s = values.min() if base_ns is None else base_ns * 1e-9
    if values.min() < base_s * (1 - 1e-9):
        shortest = f"{values.min() * 1e3:.6g} ms"
        raise ConfigError(f"has a step of {shortest}, shorter than base", where, path, "stragglers add time: lower base, or drop it")
    return np.maximum(values / base_s - 1.0, 0.0)
