"""Stragglers: measured compute times as a factor per rank and blocks of consecutive steps.

The simulator multiplies what it draws: a rank's compute is base x (1 + X) x its rank's factor. The fit
removes the factors first, so that the blocks are those of equally fast ranks.
"""

import dataclasses
import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fleetbench.digests import MANIFEST, read_file, reading
from fleetbench.errors import ConfigError
from fleetbench.measurements import StragglerFit
from fleetbench.profiler_traces import TRACES, read_profiler
from fleetbench.quantities import Nanoseconds
from fleetbench.store import load_run
from fleetbench.stragglers import Blocks, Floats, SlowRank, Straggler
from fleetbench.units import seconds

if TYPE_CHECKING:
    import pandas as pd

LEAST_STEPS = 5
"""Smallest number of steps per rank from which differences between steps can be measured."""
LEAST_FOR_RANKS = 20
"""Smallest number of steps per rank from which a slow rank can be found."""
_SHARES = (0.5, 0.95, 0.99)
"""Shares of the steps at which a statement gives quantiles."""
_PARTS = 6
_LOWER = 0.25
_LEAST_FACTOR = 1.02
"""Smallest factor of a rank that counts as slow."""
_STEADY = 1e-3
"""Range of the times, as a share of their median, below which steps count as constant."""
_MOST_VALUES = 20_000
"""Largest number of values (ranks times steps) in a fitted entry. A longer run is represented by evenly
spaced blocks."""
_SOURCE = "a run's folder, traces of torch.profiler, or Parquet or CSV with rank, step, and compute_s or forward_s and backward_s"


