"""RunResult: one schema for the results of a run, on any executor."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fleetbench.config import encode, flat
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.measurements import is_busy
from fleetbench.plan.build import Plan
from fleetbench.plan.combination import Combination
from fleetbench.plan.replay import Recording
from fleetbench.plan.servers.rules import early_exchanges, rules_of
from fleetbench.profile import COMPUTE_ONLY
from fleetbench.quantities import LARGEST
from fleetbench.strategy import DistributedStrategy
from fleetbench.support import changed_fields
from fleetbench.timeline import TIMELINE_FILE, Span, on_tracks, read_timeline
from fleetbench.utilisation import utilisation
from fleetbench.workload import LAYERS, Workload

SCHEMA = 1
STEPS_FILE = "steps.parquet"
MOST_ROWS = 5_000_000
"""Largest number of rows of a table of steps that is kept by default; a larger one needs ``--table``."""

_COLUMNS = "rank step start_s forward_s backward_s wait_s exposed_comm_s update_s other_s arrival_s local_steps loss bytes_sent"
COLUMNS = tuple(_COLUMNS.split())
"""Columns of ``steps.parquet``: one row per rank and step, times on rank 0's clock."""
PARTS = ("forward_s", "backward_s", "wait_s", "exposed_comm_s", "update_s", "other_s")
"""Columns that add up to the time of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One rank's step as an executor records it, before ranks are compared. Times in ns."""

    rank: int
    step: int
    start_ns: int
    read_ns: int = 0
    """Time to fetch the batch, before the forward. Part of ``other_s``."""
    forward_ns: int
    backward_ns: int
    stall_ns: int
    """Time from the end of compute (of the update, under Local SGD) to the end of the last collective."""
    update_ns: int
    """Time of the optimizer and the merge."""
    end_ns: int
    """Time at which the next step starts."""
    arrival_ns: int | None
    """Time at which the rank was ready for the step's last collective, or, with synchronous servers, to push
    its gradient; None if the step has neither."""
    wait_ns: int | None = None
    """Part of the stall before the last rank started the exchange that this rank waited for. None: the part
    before the latest ``arrival_ns`` of any rank."""
    local_steps: int | None
    """Length in steps of the round that ended with this step; None if no round ended."""
    loss: float | None
    bytes_sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """``summary.json``: a run over its counted steps. Times in seconds; means over all ranks and steps."""

    schema: int = SCHEMA
    executor: str
    """Executor: ``sim`` or ``real``."""
    name: str
    """Name of the experiment."""
    experiment: str
    """Digest of the resolved experiment, equal for all runs of it."""
    run_id: str
    """Identifier of the run, from the time and random digits."""
    device: str
    emulated: bool
    """Whether workers slept instead of computing."""
    launcher: str
    seed: int
    trainers: int
    servers: int
    steps: int
    """Number of counted steps of one trainer, without the warm-up."""
    wall_s: float
    """Time from the first start of step 1 on any rank to the last end of the last step."""
    samples_per_s: float
    """Samples per second, of all trainers together, over ``wall_s``."""
    step_s: dict[str, float]
    """Mean and percentiles (``p50``, ``p95``, ``p99``) of a step, from start to start."""
    compute_s: float
    """Mean time of forward and backward, including stragglers' delays."""
    wait_s: float
    """Mean time that a rank stalls until the slowest rank is ready for the step's last collective, or for its
    synchronous push."""
    exposed_comm_s: float
    """Mean rest of the stall: communication that compute does not hide."""
    update_s: float
    """Mean time of the optimizer step, and of the merge if there is one."""
    other_s: float
    """Mean rest of a step: fetching the batch, and the loop's own work."""
    bytes_sent_per_trainer: int
    """Bytes that a trainer sends in all counted steps, as the mean over trainers."""
    num_syncs: int
    """Number of rounds that ended, that is, of steps after which trainers agreed."""
    local_steps: dict[str, float] | None
    """``mean``, ``min`` and ``max`` length of a round in steps; None if no round ended."""
    staleness: dict[str, float] | None = None
    """Staleness of gradients at parameter servers (``mean``, ``p50``, ``p95``, ``max``): number of updates
    between the parameters that a gradient was computed from and its own update. None without servers, because
    trainers then never use old parameters."""
    final_loss: float | None = None
    """Held-out loss after the last step. None if it is not known, or if training diverged to infinity."""
    time_to_target_s: float | None = None
    """Time from the start of step 1 until the target is reached: the first of three evaluations in a row that
    reach it. None if it is not reached."""
    steps_to_target: float | None = None
    """Number of steps of a trainer until the target is reached, interpolated between that evaluation and the
    one before it."""
    metrics: dict[str, float] | None = None
    """Metrics at the target, such as ``accuracy`` for the registry's classifiers, or values that a script
    reports beside its loss; means over the three evaluations."""
    skipped: tuple[dict[str, str], ...] = ()
    """Settings of the experiment that this run did not realise: ``what``, and ``why``."""
    lateness_s: dict[str, float] | None = None
    """How late emulated compute was: ``layer_p50``, ``layer_p95`` and ``layer_max`` at the end of every
    layer, ``step_p50``, ``step_p95`` and ``step_max`` at the end of the backward, over all ranks and counted
    steps. None if compute was real."""
    testbed: dict[str, Any] | None = None
    """Behaviour of the testbed's links, other load on this machine, and number of void runs that were
    repeated; None for other launchers."""
    engine: str | None = None
    """Simulation engine, ``reference`` or ``vector``; None for other executors."""
    server_load: dict[str, Any] | None = None
    """Means over the parameter servers: ``gradients_per_s`` and ``utilisation``; and
    ``staleness_histogram``, the number of gradients by staleness. None without servers, or if not measured."""
    per_trainer: dict[str, Any] | None = None
    """Samples and tokens per second, MFU and memory of one trainer, with the fields of
    ``fleetbench.utilisation.Utilisation``."""
    foreign_cores: float | None = None
    """Mean number of cores that other programs used during a real run; None if not measured."""
    loss_from: str | None = None
    """Source of a simulation's losses: ``virtual trainers`` or ``a declared curve``. None for other
    executors, and without losses."""
    churn: list[dict[str, Any]] | None = None
    """Goodput under ``cluster.churn`` by policy, with the fields of ``sim.churn.goodput.Goodput``; all other
    figures are of an undisturbed run. None for other executors, and without churn."""

    @property
    def busy(self) -> str | None:
        """Warning about the machine's other load during the measurement; None if the machine was quiet."""
        if not is_busy(self.foreign_cores):
            return None
        return f"measured on a busy machine: other programs used {self.foreign_cores:.2g} cores then, in the best of several runs"

    def to_json(self) -> str:
        """Return the text of ``summary.json``."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False)

    @classmethod
    def load(cls, path: Path) -> Summary:
        """Read ``summary.json``."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**data, "skipped": tuple(data["skipped"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A run: its experiment, its results, and the folder that stores it."""

    experiment: Experiment
    summary: Summary
    steps: pd.DataFrame
    """Table with one row per rank and step, including warm-up; empty if the run kept no table."""
    plan: Plan
    spans: tuple[Span, ...] = ()
    """Spans of the timeline; empty for a stored run, whose ``timeline`` reads them from its file."""
    recordings: tuple[Recording, ...] = ()
    """Recorded events and operations, if requested: of every rank or, with parameter servers, of every sender,
    server and trainer."""
    host_s: float = 0.0
    """Time in seconds that the host took to execute the run."""
    testbed: dict[str, Any] | None = None
    """Record of a run on the testbed, stored in ``testbed.json``: each verified link and each watched block of
    steps."""
    peak_bytes: tuple[int, ...] = ()
    """Peak memory of each rank in bytes, if measured; stored in ``manifest.json``. See
    ``real.layer_times``."""
    held_out: tuple[tuple[int, float], ...] = ()
    """Step and held-out loss of every evaluation; stored in ``manifest.json``."""
    path: Path | None = None
    """Folder of a stored run; None if the run is not stored."""

    @property
    def timeline(self) -> pd.DataFrame:
        """Table with one row per span: ``rank``, ``stream``, ``row``, ``name``, ``start_s``, ``duration_s``.

        Collectives that overlap have different ``row`` numbers.
        """
        spans = self.spans or (() if self.path is None else read_timeline(self.path / TIMELINE_FILE))
        rows = [(*track, span.name, span.start_ns / 1e9, span.duration_ns / 1e9) for track, span in on_tracks(spans)]
        return pd.DataFrame(rows, columns=["rank", "stream", "row", "name", "start_s", "duration_s"])


