"""Stragglers: measured compute times of ranks and steps, taken apart into factors, episodes and jitter.

What the simulator draws multiplies: a rank's compute is base x (1 + X) x its rank's factor x the
episode's x what a step has for all ranks. So they are taken out one by one: first what a rank always
has, then what comes and goes over many steps, then what ranks share in a step, and the rest is jitter.
"""

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from fleetbench.digests import MANIFEST
from fleetbench.errors import ConfigError
from fleetbench.file_kinds import begin_of
from fleetbench.fitting.distributions import Fitted, choose_law, goodness
from fleetbench.fitting.episodes import Episodes, find_episodes
from fleetbench.fitting.shocks import Shared, choose_shock, correlation, groups_of, split_shared
from fleetbench.measurements import JitterFit, ShockFit, StragglerFit
from fleetbench.profiler_traces import read_profiler
from fleetbench.quantities import Nanoseconds, PerStep, Steps
from fleetbench.store import load_run
from fleetbench.stragglers import Empirical, Episode, Floats, Jitter, NodeShock, SlowRank, Straggler
from fleetbench.traces import FORMAT, UNITS, by_rank_and_step, compute_columns, read_table

LEAST_STEPS = 30
"""Fewer times of all ranks together fit no law."""
LEAST_FOR_RANKS = 20
"""Fewer steps of a rank do not tell whether it is slow, or was slow for a while."""
LEAST_SHARED = 15
"""Fewer steps fit no law of what ranks share in one."""
_BLOCKS = 5
_LOWER = 0.25
_LEAST_FACTOR = 1.02
"""A rank that is slower than this, in every part of the run, is a slow rank."""
_CONFIDENCE = 0.95
_FALSE = 0.05
"""The share of runs of equal ranks in which one may be called slow."""
_LONG_S, _LONGEST_S = 2.0, 120.0
"""Seconds of compute a step that may be milliseconds, and that are hardly seconds."""
_STEADY = 1e-3
"""A spread (1st to 99th percentile) below this share of the median is none."""
_CONTRADICTED = 0.02
"""A law that its own draws resemble less often than this is not used."""
_VALUES = 100
"""Of an empirical law."""


def take_apart(times_s: Floats) -> tuple[list[float], str, Episodes, Floats]:
    """Rank factors, what was found of them, episodes, and times by rank and step as if no rank were slow.

    Where there are episodes all are taken twice, because each hides the other.
    """
    times = np.asarray(times_s, dtype=float)
    factors, told = rank_factors(times)
    episodes = find_episodes(_level(times, factors))
    if episodes.ill is not None:
        factors, told = rank_factors(times, episodes.ill)
        episodes = find_episodes(_level(times, factors))
    return factors, told, episodes, _level(times, factors)


def fit_stragglers(times_s: Floats, seed: int, nodes: Sequence[int] | None = None) -> StragglerFit:
    """The model of ``times_s``, compute in seconds by rank and step; ``seed`` is that of the bootstrap.

    ``nodes`` has each rank's node; default: all are of one. Ranks that are slow in the same steps on one
    node share a shock a node, and those of different nodes one of the whole cluster.
    Never raises for times that tell too little: ``statements`` says what is missing.
    """
    factors, told, episodes, level = take_apart(times_s)
    of_node = [0] * len(level) if nodes is None else list(nodes)
    slow = _slow(factors)
    entries: list[Straggler] = [SlowRank(ranks=(rank,), factor=round(float(factor), 4)) for rank, factor in enumerate(slow) if factor > 1.0]
    if episodes.factor is not None:
        entries.append(
            Episode(rate=PerStep(round(episodes.rate, 6)), length=Steps(round(episodes.length, 3)), factor=round(episodes.factor, 4))
        )
    statements = [told, episodes.statement]
    ranks, steps = level.shape
    tells = ranks > 1 and steps >= LEAST_SHARED and episodes.factor is None  # episodes would be taken for it
    alike = correlation(level) if tells else None
    groups = groups_of(level, of_node) if alike is not None else []
    shock, calm = None, level.ravel() if episodes.ill is None else level[~episodes.ill]
    if groups:
        parts = split_shared(level, groups)
        shock = _shock(parts, statements, alike)
        if shock is not None:
            distribution: Any = shock.distribution  # one of the laws of ``shocks``
            scope: Literal["node", "cluster"] = "cluster" if len(set(of_node)) > 1 and len(groups) == 1 else "node"
            entries.append(NodeShock(rate=PerStep(shock.rate), scope=scope, distribution=distribution, mean=shock.mean, cv=shock.cv))
            calm = (parts.own * (shock.base * 1e-9)).ravel()  # as if ranks shared nothing but the level
    jitter = _jitter(calm, seed, statements)
    base_s = float(np.median(calm)) if jitter is None else jitter.base * 1e-9
    if jitter is not None:
        entries.append(_entry(jitter, calm, statements))
    return StragglerFit(
        statements=tuple(statements),
        base=Nanoseconds(round(base_s * 1e9)),
        median=Nanoseconds(round(float(np.median(times_s)) * 1e9)),
        entries=tuple(entries),
        rank_factors=tuple(round(factor, 4) for factor in factors),
        correlation=None if alike is None else round(alike, 3),
        shared=shock,
        jitter=jitter,
    )


