"""A report's content as a single object, read from the folder of a tuning or of a single run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from fleetbench import units
from fleetbench.config import flat
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.report.answer import Answer, answer_of, best_of
from fleetbench.result import STEPS_FILE, RunResult
from fleetbench.store import load_run
from tuner.notes import Note
from tuner.recommendation import Arm, Recommendation

SPLIT = ("compute", "wait", "exposed communication", "update", "other")
"""Parts of a step, in the order of ``Summary``'s five means."""

DEFAULT = "default"
_EXECUTORS = {"sim": "simulated", "real": "real"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneView:
    """Content of a report that only a tuning has."""

    recommendation: Recommendation
    """The recommendation as stored."""
    chosen: str
    """Name of the recommended arm."""
    min_gain: float
    """Least gain: for USE, the lower end of the speed-up's interval must exceed 1 + ``min_gain``."""
    answer: Answer
    """The answer as formatted for readers."""
    to_target: Mapping[str, Sequence[RunResult]]
    """Stored runs to the target by heading, of the default and of the other strategy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Content of one report."""

    name: str
    """Name of the experiment."""
    headline: str
    """Verdict line of a tuning, or the time that a run took."""
    good: bool
    """Whether the headline reports a gain."""
    experiment: str
    """Digest of the experiment."""
    tune: TuneView | None = None
    """Content that only a tuning has; None for a single run."""
    splits: pd.DataFrame
    """Mean seconds per step, with a row for each strategy and executor and a column for each of ``SPLIT``."""
    summary: tuple[tuple[str, str], ...] = ()
    """Every key of a single run's summary, formatted."""
    skipped: tuple[tuple[str, str], ...]
    """Settings of the experiment that were not realised, with reasons, each once."""
    notes: tuple[Note, ...] = ()
    """Notes of the tuning."""
    environment: tuple[tuple[str, str], ...]
    """Machine, device and versions of the run."""


def read_run(folder: str | Path) -> RunResult:
    """Read a stored run.

    Raises ``ConfigError`` for a folder that is no run, is incomplete or damaged, or has no table of steps.
    """
    run = load_run(folder)
    if run.steps.empty:
        raise ConfigError(
            f"a run without {STEPS_FILE}, which reports and comparisons read",
            str(folder),
            hint="simulate it again with --table",
        )
    return run


def read_report(folder: Path) -> Report:
    """Read the report of a tuning's folder (with a ``recommendation.json``) or of a run folder.

    Raises ``ConfigError`` for any other folder.
    """
    if not folder.is_dir():
        raise ConfigError("no such folder", str(folder), hint="name a run folder, or the folder of a tuning")
    if (folder / "recommendation.json").is_file():
        return _tune_report(folder)
    return _run_report(read_run(folder))


def splits_of(runs: Mapping[str, Sequence[RunResult]]) -> pd.DataFrame:
    """Return mean seconds per step of each label's runs, with a column for each of ``SPLIT``."""
    rows = []
    for several in runs.values():
        means = [run.summary for run in several]
        parts = [(mean.compute_s, mean.wait_s, mean.exposed_comm_s, mean.update_s, mean.other_s) for mean in means]
        rows.append(np.average(parts, axis=0, weights=[mean.steps for mean in means]))
    return pd.DataFrame(rows, list(runs), SPLIT)


def _run_report(run: RunResult) -> Report:
    summary = run.summary
    rows = [(key, units.number(value)) for key, value in flat(json.loads(summary.to_json())) if key != "skipped"]
    kind = _EXECUTORS[summary.executor] + (", emulated compute" if summary.emulated else "")
    busy = f"; {summary.busy}" if summary.busy else ""
    times = f"median {units.seconds(summary.step_s['p50'])}, p95 {units.seconds(summary.step_s['p95'])}"
    return Report(
        name=summary.name,
        headline=f"{units.seconds(summary.step_s['mean'])} a step ({kind}; {times}{busy})",
        good=True,
        experiment=summary.experiment,
        splits=splits_of({f"{summary.name}, {_EXECUTORS[summary.executor]}": [run]}),
        summary=tuple(rows),
        skipped=_skipped([run]),
        environment=_environment([run]),
    )


def _tune_report(folder: Path) -> Report:
    recommendation = Recommendation.load(folder)
    runs = {name: read_run(folder / "runs" / name) for name in recommendation.runs}
    stored = list(runs.values())
    experiment = Experiment.load(folder / "experiment.toml")
    finalist, best = recommendation.finalist if recommendation.verdict == "USE" else None, best_of(recommendation)
    is_busy = any(run.summary.busy for run in stored)
    splits = splits_of(_by_arm(runs, recommendation.arms))
    return Report(
        name=recommendation.name,
        headline=recommendation.line + ("; measured on a busy machine" if is_busy else ""),
        good=finalist is not None,
        experiment=recommendation.experiment,
        tune=TuneView(
            recommendation=recommendation,
            chosen=finalist or DEFAULT,
            min_gain=experiment.tune.min_gain,
            answer=(answer := answer_of(recommendation, folder, splits, experiment.run.seed)),
            to_target={} if best is None or not answer.seeds else _to_target(runs, recommendation, best, answer.column),
        ),
        splits=splits,
        skipped=_skipped(stored),
        notes=recommendation.told,
        environment=_environment(stored) if stored else (),
    )


def _to_target(runs: Mapping[str, RunResult], found: Recommendation, best: Arm, column: str) -> dict[str, list[RunResult]]:
    named = {"today": found.arms[0].target, column: best.target}
    return {label: [runs[name] for name in (() if target is None else target.runs) if name in runs] for label, target in named.items()}


def _by_arm(runs: Mapping[str, RunResult], arms: Sequence[Arm]) -> dict[str, list[RunResult]]:
    """Return the stored runs by the names of an arm and an executor: the simulated run, and the real legs."""
    found: dict[str, list[RunResult]] = {}
    for arm in arms:
        for executor, names in (("simulated", (arm.simulated_run,)), ("real", arm.measured_runs)):
            if stored := [runs[name] for name in names if name is not None and name in runs]:
                found[f"{arm.name}, {executor}"] = stored
    return found


def _skipped(runs: Sequence[RunResult]) -> tuple[tuple[str, str], ...]:
    return tuple(dict.fromkeys((entry["what"], entry["why"]) for run in runs for entry in run.summary.skipped))


def _environment(runs: Sequence[RunResult]) -> tuple[tuple[str, str], ...]:
    """Return machine, device and versions of the first real run, or of the first run if all are simulated."""
    run = next((run for run in runs if run.summary.executor != "sim"), runs[0])
    settings = run.experiment.run
    rows = [("launcher", settings.launcher), ("device", settings.device), ("backend", settings.backend), ("seed", str(settings.seed))]
    if run.path is None:
        return tuple(rows)
    manifest = json.loads((run.path / "manifest.json").read_text(encoding="utf-8"))
    host = [(key, units.number(value)) for key, value in manifest["host"].items()]
    versions = [("versions", ", ".join(f"{name} {version}" for name, version in manifest["versions"].items()))]
    commit = [("commit", manifest["commit"])] if manifest["commit"] else []
    return tuple(host + rows + versions + commit + list(manifest["environment"].items()))
