"""Stragglers: measured compute times as a factor per rank and blocks of consecutive steps.

The simulator multiplies what it draws: a rank's compute is base x (1 + X) x its rank's factor. The fit
removes the factors first, so that the blocks are those of equally fast ranks.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from fleetbench.digests import MANIFEST
from fleetbench.errors import ConfigError
from fleetbench.measurements import StragglerFit
from fleetbench.profiler_traces import TRACES, read_profiler
from fleetbench.quantities import Nanoseconds
from fleetbench.store import load_run
from fleetbench.stragglers import Blocks, Floats, SlowRank, Straggler
from fleetbench.traces import FORMAT, by_rank_and_step, compute_columns, read_table
from fleetbench.units import seconds

SHARES = (0.5, 0.95, 0.99)
"""Shares of the steps at which a fit reports quantiles."""
LEAST_STEPS = 5
"""Smallest number of steps per rank from which differences between steps can be measured."""
LEAST_FOR_RANKS = 20
"""Smallest number of steps per rank from which a slow rank, a slow phase or a correlation between ranks can
be found."""
_PARTS = 5
_LOWER = 0.25
_LEAST_FACTOR = 1.02
"""Smallest factor of a rank that counts as slow."""
_CONFIDENCE = 0.95
_FALSE = 0.05
"""Share of runs with equally fast ranks in which one of them may be called slow."""
_STEADY = 1e-3
"""Range of the times, as a share of their median, below which steps count as constant."""
_TOGETHER = 0.3
"""Correlation above which ranks count as slow together."""
_MOST_VALUES = 20_000
"""Largest number of values (ranks times steps) in a fitted entry. A longer run is represented by evenly
spaced blocks."""


def fit_stragglers(times_s: Floats) -> StragglerFit:
    """Fit factors and blocks to ``times_s``, compute in seconds of shape ``(ranks, steps)``.

    It never raises for insufficient data: ``statements`` says what is missing.
    """
    times = np.asarray(times_s, dtype=float)
    factors, told = rank_factors(times)
    slow = np.where(np.asarray(factors) >= _LEAST_FACTOR, factors, 1.0)
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
    correlation = None
    if ranks > 1 and steps >= LEAST_FOR_RANKS and np.ptp(level, axis=1).min() > 0:
        order = stats.zscore(stats.rankdata(level, axis=1), axis=1)  # by rank order, so that single slow steps do not decide
        correlation = round(float(((order.sum(axis=0) ** 2).mean() - ranks) / (ranks * (ranks - 1))), 3)
        if correlation > _TOGETHER:
            statements.append(f"ranks are slow in the same steps (correlation {correlation:.2f})")
    quantiles = [tuple(Nanoseconds(round(1e9 * time)) for time in np.quantile(of, SHARES)) for of in (times, times.max(axis=0))]
    for what, found in zip(("a rank", "the slowest rank"), quantiles, strict=True):
        at = ", ".join(f"{seconds(1e-9 * time)} ({100 * share:.0f} %)" for time, share in zip(found, SHARES, strict=True))
        statements.append(f"{what} computes for {at} in a step")
    return StragglerFit(
        statements=tuple(statements),
        base=Nanoseconds(round(base_s * 1e9)),
        median=Nanoseconds(round(float(np.median(times)) * 1e9)),
        entries=tuple(entries),
        rank_factors=tuple(round(factor, 4) for factor in factors),
        correlation=correlation,
        quantiles=quantiles[0],
        slowest_quantiles=quantiles[1],
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

    Raises ``ConfigError`` for an unknown kind of source, and for times that are not above 0 or incomplete.
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
        frame = read_table(path, where)
    columns, hint = compute_columns(frame), f"a source is a run's folder, traces of torch.profiler, or {FORMAT}"
    if columns is None or not {"rank", "step"} <= set(frame.columns):
        raise ConfigError(f"has the columns {', '.join(map(str, frame.columns[:12]))}", where, str(path), hint)
    times_s = by_rank_and_step(frame, columns, where, str(path))
    if times_s.min() <= 0:
        raise ConfigError("holds a compute time that is not above 0", where, str(path), hint)
    return times_s, notes


def rank_factors(times_s: Floats) -> tuple[list[float], str]:
    """Return each rank's factor, which is 1 unless the rank is slow, and a sentence about what was found.

    A rank's time is the lower quartile of a part of the run, which slow phases affect last. A rank is slow if it
    takes longer than the fastest

    - by a difference that equally fast ranks exceed only in ``_FALSE`` of all runs: t-tests of all pairs of
      ranks, with Bonferroni's correction, by the residual variance of the parts' logarithms (two-way analysis
      of variance, ranks and parts);
    - and consistently: a t-test of its own parts alone.
    """
    ranks, steps = times_s.shape
    if ranks == 1:
        return [1.0], "one rank: no rank can be slower than another"
    if steps < LEAST_FOR_RANKS:
        return [1.0] * ranks, f"too few steps to tell a slow rank: {steps} a rank, and {LEAST_FOR_RANKS} are needed"
    logs = np.log([np.quantile(part, _LOWER, axis=1) for part in np.array_split(times_s, _PARTS, axis=1)])  # (parts, ranks)
    middle, freedom = logs.mean(axis=0), (_PARTS - 1) * (ranks - 1)
    rest = logs - middle - logs.mean(axis=1, keepdims=True) + middle.mean()
    error = math.sqrt(2 / _PARTS * float((rest**2).sum()) / freedom)
    fastest = int(np.argmin(middle))
    behind = logs - logs[:, [fastest]]
    least = behind.mean(axis=0) - stats.t.ppf(_CONFIDENCE, _PARTS - 1) * behind.std(axis=0, ddof=1) / math.sqrt(_PARTS)
    alike = float(stats.t.ppf(1 - _FALSE / (ranks * (ranks - 1)), freedom)) * error
    slow = (middle - middle[fastest] > alike) & (least > math.log(_LEAST_FACTOR) / 2)
    factors = [float(factor) for factor in np.where(slow, np.exp(middle - middle[~slow].mean()), 1.0)]
    said = [f"rank {rank} takes {factor:.2f} times as long" for rank, factor in enumerate(factors) if factor >= _LEAST_FACTOR]
    return factors, ", ".join(said) or "no rank is persistently slower than the others"