Source = str | Path | Sequence[str | Path]
"""A run's folder, a table, or traces of torch.profiler: files, or folders of them."""


def fit_source(source: Source, *, seed: int = 0) -> StragglerFit:
    """The straggler model of a run's folder, of a table of seconds, or of traces of torch.profiler; see ``compute_times``.

    ``seed`` is that of the bootstrap. The ``entries`` are what ``cluster.stragglers`` takes, for a table of layers that takes ``base``.
    """
    times_s, nodes, notes = compute_times(source)
    fit = fit_stragglers(times_s, seed, nodes)
    return dataclasses.replace(fit, statements=(*notes, *fit.statements))


def compute_times(source: Source) -> tuple[Floats, list[int], tuple[str, ...]]:
    """Compute in seconds by rank and step, each rank's node, and what is to be said of how they were read.

    Nodes are those of the run's experiment; elsewhere each rank is a node.
    Raises ``ConfigError`` for a source of no known kind, and for times that are not above 0 or not of every rank and step.
    """
    paths, where = [Path(path) for path in ([source] if isinstance(source, str | Path) else source)], "--from"
    path, nodes, notes = paths[0], tuple[int, ...](), tuple[str, ...]()
    if len(paths) == 1 and any((path / name).is_file() for name in (MANIFEST, "experiment.toml")):
        run = load_run(path)
        frame, nodes = run.steps, run.experiment.cluster.node_by_rank
    elif all(each.is_dir() or _is_json(each, where) for each in paths):
        frame, notes = read_profiler(paths, where)
    elif len(paths) > 1:
        hint = "one table holds all ranks; of torch.profiler's traces there may be one for each rank"
        raise ConfigError("are several sources, and not all of them traces of torch.profiler", where, ", ".join(map(str, paths[:4])), hint)
    else:
        frame = read_table(path, where)
        notes = _seconds(frame, path, where)
    columns, hint = compute_columns(frame), f"a source is a run's folder, traces of torch.profiler, or {FORMAT}"
    if columns is None or not {"rank", "step"} <= set(frame.columns):
        raise ConfigError(f"has the columns {', '.join(map(str, frame.columns[:12]))}", where, str(path), hint)
    times_s, _ = by_rank_and_step(frame, columns, where, str(path))
    if times_s.min() <= 0:
        raise ConfigError("holds a compute time that is not above 0", where, str(path), hint)
    return times_s, list(nodes or range(len(times_s))), notes


def _is_json(path: Path, where: str) -> bool:
    begin = begin_of(path, f"a source is a run's folder, traces of torch.profiler, or {FORMAT}", f"{where}: {path}", 100)
    return begin.lstrip(b"\xef\xbb\xbf \r\n\t")[:1] in (b"{", b"[")


def _seconds(frame: pd.DataFrame, path: Path, where: str) -> tuple[str, ...]:
    """What is to be said of a table whose seconds may be milliseconds. Raises ``ConfigError`` where they hardly are seconds."""
    if "compute_s" not in frame or UNITS.keys() & set(frame.columns):
        return ()
    typical_s = float(pd.to_numeric(frame["compute_s"], errors="coerce").median())
    unit = "milliseconds stand in a column compute_ms"
    if typical_s > _LONGEST_S:
        hint = f"{unit}; there are compute_us and compute_ns, too, whatever their size"
        raise ConfigError(f"has a compute_s of {typical_s:.4g}: seconds of compute in a step", where, str(path), hint)
    return (f"a step computes for {typical_s:.4g} s by compute_s: {unit}",) if typical_s > _LONG_S else ()


def _slow(factors: Sequence[float]) -> Floats:
    """The factors of slow ranks, and 1."""
    return np.where(np.asarray(factors) >= _LEAST_FACTOR, factors, 1.0)


def _level(times: Floats, factors: Sequence[float]) -> Floats:
    """The times as if no rank were slow."""
    return np.asarray(times / _slow(factors)[:, None])