def runs_table(runs: Mapping[str, RunResult]) -> pd.DataFrame:
    """Return a table with one row per run: its summary's figures, then the settings that differ."""
    figures = pd.DataFrame([dict(flat(dataclasses.asdict(run.summary))) for run in runs.values()], list(runs)).dropna(
        axis="columns", how="all"
    )
    figures = figures.drop(columns=[name for name in figures if name == "skipped" or "histogram" in str(name)])
    settings = pd.DataFrame([dict(flat(encode(run.experiment))) for run in runs.values()], list(runs))
    differing = [name for name in settings if name != "name" and len(set(settings[name].map(repr))) > 1]
    return figures.join(settings[differing])


def steps_table(records: Sequence[StepRecord]) -> pd.DataFrame:
    """Return a table with one row per rank and step, in which stalls are split into waits and exposed communication.

    A stall counts as waiting until the slowest rank has started the exchange; the rest is exposed
    communication. Raises ``ConfigError`` if times or bytes exceed 64 bits.
    """
    if any(max(record.end_ns, record.bytes_sent) > LARGEST for record in records):
        raise uncountable()
    names = [field.name for field in dataclasses.fields(StepRecord)]
    frame = pd.DataFrame({name: [getattr(record, name) for record in records] for name in names})
    frame["arrival_ns"] = pd.array([record.arrival_ns for record in records], dtype="Int64")  # a float would round beyond 2^53
    return steps_table_of(frame.sort_values(["rank", "step"], ignore_index=True))


