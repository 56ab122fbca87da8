"""Sources: compute times by rank and step, from a run or from a trace, for a straggler model.

Three kinds are told apart by what they hold:

- the folder of a run, whose ``steps.parquet`` has forward and backward;
- a table with a row a rank and step, in the format of ``fleetbench.traces``, that holds seconds;
- a trace of operations, as ByteDance's straggler traces are (Lin et al. 2025, "Understanding Stragglers in
  Large Model Training Using What-if Analysis", OSDI): ``dp_rank``, ``stage``, ``step``, ``optype`` and ``duration`` in
  seconds. A rank's compute in a step is the sum of its ``forward-compute`` and ``backward-compute``; a pipeline's
  stages compute different layers, so each stage's data-parallel group is a source of its own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fleetbench.errors import ConfigError
from fleetbench.fitting.stragglers import fit_stragglers
from fleetbench.measurements import StragglerFit
from fleetbench.store import load_run
from fleetbench.traces import FORMAT, by_rank_and_step, compute_columns, read_table

if TYPE_CHECKING:
    import pandas as pd

Floats = npt.NDArray[np.float64]

COMPUTE = ("forward-compute", "backward-compute")
OPERATIONS = ("dp_rank", "stage", "step", "optype", "duration")
_WHERE = "--from"
_KINDS = f"a run's folder; {FORMAT}; or a trace of operations with the columns {', '.join(OPERATIONS)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTimes:
    """What a source holds."""

    times_s: Floats
    """Compute in seconds by rank and step."""
    steps: tuple[int, ...]
    """Their numbers, in order."""
    nodes: tuple[int, ...]
    """Of every rank; a trace of operations does not say, so there each rank is a node."""
    stage: int | None = None
    """Of a trace of operations."""


def compute_times(source: str | Path, stage: int | None = None) -> ComputeTimes:
    """Read a source; ``stage`` chooses one of a pipeline's.

    Raises ``ConfigError`` for a source of no known kind, a stage that it does not hold or that must be
    chosen, and times that are not above 0 or not of every rank and step.
    """
    path = Path(source)
    if path.is_dir():
        run = load_run(path)
        per_node = run.experiment.cluster.trainers_per_node
        found = _of_steps(run.steps, str(path))
        found = dataclasses.replace(found, nodes=tuple(rank // per_node for rank in found.nodes))
    else:
        frame = read_table(path, _WHERE)
        found = _of_operations(frame, stage, str(path)) if set(OPERATIONS) <= set(frame.columns) else _of_steps(frame, str(path))
    if found.stage is None and stage is not None:
        raise ConfigError("holds no pipeline stages", "--stage", repr(stage), "drop --stage")
    if found.times_s.min() <= 0:
        raise ConfigError("holds a compute time that is not above 0", _WHERE, str(path), f"a source is {_KINDS}")
    return found


def fit_source(source: str | Path, *, stage: int | None = None, seed: int = 0) -> StragglerFit:
    """The straggler model of a run or a trace; ``seed`` is that of the bootstrap of its goodness of fit.

    Its ``entries`` are what ``cluster.stragglers`` takes, for a table of layers that takes ``base``. See ``compute_times``
    for what a source may be, and for what is raised.
    """
    found = compute_times(source, stage)
    return fit_stragglers(found.times_s, seed, found.nodes)


def _of_steps(frame: pd.DataFrame, path: str) -> ComputeTimes:
    columns = compute_columns(frame)
    if columns is None or not {"rank", "step"} <= set(frame.columns):
        raise ConfigError(f"has the columns {', '.join(map(str, frame.columns[:12]))}", _WHERE, path, f"a source is {_KINDS}")
    times, steps = by_rank_and_step(frame, columns, _WHERE, path)
    return ComputeTimes(times_s=times, steps=steps, nodes=tuple(range(len(times))))


def _of_operations(frame: pd.DataFrame, stage: int | None, path: str) -> ComputeTimes:
    import pandas as pd  # half a second, which a command that fits nothing need not pay

    numbers = {name: pd.to_numeric(frame[name], errors="coerce") for name in ("stage", "duration")}
    for name, column in numbers.items():
        if column.isna().any():
            raise ConfigError(f"holds a {name} that is no number", _WHERE, path, f"a source is {_KINDS}")
    frame = frame.assign(**numbers)
    stages = sorted(int(number) for number in frame["stage"].unique())
    chosen = stages[0] if stage is None and len(stages) == 1 else stage
    if chosen is None:
        hint = "--stage 0 fits its data-parallel group: stages compute different layers"
        raise ConfigError(f"holds {len(stages)} pipeline stages, {stages}", _WHERE, path, hint)
    if chosen not in stages:
        raise ConfigError("no such stage", "--stage", repr(chosen), f"stages are {stages}")
    own = frame[(frame["stage"] == chosen) & frame["optype"].isin(COMPUTE)]
    sums = own.assign(duration=own["duration"].astype("float64")).groupby(["dp_rank", "step"], observed=True)["duration"]
    counts = sums.size()
    if counts.min() < counts.max():
        fewest: Any = counts.idxmin()
        hint = "leave such steps out: their compute is not the others'"
        raise ConfigError(f"rank {fewest[0]} has {counts.min()} operations in step {fewest[1]}, others {counts.max()}", _WHERE, path, hint)
    flat = sums.sum().rename("compute_s").reset_index().rename(columns={"dp_rank": "rank"})
    times, steps = by_rank_and_step(flat, "compute_s", _WHERE, path)
    return ComputeTimes(times_s=times, steps=steps, nodes=tuple(range(len(times))), stage=chosen)
