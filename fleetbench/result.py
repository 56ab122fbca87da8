"""RunResult: one schema for what a run did, on any executor."""

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
"""Rows of a run's table above which it is kept only when asked."""

_COLUMNS = "rank step start_s forward_s backward_s wait_s exposed_comm_s update_s other_s arrival_s local_steps loss bytes_sent"
COLUMNS = tuple(_COLUMNS.split())
"""Columns of ``steps.parquet``: one row per rank and step, times on rank 0's clock."""
PARTS = ("forward_s", "backward_s", "wait_s", "exposed_comm_s", "update_s", "other_s")
"""The columns that add up to a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One rank's step as an executor sees it, before the ranks are laid side by side. Times in ns."""

    rank: int
    step: int
    start_ns: int
    read_ns: int = 0
    """Before the forward: fetching the batch. Part of ``other_s``."""
    forward_ns: int
    backward_ns: int
    stall_ns: int
    """From the end of compute (of the update, under Local SGD) to the end of the last collective."""
    update_ns: int
    """Optimizer and merge."""
    end_ns: int
    """Start of the next step."""
    arrival_ns: int | None
    """When the rank was ready for the step's last collective, or with synchronous servers to push its gradient; none in a step without."""
    wait_ns: int | None = None
    """Of the stall, until the last rank had started what this one waited for; none: until the latest arrival over the ranks."""
    local_steps: int | None
    """Length of the round that this step closed; none where it closed none."""
    loss: float | None
    bytes_sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """``summary.json``: a run over its counted steps. Times in seconds; means are over all ranks and steps."""

    schema: int = SCHEMA
    executor: str
    """``sim`` or ``real``."""
    name: str
    """The experiment's name."""
    experiment: str
    """Digest of the resolved experiment: equal for runs of one experiment."""
    run_id: str
    """Tells runs of one experiment apart: the time, and random digits."""
    device: str
    emulated: bool
    """Whether workers slept instead of computing."""
    launcher: str
    seed: int
    trainers: int
    servers: int
    steps: int
    """Counted steps of one trainer, without the warm-up."""
    wall_s: float
    """From the first start of step 1 on any rank to the last end of the last step."""
    samples_per_s: float
    """Samples of all trainers over ``wall_s``."""
    step_s: dict[str, float]
    """Mean and percentiles (``p50``, ``p95``, ``p99``) of a step, start to start."""
    compute_s: float
    """Mean forward and backward, stragglers' delays among it."""
    wait_s: float
    """Mean time that a rank stalls until the slowest is ready for the step's last collective, or for its synchronous push."""
    exposed_comm_s: float
    """Mean rest of the stall: communication that no compute hides."""
    update_s: float
    """Mean optimizer step, with the merge where one follows."""
    other_s: float
    """Mean rest of a step: fetching the batch, the loop's own work."""
    bytes_sent_per_trainer: int
    """Mean over the ranks, of all counted steps together."""
    num_syncs: int
    """Rounds that ended: steps after which trainers agreed."""
    local_steps: dict[str, float] | None
    """``mean``, ``min`` and ``max`` length of a round in steps; none where no round ended."""
    staleness: dict[str, float] | None = None
    """Of gradients at parameter servers: ``mean``, ``p50``, ``p95`` and ``max`` number of updates between the parameters that one was
    computed from and its own. None among trainers alone, which never use old parameters."""
    final_loss: float | None = None
    """Held-out loss after the last step. None where it is not known, and where training diverged to infinity."""
    time_to_target_s: float | None = None
    """From the start of step 1 to the step at the first of three evaluations in a row that reach the workload's target; or none."""
    steps_to_target: float | None = None
    """Steps of a trainer until then, on the line between that evaluation and the one before it."""
    metrics: dict[str, float] | None = None
    """At the target: ``accuracy`` of the registry's classifiers; what a script reports beside its loss, in the mean of that window."""
    skipped: tuple[dict[str, str], ...] = ()
    """Lines of the experiment that this run did not realise: ``what``, and ``why``."""
    lateness_s: dict[str, float] | None = None
    """By how much emulated compute missed its deadlines: ``layer_p50``, ``layer_p95`` and ``layer_max`` of every layer's
    end, ``step_p50``, ``step_p95`` and ``step_max`` of the whole backward's; all ranks and counted steps together. None where
    compute was real."""
    testbed: dict[str, Any] | None = None
    """What the testbed's links and this machine's other load did in the meantime, and how many void runs were repeated; none elsewhere."""
    engine: str | None = None
    """What simulated it: ``reference`` or ``vector``; none elsewhere."""
    server_load: dict[str, Any] | None = None
    """Means over the parameter servers: ``gradients_per_s``, ``utilisation``, ``queue_length``, ``wait_s`` of a message; and
    ``staleness_histogram``, gradients by their staleness. None without servers, or where it was not measured."""
    per_trainer: dict[str, Any] | None = None
    """Samples and tokens per second, MFU and memory of one trainer, by the fields of ``fleetbench.utilisation.Utilisation``."""
    foreign_cores: float | None = None
    """Cores that other programs computed on during a real run, on average; none where it was not measured."""
    loss_from: str | None = None
    """From whom a simulation's losses are: ``virtual trainers``, or ``a declared curve``; none elsewhere, and without losses."""

    @property
    def busy(self) -> str | None:
        """What is to be said of the machine on which it was measured; none where that was quiet."""
        if not is_busy(self.foreign_cores):
            return None
        return f"measured on a busy machine: other programs computed on {self.foreign_cores:.2g} cores then, in the best of several runs"

    def to_json(self) -> str:
        """The text of ``summary.json``."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False)

    @classmethod
    def load(cls, path: Path) -> Summary:
        """Read ``summary.json``."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**data, "skipped": tuple(data["skipped"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A run: what was asked for, what happened, and where it is stored."""

    experiment: Experiment
    summary: Summary
    steps: pd.DataFrame
    """A row a rank and step, warm-up included; none where the run kept no table."""
    plan: Plan
    spans: tuple[Span, ...] = ()
    """What the timeline draws; ``timeline`` reads those of a stored run."""
    recordings: tuple[Recording, ...] = ()
    """Events and operations of every rank, or with parameter servers of every sender, server and trainer, where asked for."""
    host_s: float = 0.0
    """Seconds of the host's time that executing the run took."""
    testbed: dict[str, Any] | None = None
    """Every link as verified and every block as watched, of a run on the testbed; kept in ``testbed.json``."""
    peak_bytes: tuple[int, ...] = ()
    """The most memory that each rank has taken, where that was looked at; kept in ``manifest.json``. See ``real.layer_times``."""
    held_out: tuple[tuple[int, float], ...] = ()
    """Step and held-out loss of every evaluation; kept in ``manifest.json``."""
    path: Path | None = None

    @property
    def timeline(self) -> pd.DataFrame:
        """A row a span: ``rank``, ``stream``, ``row`` of collectives under way together, ``name``, ``start_s``, ``duration_s``."""
        spans = self.spans or (() if self.path is None else read_timeline(self.path / TIMELINE_FILE))
        rows = [(*track, span.name, span.start_ns / 1e9, span.duration_ns / 1e9) for track, span in on_tracks(spans)]
        return pd.DataFrame(rows, columns=["rank", "stream", "row", "name", "start_s", "duration_s"])