def steps_table_of(frame: pd.DataFrame) -> pd.DataFrame:
    """Return ``steps_table`` of records that are given as columns, sorted by rank and step."""
    arrival = frame["arrival_ns"].astype("Int64")
    compute_end = frame["start_ns"] + frame["read_ns"] + frame["forward_ns"] + frame["backward_ns"]
    stall_begin = np.maximum(arrival.fillna(0).to_numpy(dtype=np.int64), compute_end)
    latest = arrival.groupby(frame["step"]).transform("max").fillna(0).to_numpy(dtype=np.int64)
    wait = frame["wait_ns"].astype("Int64").fillna(np.clip(latest - stall_begin, 0, frame["stall_ns"])).astype("int64")
    total = frame["end_ns"] - frame["start_ns"]
    known = frame["forward_ns"] + frame["backward_ns"] + frame["stall_ns"] + frame["update_ns"]
    times = {name: frame[f"{name}_ns"] for name in ("start", "forward", "backward", "update")}
    times |= {"wait": wait, "exposed_comm": frame["stall_ns"] - wait, "other": total - known, "arrival": arrival}
    kinds = {"rank": "int64", "step": "int64", "local_steps": "Int64", "loss": "float64", "bytes_sent": "int64"}
    table = frame[list(kinds)].astype(kinds).assign(**{f"{name}_s": (own / 1e9).astype("float64") for name, own in times.items()})
    return table[list(COLUMNS)]


def no_steps() -> pd.DataFrame:
    """Return the table of a run that kept no steps: all columns and no rows."""
    nothing: dict[str, Any] = dict.fromkeys((entry.name for entry in dataclasses.fields(StepRecord)), 0)
    return steps_table([StepRecord(**nothing)]).iloc[:0]


def step_times(table: pd.DataFrame) -> pd.Series:
    """Return the seconds from the start of a step to the start of the next, for each counted step of each rank."""
    return table.loc[table["step"] >= 1, list(PARTS)].sum(axis=1)


def step_s_of(result: RunResult) -> float:
    """Return the seconds per step over whole rounds, so that runs of any length are comparable.

    With parameter servers, this is the mean of the trainer with the longest steps. For runs shorter than a
    round, and runs that leave out steps near an evaluation, it is the time from the first start to the last
    end divided by the number of steps.
    """
    table, rounds = result.steps, _rounds_of(result)
    if result.experiment.strategy.mode == "ps" and len(table):
        return float(step_times(_of_slowest(table)).mean())
    if rounds is None:
        return result.summary.wall_s / result.summary.steps
    ends = (table["start_s"] + table[list(PARTS)].sum(axis=1)).groupby(table["step"]).max()
    first, last = rounds
    return float(ends[last] - ends[first]) / (last - first)


def parts_of(result: RunResult) -> dict[str, float]:
    """Return the parts of ``step_s_of`` in seconds, by their names in ``Summary``.

    They are means over steps and trainers; with parameter servers, only over the steps of the slowest trainer.
    """
    names, rounds = ("compute_s", "wait_s", "exposed_comm_s", "update_s", "other_s"), _rounds_of(result)
    if result.experiment.strategy.mode == "ps" and len(result.steps):
        mean = _of_slowest(result.steps).mean(numeric_only=True)
    elif rounds is None:
        return {name: getattr(result.summary, name) for name in names}
    else:
        mean = result.steps[result.steps["step"].between(rounds[0] + 1, rounds[1])].mean(numeric_only=True)
    mean["compute_s"] = mean["forward_s"] + mean["backward_s"]
    return {name: float(mean[name]) for name in names}


def _of_slowest(table: pd.DataFrame) -> pd.DataFrame:
    """Return the counted steps of the trainer whose steps take longest."""
    counted = table[table["step"] >= 1]
    return counted[counted["rank"] == step_times(table).groupby(counted["rank"]).mean().idxmax()]


def _rounds_of(result: RunResult) -> tuple[int, int] | None:
    strategy, steps = result.experiment.strategy, result.summary.steps
    if strategy.mode == "ps" or (len(result.steps) and result.steps["step"].max() > steps):
        return None
    return Combination.of(strategy).whole_rounds(steps)