def fit_stragglers(times_s: Floats) -> StragglerFit:
    """Fit factors and blocks to ``times_s``, compute in seconds of shape ``(ranks, steps)``.

    It never raises for insufficient data: ``statements`` says what is missing.
    """
    times = np.asarray(times_s, dtype=float)
    factors, told = rank_factors(times)
    slow = np.asarray(factors)
    level = times / slow[:, None]  # as if no rank were slow
    entries: list[Straggler] = [SlowRank(ranks=(rank,), factor=round(float(slow[rank]), 4)) for rank in np.flatnonzero(slow > 1).tolist()]
    ranks, steps = level.shape
    statements, base_s = [told], float(np.median(level))
    if steps < LEAST_STEPS:
        statements.append(f"too few steps to draw from: {steps} a rank, and {LEAST_STEPS} are needed")
    elif np.ptp(level) < _STEADY * base_s:
        statements.append("steps are constant to a thousandth")
    else:
        base_s, block, most = float(level.min()), round(2 * math.sqrt(steps)), max(_MOST_VALUES // ranks, LEAST_FOR_RANKS)
        kept = np.arange(steps)
        if steps > most:
            block = min(block, most // 8)
            kept = (np.linspace(0, steps - block, most // block).astype(int)[:, None] + np.arange(block)).ravel()
        x = np.round(level[:, kept] / base_s - 1.0, 6)
        entries.append(Blocks(values=tuple(map(tuple, x.tolist())), block_steps=block))
        held = "" if len(kept) == steps else f" from {len(kept)} of {steps} steps"
        statements.append(f"steps are drawn in blocks of {block}{held}, as they were measured")
    for what, of in (("a rank", times), ("the slowest rank", times.max(axis=0))):
        at = ", ".join(f"{seconds(float(np.quantile(of, share)))} ({100 * share:.0f} %)" for share in _SHARES)
        statements.append(f"{what} computes for {at} in a step")
    return StragglerFit(
        statements=tuple(statements),
        base=Nanoseconds(round(base_s * 1e9)),
        median=Nanoseconds(round(float(np.median(times)) * 1e9)),
        entries=tuple(entries),
        rank_factors=tuple(round(factor, 4) for factor in factors),
    )


Source = str | Path | Sequence[str | Path]
"""Source of measured steps: a run's folder, a table, or traces of torch.profiler (files, or folders of them)."""


def fit_source(source: Source) -> StragglerFit:
    """Fit stragglers from a run's folder, a table of seconds, or traces; see ``compute_times``.

    The ``entries`` fit into ``cluster.stragglers`` if the layers' compute adds up to ``base``.
    """
    times_s, notes = compute_times(source)
    fit = fit_stragglers(times_s)
    return dataclasses.replace(fit, statements=(*notes, *fit.statements))


def compute_times(source: Source) -> tuple[Floats, tuple[str, ...]]:
    """Return compute in seconds of shape ``(ranks, steps)``, and notes about how it was read.

    Steps below 1 are warm-up, and left out. Raises ``ConfigError`` for an unknown kind of source, and for
    times that are not above 0 or incomplete.
    """
    paths, where = [Path(path) for path in ([source] if isinstance(source, str | Path) else source)], "--from"
    path, notes = paths[0], tuple[str, ...]()
    if len(paths) == 1 and any((path / name).is_file() for name in (MANIFEST, "experiment.toml")):
        frame = load_run(path).steps
    elif all(each.is_dir() or each.name.endswith(TRACES) for each in paths):
        frame, notes = read_profiler(paths, where)
    elif len(paths) > 1:
        hint = "one table holds all ranks; of torch.profiler's traces there may be one for each rank"
        raise ConfigError("are several sources, and not all of them traces of torch.profiler", where, ", ".join(map(str, paths[:4])), hint)
    else:
        frame = _table(path, f"{where}: {path}")
    with reading(f"{where}: {path}", _SOURCE):
        return _by_rank_and_step(frame), notes


def _table(path: Path, where: str) -> "pd.DataFrame":
    """Return a table from Parquet or CSV, gzip or not. Raises ``ConfigError`` for any other file."""
    import pandas as pd
    from pyarrow import ArrowException

    data = read_file(path, _SOURCE, where)
    with reading(where, _SOURCE, ArrowException):
        if data.startswith(b"PAR1"):
            return pd.read_parquet(BytesIO(data))
        return pd.read_csv(BytesIO(data), encoding="utf-8-sig", skipinitialspace=True)


def _by_rank_and_step(frame: "pd.DataFrame") -> Floats:
    """Return seconds of compute by rank and step. Raises ``ValueError`` if they are incomplete."""
    columns = ["compute_s"] if "compute_s" in frame else ["forward_s", "backward_s"]
    if missing := {"rank", "step", *columns} - set(frame.columns):
        raise ValueError(f"it lacks the columns {', '.join(sorted(missing))}")
    if frame.duplicated(["rank", "step"]).any():
        raise ValueError("it has a step of a rank twice")
    kept = frame[["rank", "step", *columns]].astype(float).query("not step < 1")
    table = kept.assign(seconds=kept[columns].sum(axis=1, skipna=False)).pivot(index="rank", columns="step", values="seconds")  # noqa: PD010
    times: Floats = table.to_numpy(dtype=np.float64)
    if not times.size or list(table.index) != list(range(len(table))) or not ((times > 0) & (times < math.inf)).all():
        raise ValueError("ranks are numbered from 0 and steps from 1, and every rank has one compute time above 0 in every step")
    return times


def rank_factors(times_s: Floats) -> tuple[list[float], str]:
    """Return each rank's factor, which is 1 unless the rank is slow, and a sentence about what was found.

    A rank's time is the lower quartile of a part of the run, which slow phases affect last. Ranks are slow if
    each of them takes longer than each other rank in every one of the parts. Of two equally fast ranks, one is
    therefore called slow in 2 / 2^6 of all runs; of more ranks, less often.
    """
    ranks, steps = times_s.shape
    if ranks == 1:
        return [1.0], "one rank: no rank can be slower than another"
    if steps < LEAST_FOR_RANKS:
        return [1.0] * ranks, f"too few steps to tell a slow rank: {steps} a rank, and {LEAST_FOR_RANKS} are needed"
    logs = np.log([np.quantile(part, _LOWER, axis=1) for part in np.array_split(times_s, _PARTS, axis=1)])  # (parts, ranks)
    middle = logs.mean(axis=0)
    order = np.argsort(middle)
    slowest = np.maximum.accumulate(logs[:, order], axis=1)[:, :-1]
    fastest = np.minimum.accumulate(logs[:, order[::-1]], axis=1)[:, -2::-1]
    apart = np.flatnonzero((fastest > slowest).all(axis=0))
    quick = order[: apart[0] + 1] if len(apart) else order
    factors = np.exp(middle - middle[quick].mean())
    factors[quick] = 1.0
    factors = np.where(factors >= _LEAST_FACTOR, factors, 1.0)
    said = [f"rank {rank} takes {factor:.2f} times as long" for rank, factor in enumerate(factors) if factor > 1]
    return factors.tolist(), ", ".join(said) or "no rank is persistently slower than the others"