def runs_table(runs: Mapping[str, RunResult]) -> pd.DataFrame:
    """A row a run, by its name: the figures of its summary that any run has, then the settings in which the runs' experiments differ."""
    figures = pd.DataFrame([dict(flat(dataclasses.asdict(run.summary))) for run in runs.values()], list(runs)).dropna(
        axis="columns", how="all"
    )
    figures = figures.drop(columns=[name for name in figures if name == "skipped" or "histogram" in str(name)])
    settings = pd.DataFrame([dict(flat(encode(run.experiment))) for run in runs.values()], list(runs))
    differing = [name for name in settings if name != "name" and len(set(settings[name].map(repr))) > 1]
    return figures.join(settings[differing])


def steps_table(records: Sequence[StepRecord]) -> pd.DataFrame:
    """Lay the ranks side by side: split every stall into waiting for the slowest and exposed communication.

    Until the last rank has started an exchange, those that wait for it wait for that rank; the rest of a stall is exposed.
    Raises ``ConfigError`` for a run whose times or bytes 64 bits do not count.
    """
    if any(max(record.end_ns, record.bytes_sent) > LARGEST for record in records):
        raise uncountable()
    names = [field.name for field in dataclasses.fields(StepRecord)]
    frame = pd.DataFrame({name: [getattr(record, name) for record in records] for name in names})
    frame["arrival_ns"] = pd.array([record.arrival_ns for record in records], dtype="Int64")  # a float would round beyond 2^53
    return steps_table_of(frame.sort_values(["rank", "step"], ignore_index=True))


