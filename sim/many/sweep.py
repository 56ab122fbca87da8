"""sweep: one experiment at many values of one key, or of two.

A point is the experiment with the keys set as by ``--set``; nothing else differs, so that all points share
their random draws. The table has one row per point: the keys' values and the figures in ``COLUMNS``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pandas as pd

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from sim.learning.trajectory import Learn, Trajectory
from sim.many.pool import Job, Where, naming, started, summaries
from sim.many.training import trained
from sim.run import Engine

_COLUMNS = """
trainers steps wall_s samples_per_s step_s compute_s wait_s exposed_comm_s update_s other_s bytes_sent_per_trainer time_to_target_s
final_loss
"""
COLUMNS = tuple(_COLUMNS.split())
"""Columns of a sweep's table after the keys; means are over ranks and steps, as in ``summary.json``."""
PER_TRAINER = ("tokens_per_s", "mfu", "memory_bytes")
"""Columns after ``COLUMNS``: figures per trainer, ``None`` if unknown."""
MOST_POINTS = 100_000
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_USAGE = "--sweep cluster.nodes=1,2,4,8 takes each in turn; 1..8 stands for 1,2,3,4,5,6,7,8; no value has a comma"

Load = Callable[[Sequence[str]], Experiment]
"""Loads the experiment with ``section.key=value`` overrides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A key and its values, as written on the command line."""

    key: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Axis:
        """Parse ``key=v1,v2,...``; ``a..b`` stands for all integers from a to b. Raises ``ConfigError``."""
        key, separator, listed = text.partition("=")
        if not separator or not key.strip():
            raise ConfigError("not a sweep", "--sweep", repr(text), _USAGE)
        values: list[str] = []
        for part in listed.split(","):
            values += _expanded(part, text)
        if len(values) != len(set(values)):
            raise ConfigError("names a value twice", "--sweep", repr(text), _USAGE)
        return cls(key=key.strip(), values=tuple(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A sweep's axes and its table."""

    name: str
    axes: tuple[Axis, ...]
    table: pd.DataFrame
    """One row per point: a column for each key with its resolved values, then ``COLUMNS`` and
    ``PER_TRAINER``."""
    note: str | None = None
    """Warning that a training diverged; ``None`` otherwise."""


def sweep(
    load: Load,
    axes: Sequence[Axis | str],
    *,
    engine: Engine = "auto",
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    prepare: Callable[[Experiment], Experiment] = lambda experiment: experiment,
    learn: Learn | None = None,
    on: Where = "local",
) -> Sweep:
    """Simulate every combination of the values of one or two axes.

    Args:
        load: returns the experiment with overrides, such as ``lambda more: Experiment.load(path, more)``.
        axes: one or two axes, such as ``cluster.nodes=1,2,4``; the last one varies fastest.
        engine: see ``simulate``.
        processes: see ``sim.many.pool``.
        progress: called with the number of points done and their total.
        prepare: completes a point's experiment, for example with a profile; called after all points were read.
        learn: trains a point's virtual trainers; points that differ in links or stragglers share the result.
        on: ``ray`` trains and simulates on Ray; see ``sim.many.pool``.

    Raises:
        ConfigError: there is no axis, there are more than two, or an axis names no key of this experiment.
        FleetbenchError: a point failed; the message names it.
    """
    read = [Axis.parse(axis) if isinstance(axis, str) else axis for axis in axes]
    if not 1 <= len(read) <= 2 or len({axis.key for axis in read}) < len(read):
        raise ConfigError("sweeps one key, or two different ones", "--sweep", repr([axis.key for axis in read]), _USAGE)
    points = list(product(*(axis.values for axis in read)))  # noqa: PD011  # no pandas
    if len(points) > MOST_POINTS:
        raise ConfigError(f"has more than {MOST_POINTS:,} points", "--sweep", f"{len(points):,}", "fewer values")
    loaded, jobs = dict[str, Experiment](), list[Job]()
    for point in points:
        overrides = [f"{axis.key}={value}" for axis, value in zip(read, point, strict=True)]
        with naming(label := f"the point {', '.join(overrides)}"):
            loaded[label] = load(overrides)
    for label, experiment in loaded.items():
        with naming(label):
            jobs.append(Job(label=label, experiment=prepare(experiment)))
    with started(on):
        jobs = trained(jobs, learn, on)
        found = summaries(jobs, engine=engine, processes=processes, progress=progress, on=on)
    rows = [
        {axis.key: _value(job.experiment, axis.key, value) for axis, value in zip(read, point, strict=True)}
        | {name: summary.step_s["mean"] if name == "step_s" else getattr(summary, name) for name in COLUMNS}
        | {name: (summary.per_trainer or {}).get(name) for name in PER_TRAINER}
        for point, job, summary in zip(points, jobs, found, strict=True)
    ]
    learnt = {value: job.learnt for (value, *_), job in zip(points, jobs, strict=True) if job.learnt is not None}
    note = _diverged(read[0].key, learnt) if len(read) == 1 else None
    return Sweep(name=jobs[0].experiment.name, axes=tuple(read), table=pd.DataFrame(rows), note=note)


def _diverged(key: str, learnt: Mapping[str, Trajectory]) -> str | None:
    """Return a warning if a training diverged, else ``None``."""
    diverged = [value for value, one in learnt.items() if not math.isfinite(one.final_loss)]
    return f"the held-out loss is not finite where {key} is {', '.join(diverged)}: set a lower workload.lr" if diverged else None


def _value(experiment: Experiment, key: str, text: str) -> Any:
    """Return a number or boolean as resolved; anything else, such as a link or a list, as written."""
    value: Any = experiment
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value if isinstance(value, (bool, int, float)) else text


def _expanded(part: str, text: str) -> list[str]:
    part = part.strip()
    if not part or set(part) == {"."}:
        raise ConfigError("lacks a value", "--sweep", repr(text), _USAGE)
    if (bounds := _RANGE.fullmatch(part)) is None:
        return [part]
    first, last = int(bounds[1]), int(bounds[2])
    if not 0 <= last - first < MOST_POINTS:
        raise ConfigError("is not a range of whole numbers", "--sweep", repr(part), _USAGE)
    return [str(number) for number in range(first, last + 1)]