def rank_factors(times_s: Floats, ill: npt.NDArray[np.bool_] | None = None) -> tuple[list[float], str]:
    """How much longer each slow rank takes than those that are not slow, 1 for these; and what was found.

    A rank's time is the lower quartile of a part of the run: episodes reach it last. A rank is slow if it takes longer than the fastest

    - by more than ranks that are alike differ by in ``_FALSE`` of all runs: t-tests of all pairs of ranks, with Bonferroni's correction,
      by the residual variance of the parts' logarithms (two-way analysis of variance, ranks and parts);
    - and consistently: a t-test of its own parts alone.

    ``ill`` steps are left out.
    """
    ranks, steps = times_s.shape
    if ranks == 1:
        return [1.0], "one rank: no rank can be slower than another"
    if steps < LEAST_FOR_RANKS:
        return [1.0] * ranks, f"too few steps to tell a slow rank: {steps} a rank, and {LEAST_FOR_RANKS} are needed"
    healthy = times_s if ill is None else np.where(ill, np.nan, times_s)
    healthy = np.where(np.isnan(healthy).mean(axis=1, keepdims=True) > 0.5, times_s, healthy)
    quantile = np.quantile if ill is None else np.nanquantile  # which is far slower
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a part may be ill from end to end, and has no quantile then
        parts = np.array([quantile(part, _LOWER, axis=1) for part in np.array_split(healthy, _BLOCKS, axis=1)])
    logs = np.log(np.where(np.isnan(parts), quantile(healthy, _LOWER, axis=1), parts))  # (parts, ranks)
    middle, freedom = logs.mean(axis=0), (_BLOCKS - 1) * (ranks - 1)
    rest = logs - middle - logs.mean(axis=1, keepdims=True) + middle.mean()
    error = math.sqrt(2 / _BLOCKS * float((rest**2).sum()) / freedom)
    fastest = int(np.argmin(middle))
    behind = logs - logs[:, [fastest]]
    least = behind.mean(axis=0) - stats.t.ppf(_CONFIDENCE, _BLOCKS - 1) * behind.std(axis=0, ddof=1) / math.sqrt(_BLOCKS)
    alike = float(stats.t.ppf(1 - _FALSE / (ranks * (ranks - 1)), freedom)) * error
    slow = (middle - middle[fastest] > alike) & (least > math.log(_LEAST_FACTOR) / 2)
    factors = [float(factor) for factor in np.where(slow, np.exp(middle - middle[~slow].mean()), 1.0)]
    said = [f"rank {rank} takes {factor:.2f} times as long" for rank, factor in enumerate(factors) if factor >= _LEAST_FACTOR]
    return factors, ", ".join(said) or "no rank is persistently slower than the others"


def _shock(parts: Shared, statements: list[str], alike: float | None) -> ShockFit | None:
    """The law of what ranks share in a step; none where it is as good as constant."""
    common = parts.common.ravel()
    if np.ptp(np.quantile(common, (0.01, 0.99))) < _STEADY:
        statements.append("what ranks share in a step is constant to a thousandth")
        return None
    shock, excess = choose_shock(common, parts.noise)
    hits = "every step" if shock.always else f"{100 * shock.rate:.0f} % of the steps"
    statements.append(
        f"ranks are slow in the same steps (correlation {alike:.2f}): what they share is drawn once for all of them; "
        f"{shock.law}, mean {shock.mean:.4g}, cv {shock.cv:.3g}, in {hits}"
    )
    return ShockFit(**_law_fit(shock, len(common), excess, rate=round(shock.rate, 4)))


def _law_fit(law: Fitted, num_steps: int, excess: Mapping[str, float], **more: float) -> dict[str, Any]:
    """What both fits keep of a law, and ``more``."""
    return {
        "distribution": law.law,
        "mean": round(law.mean, 6),
        "cv": round(law.cv, 4),
        "base": Nanoseconds(round(law.base_s * 1e9)),
        "num_steps": num_steps,
        "bic": {name: round(value, 2) for name, value in excess.items()},
        **more,
    }


def _jitter(calm: Floats, seed: int, statements: list[str]) -> JitterFit | None:
    """The law of what is left."""
    if len(calm) < LEAST_STEPS:
        statements.append(f"too few step times for a law of jitter: {len(calm)}, and {LEAST_STEPS} are needed")
        return None
    low, high = np.quantile(calm, (0.01, 0.99))
    if high - low < _STEADY * float(np.median(calm)):
        statements.append("no jitter: step times are constant to a thousandth")
        return None
    law, excess = choose_law(calm)
    jitter = JitterFit(**_law_fit(law, len(calm), excess, **goodness(calm, law, seed)))
    near = [name for name, value in excess.items() if 0 < value < 2]
    alike = f"; {' and '.join(near)} would do about as well" if near else ""
    p = min(jitter.kolmogorov_smirnov_p, jitter.anderson_darling_p)
    verdict = "is contradicted by" if p < _CONTRADICTED else "goes with"
    statements.append(f"jitter: {law.law}, mean {law.mean:.4g}, cv {law.cv:.3g}, {verdict} the times (p = {p:.2g}){alike}")
    return jitter


def _entry(jitter: JitterFit, calm: Floats, statements: list[str]) -> Straggler:
    """The law, or, where the times contradict it, the times themselves."""
    if min(jitter.kolmogorov_smirnov_p, jitter.anderson_darling_p) >= _CONTRADICTED:
        distribution: Sequence[str] = jitter.distribution
        return Jitter(distribution=distribution, mean=jitter.mean, cv=jitter.cv)  # type: ignore[arg-type]  # one of ``LAWS``
    statements.append(f"no law fits, so the entry draws from {_VALUES} quantiles of the measured times")
    shares = (np.arange(_VALUES) + 0.5) / _VALUES
    x = np.maximum(np.quantile(calm, shares) / (jitter.base * 1e-9) - 1.0, 0.0)
    return Empirical(values=tuple(round(float(value), 6) for value in x))