def steps_table_of(frame: pd.DataFrame) -> pd.DataFrame:
    """``steps_table`` of records that are columns already, by rank and step."""
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
    """The table of a run whose steps were not kept: its columns, and no row."""
    nothing: dict[str, Any] = dict.fromkeys((entry.name for entry in dataclasses.fields(StepRecord)), 0)
    return steps_table([StepRecord(**nothing)]).iloc[:0]


def step_times(table: pd.DataFrame) -> pd.Series:
    """Seconds of every counted step of every rank, start to start."""
    return table.loc[table["step"] >= 1, list(PARTS)].sum(axis=1)


def step_s_of(result: RunResult) -> float:
    """Seconds of a step in whole rounds of training by collectives: what a sample costs at a fixed batch in a training of any length.

    With parameter servers, of the trainer whose steps take longest. Of runs shorter than a round, and where steps beside an evaluation
    were left out, from the first start to the last end.
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
    """Where the seconds of ``step_s_of`` go, by the summary's names: means over steps, and over trainers that train in step."""
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
    """The counted steps of the trainer whose steps take longest."""
    counted = table[table["step"] >= 1]
    return counted[counted["rank"] == step_times(table).groupby(counted["rank"]).mean().idxmax()]


def _rounds_of(result: RunResult) -> tuple[int, int] | None:
    strategy, steps = result.experiment.strategy, result.summary.steps
    if strategy.mode == "ps" or (len(result.steps) and result.steps["step"].max() > steps):
        return None
    return Combination.of(strategy).whole_rounds(steps)


def summarise(experiment: Experiment, table: pd.DataFrame, **known: Any) -> Summary:
    """The summary of a run over its counted steps (``step`` >= 1). ``known``: see ``summary_of``; ``wall_s`` goes before the table's."""
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
    """The summary of a run: ``totals`` of its counted steps by ``Summary``'s names, and in ``rounds`` the lengths of those that ended.

    ``known``: what only the executor knows, other fields of ``Summary``; ``wall_s``, by a clock that counts whole nanoseconds.
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
                *_early_exchanges(experiment, figures["step_s"], known.get("server_load")),
            ),
        }
    )


def _early_exchanges(experiment: Experiment, step_s: Mapping[str, float], load: Mapping[str, Any] | None) -> list[dict[str, str]]:
    """The entry of ``skipped`` for trainers that exchange with servers sooner than the strategy says."""
    if experiment.strategy.mode != "ps":
        return []
    cluster, optimizer = experiment.cluster, experiment.workload.optimizer
    rules = rules_of(experiment.strategy, cluster.trainers, cluster.servers, optimizer=optimizer, simulated=True)
    pushes_per_s = load["gradients_per_s"] if load is not None and rules.mode == "geo_sgd" else 0.0
    apart = cluster.trainers / (step_s["mean"] * pushes_per_s) if pushes_per_s else None
    found = early_exchanges(rules, step_s["p50"], apart)
    return [] if found is None else [skip(*found)]


def uncountable() -> ConfigError:
    """The error of a run whose times or bytes 64 bits do not count."""
    return ConfigError(
        "the run's nanoseconds or bytes cannot be counted in 64 bits",
        "experiment",
        hint="36 simulated years are the most: look for a bandwidth, a size or a straggler that is not meant",
    )


def takes_no_time() -> ConfigError:
    """The error of a run that ends where it begins."""
    return ConfigError("the run takes no time at all", "workload.layers", hint="give the layers a forward or backward above 0 ns")


def skip(what: str, why: str) -> dict[str, str]:
    """One entry of ``skipped``: a line of the experiment that this run did not realise."""
    return {"what": what, "why": why}


def skipped_by_layers(workload: Workload, strategy: DistributedStrategy) -> list[dict[str, str]]:
    """Changed fields of the strategy that declared layers ignore, and that would change the times of measured ones."""
    known = "strategy.fetch_every_n_steps" if workload.host is not None and workload.host.fetch else None
    names = [name for name, _ in changed_fields(strategy, "strategy") if name in COMPUTE_ONLY and name != known]
    return [skip(name, "declared layer times do not depend on it") for name in names if workload.model == LAYERS]