def summarise(experiment: Experiment, table: pd.DataFrame, **known: Any) -> Summary:
    """Return the summary of a run over its counted steps (``step`` >= 1).

    ``known`` is as in ``summary_of``; its ``wall_s`` takes precedence over the table's.
    """
    counted = table[table["step"] >= 1]
    times = step_times(table)
    rounds = counted.loc[counted["rank"] == counted["rank"].min(), "local_steps"].dropna()
    mean = counted.mean(numeric_only=True)
    sent = counted["bytes_sent"].value_counts()
    sent_bytes = sum(nbytes * number for nbytes, number in zip(sent.index.tolist(), sent.tolist(), strict=True))  # no float may hold it
    totals: dict[str, Any] = {
        "wall_s": float((counted["start_s"] + times).max() - counted["start_s"].min()),
        "steps": int(counted["step"].nunique()),
        "step_s": {"mean": float(times.mean())} | {f"p{q}": float(times.quantile(q / 100)) for q in (50, 95, 99)},
        "compute_s": float(mean["forward_s"] + mean["backward_s"]),
        "bytes_sent_per_trainer": round(Fraction(sent_bytes, int(counted["rank"].nunique()))),
        "rounds": [int(length) for length in rounds],
    }
    totals |= {name: float(mean[name]) for name in ("wait_s", "exposed_comm_s", "update_s", "other_s")}
    return summary_of(experiment, totals, **known)


def summary_of(experiment: Experiment, totals: Mapping[str, Any], **known: Any) -> Summary:
    """Return the summary of a run from totals over its counted steps.

    ``totals`` has ``Summary``'s names, plus ``rounds``, the lengths of the rounds that ended. ``known`` has
    the fields of ``Summary`` that only the executor knows, such as a ``wall_s`` in whole nanoseconds.
    """
    trainers, figures = experiment.cluster.trainers, {**totals, **known}
    rounds, final_loss, memory = figures.pop("rounds"), figures.pop("final_loss", None), figures.pop("memory_bytes", None)
    one = utilisation(experiment, figures["wall_s"] / figures["steps"], memory)
    diverged = final_loss is not None and not math.isfinite(final_loss)
    lost = [skip("final_loss", "training diverged, and its loss is not finite: set a lower learning rate")] if diverged else []
    return Summary(
        **figures
        | {
            "name": experiment.name,
            "experiment": experiment.digest(),
            "device": experiment.run.device,
            "emulated": experiment.run.device == "emulated",
            "launcher": experiment.run.launcher,
            "seed": experiment.run.seed,
            "trainers": trainers,
            "servers": experiment.cluster.servers,
            "samples_per_s": trainers * one.samples_per_s,
            "per_trainer": dataclasses.asdict(one),
            "num_syncs": len(rounds),
            "local_steps": {"mean": sum(rounds) / len(rounds), "min": min(rounds), "max": max(rounds)} if rounds else None,
            "final_loss": None if diverged else final_loss,
            "skipped": (
                *known.get("skipped", ()),
                *lost,
                *_early_exchanges(experiment, figures["step_s"]),
            ),
        }
    )


def _early_exchanges(experiment: Experiment, step_s: Mapping[str, float]) -> list[dict[str, str]]:
    """Return a ``skipped`` entry if trainers exchange with servers earlier than planned, else an empty list."""
    if experiment.strategy.mode != "ps":
        return []
    cluster, optimizer = experiment.cluster, experiment.workload.optimizer
    rules = rules_of(experiment.strategy, cluster.trainers, cluster.servers, optimizer=optimizer)
    found = early_exchanges(rules, step_s["p50"])
    return [] if found is None else [skip(*found)]


def uncountable() -> ConfigError:
    """Return the error for a run whose times or bytes exceed 64 bits."""
    return ConfigError(
        "the run's nanoseconds or bytes cannot be counted in 64 bits",
        "experiment",
        hint="36 simulated years are the most: look for a bandwidth, a size or a straggler that is not meant",
    )


def takes_no_time() -> ConfigError:
    """Return the error for a run of zero length."""
    return ConfigError("the run takes no time at all", "workload.layers", hint="give the layers a forward or backward above 0 ns")


def skip(what: str, why: str) -> dict[str, str]:
    """Return an entry of ``Summary.skipped``: a setting that this run did not realise, and the reason."""
    return {"what": what, "why": why}


def skipped_by_layers(workload: Workload, strategy: DistributedStrategy) -> list[dict[str, str]]:
    """Return ``skipped`` entries for changed strategy fields that affect measured but not declared layer times."""
    known = "strategy.fetch_every_n_steps" if workload.host is not None and workload.host.fetch else None
    names = [name for name, _ in changed_fields(strategy, "strategy") if name in COMPUTE_ONLY and name != known]
    return [skip(name, "declared layer times do not depend on it") for name in names if workload.model == LAYERS]
