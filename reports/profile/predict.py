"""Does a profile predict real step times? Profile, predict, then run for real, strategies in turns, on this machine's processors.

Run from the repository's root: ``python reports/profile/predict.py [--model NAME] [--rounds N]``. A round of a model is a profile
(`fleetbench profile`, with its files); what `sim` makes of its measured.toml for every strategy, written down before anything else
runs; and then real runs of these strategies, as legs of one launch, in turns: forwards and backwards through the list. Results go to
``raw.jsonl`` as they come, void ones included; ``--tables`` prints the tables of README.md from that file. ``--quick`` checks that
everything runs, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any, Generic, TypeVar

from fleetbench.config import encode
from fleetbench.experiment import Experiment
from fleetbench.measurements import FOREIGN_LIMIT
from fleetbench.report.folder import save_profile
from fleetbench.result import RunResult, step_times
from fleetbench.store import machine, versions
from fleetbench.strategy import DistributedStrategy
from real.job.session import Session
from real.leg import Leg
from real.profile.measuring import measure_profile
from real.testbed import noise
from sim.run import simulate

RAW = Path(__file__).parent / "raw.jsonl"
TOLERANCE = 0.05
REPEATS = 2
"""A pass through the strategies, or a profile, on a busy machine is repeated so often at most."""
PHASES = ("compute_s", "wait_s", "exposed_comm_s", "update_s", "other_s")
Entry = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model, and what it is predicted and measured under."""

    workload: Mapping[str, Any]
    strategies: Mapping[str, Mapping[str, Any]]
    seconds: float
    """What a leg of the profile may take."""
    steps: int
    """Counted steps of a real leg: a multiple of every K and every k."""
    warmup_steps: int
    seeds: int
    """Of the stragglers that are simulated; their mean is the prediction."""
    passes: int = 4
    rounds: int = 1

    def experiment(self, name: str) -> Experiment:
        """Two trainers on this machine."""
        run = {"timeout": "300 s", "warmup_steps": self.warmup_steps}
        workload = {**self.workload, "steps": self.steps}
        own = {"name": name, "workload": workload, "cluster": {"trainers_per_node": 2}, "run": run, "tune": {"thread_num": [1]}}
        return Experiment.from_dict(own)

    def quick(self) -> Case:
        """The same in a fraction of the time."""
        options = {"data_options": {"image_size": 64}} if self.workload["data"] == "synthetic" else {}
        workload = {**self.workload, **options}
        return dataclasses.replace(self, workload=workload, seconds=1.0, steps=4, passes=2, seeds=2, rounds=1)


K4: Mapping[str, Any] = {"localsgd": True, "localsgd_configs": {"k_steps": 4}}
MERGE4: Mapping[str, Any] = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4}}
EACH: Mapping[str, Any] = {"fuse_all_reduce_ops": False}

CASES = {
    "digits_cnn": Case(
        workload={"model": "digits_cnn", "data": "digits", "batch_size": 32},
        strategies={
            "Fleet's default": {},
            "0.25 MiB": {"fuse_grad_size_in_MB": 0.25},
            "a bucket a gradient": EACH,
            "K = 4": K4,
            "K = 16": {"localsgd": True, "localsgd_configs": {"k_steps": 16}},
            "gradient merge, k = 4": MERGE4,
        },
        seconds=5.0,
        steps=320,
        warmup_steps=16,
        seeds=10,
        rounds=2,
    ),
    "resnet50": Case(
        workload={"model": "resnet50", "data": "synthetic", "batch_size": 4, "lr": 0.01},
        strategies={
            "Fleet's default": {},
            "8 MiB": {"fuse_grad_size_in_MB": 8.0},
            "a bucket a gradient": EACH,
            "K = 4": K4,
            "gradient merge, k = 4": MERGE4,
        },
        seconds=10.0,
        steps=4,
        warmup_steps=4,
        seeds=100,
    ),
}


@dataclass(frozen=True, slots=True)
class Try(Generic[T]):
    """What was measured, and what other programs computed meanwhile."""

    value: T
    foreign_cores: float

    @property
    def counts(self) -> bool:
        """Whether the machine was quiet."""
        return self.foreign_cores <= FOREIGN_LIMIT


def quietly(measure: Callable[[], T]) -> list[Try[T]]:
    """Measure, again where other programs computed meanwhile; all tries, of which the last may count."""
    tries: list[Try[T]] = []
    while True:
        before = noise.read({})
        value = measure()
        tries.append(Try(value, round(noise.between(before, noise.read({})).foreign_cores, 3)))
        if tries[-1].counts or len(tries) > REPEATS:
            return tries


def phases(result: RunResult) -> dict[str, float]:
    """Means over ranks and steps, by phase; their sum is the step."""
    return {name: getattr(result.summary, name) for name in PHASES}


def predicted(measured: Experiment, case: Case, changes: Mapping[str, Any]) -> Entry:
    """What `sim` says of a strategy by ``measured.toml``: of legs as they will be run, under so many seeds of the stragglers."""
    strategy = DistributedStrategy.from_dict(changes)
    results = [
        simulate(measured.replace(strategy=strategy, run=dataclasses.replace(measured.run, seed=seed)), timeline=False)
        for seed in range(case.seeds)
    ]
    means = [float(step_times(result.steps).mean()) for result in results]
    parts = [phases(result) for result in results]
    return {
        "mean_s": mean(means),
        "phases": {name: mean(part[name] for part in parts) for name in PHASES},
        "bucket_bytes": [bucket.nbytes for bucket in results[0].plan.buckets],
    }


def run_leg(session: Session, case: Case, changes: Mapping[str, Any]) -> Entry:
    """A real leg."""
    strategy = DistributedStrategy.from_dict(changes)
    result = session.run(Leg(strategy=strategy, steps=case.steps, warmup_steps=case.warmup_steps))
    counted = result.steps[result.steps["step"] >= 1]
    of_step = step_times(result.steps).groupby(counted["step"]).mean()
    return {
        "mean_s": float(of_step.mean()),
        "phases": phases(result),
        "bucket_bytes": [bucket.nbytes for bucket in result.plan.buckets],
        "step_us": [round(1e6 * float(time_s)) for time_s in of_step],
    }


def measure(name: str, case: Case) -> Iterator[Entry]:
    """One round: the profile, the predictions, the real runs."""
    experiment = case.experiment(name)
    with tempfile.TemporaryDirectory(prefix="fleetbench-") as folder:
        tries = quietly(lambda: measure_profile(experiment, seconds=case.seconds, stragglers=True))
        taken = tries[-1].value
        measured = Experiment.load(save_profile(taken.experiment, taken.profile, taken.runs, Path(folder)) / "measured.toml")
        found = {strategy: predicted(measured, case, changes) for strategy, changes in case.strategies.items()}
    yield {
        "kind": "prediction",
        "predicted": found,
        "calibration": [strategy for strategy in found if is_calibration(taken.runs.values(), case.strategies[strategy], found[strategy])],
        "legs": {
            leg: {"steps": run.summary.steps, "mean_s": run.summary.step_s["mean"], "phases": phases(run)}
            for leg, run in taken.runs.items()
        },
        "profile": encode(taken.profile),
        "experiment": encode(experiment),
        "counts": tries[-1].counts,
        "foreign_cores": tries[-1].foreign_cores,
        "num_void": len(tries) - tries[-1].counts,
    }
    with Session(experiment) as session:
        for number in range(case.passes):
            order = list(case.strategies)[:: 1 if number % 2 == 0 else -1]
            for one in quietly(lambda order=order: {strategy: run_leg(session, case, case.strategies[strategy]) for strategy in order}):  # type: ignore[misc]  # mypy and defaults of lambdas
                yield {"kind": "pass", "pass": number, "legs": one.value, "counts": one.counts, "foreign_cores": one.foreign_cores}


def is_calibration(runs: Iterable[RunResult], changes: Mapping[str, Any], found: Entry) -> bool:
    """Whether a synchronous leg of the profile had these very buckets: then it is no prediction."""
    strategy = DistributedStrategy.from_dict(changes)
    if strategy.is_local or strategy.gradient_merge:
        return False
    known = [[bucket.nbytes for bucket in run.plan.buckets] for run in runs if not run.experiment.strategy.is_local]
    return found["bucket_bytes"] in known


def tables(entries: Sequence[Entry], *, by_phase: bool) -> None:
    """The tables of README.md: a line a strategy, of all rounds that count."""
    for model in dict.fromkeys(entry["model"] for entry in entries):
        rounds: dict[int, list[Entry]] = {}
        for entry in entries:
            if entry["model"] == model:
                rounds.setdefault(entry["round"], []).append(entry)
        judged = [Judged.of(found) for found in rounds.values()]
        counted = [round_ for round_ in judged if round_.counts]
        voids = sum(not entry["counts"] for entry in entries if entry["model"] == model)
        print(f"\n{model}, 2 trainers: {len(counted)} of {len(judged)} rounds count; void profiles and passes: {voids}\n")
        if counted:
            _table(counted, by_phase=by_phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A round: what was predicted, and the passes that count."""

    prediction: Entry
    passes: list[Entry]

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Judged:
        """From a round's lines."""
        prediction = next(entry for entry in entries if entry["kind"] == "prediction")
        return cls(prediction=prediction, passes=[entry for entry in entries if entry["kind"] == "pass" and entry["counts"]])

    @property
    def counts(self) -> bool:
        """Whether there is a profile from a quiet machine, and something to compare with."""
        return bool(self.prediction["counts"]) and bool(self.passes)

    def measured_s(self, strategy: str) -> list[float]:
        """Mean step of every pass."""
        return [entry["legs"][strategy]["mean_s"] for entry in self.passes]

    def error(self, strategy: str) -> float:
        """Predicted over measured, minus one."""
        return float(self.prediction["predicted"][strategy]["mean_s"] / mean(self.measured_s(strategy)) - 1)

    def noise(self, strategy: str) -> float:
        """A/A: the largest of the passes' means over the smallest, minus one."""
        times = self.measured_s(strategy)
        return max(times) / min(times) - 1


def _table(rounds: Sequence[Judged], *, by_phase: bool) -> None:
    print("| strategy | buckets | served the profile | predicted, ms | measured, ms | error [rounds] | A/A | within 5 % |")
    print("|---|---|---|---|---|---|---|---|")
    first = rounds[0].prediction
    for strategy in first["predicted"]:
        errors = [one.error(strategy) for one in rounds]
        print(
            f"| {strategy} | {len(first['predicted'][strategy]['bucket_bytes'])} | {'yes' if strategy in first['calibration'] else ''} "
            f"| {', '.join(_ms(one.prediction['predicted'][strategy]['mean_s']) for one in rounds)} "
            f"| {', '.join(_ms(mean(one.measured_s(strategy))) for one in rounds)} "
            f"| {mean(errors):+.1%} [{', '.join(f'{error:+.1%}' for error in errors)}] | {max(one.noise(strategy) for one in rounds):.1%} "
            f"| {'yes' if abs(mean(errors)) <= TOLERANCE else 'NO'} |"
        )
    if by_phase:
        _phase_table(rounds)


def _phase_table(rounds: Sequence[Judged]) -> None:
    names = [name.removesuffix("_s") for name in PHASES]
    print(f"\n| strategy, ms predicted / measured | {' | '.join(names)} |\n|{'---|' * (1 + len(names))}")
    for strategy in rounds[0].prediction["predicted"]:
        cells = []
        for name in PHASES:
            simulated = mean(one.prediction["predicted"][strategy]["phases"][name] for one in rounds)
            real = mean(entry["legs"][strategy]["phases"][name] for one in rounds for entry in one.passes)
            cells.append(f"{_ms(simulated)} / {_ms(real)}")
        print(f"| {strategy} | {' | '.join(cells)} |")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(CASES), help="only this one")
    parser.add_argument("--rounds", type=int, default=None, help="profiles, each with runs behind it")
    parser.add_argument("--quick", action="store_true", help="one round of few steps and small images, into a temporary file")
    parser.add_argument("--tables", action="store_true", help="print the tables of what is there, and measure nothing")
    parser.add_argument("--phases", action="store_true", help="with a table by phase")
    parser.add_argument("--out", type=Path, default=None, help="another file for the results, which are appended")
    options = parser.parse_args()
    path = options.out or (Path(tempfile.gettempdir()) / "fleetbench_predict_quick.jsonl" if options.quick else RAW)
    if options.quick and not options.tables:
        path.unlink(missing_ok=True)
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    for name in () if options.tables else options.model or list(CASES):
        case = CASES[name].quick() if options.quick else CASES[name]
        first = 1 + max((entry["round"] for entry in entries if entry["model"] == name), default=-1)
        for number in range(first, first + (options.rounds or case.rounds)):
            taken = {"started": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "machine": machine(), "versions": versions()}
            for entry in measure(name, case):
                entries.append({"model": name, "round": number, **entry, **(taken if entry["kind"] == "prediction" else {})})
                with path.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(entries[-1]) + "\n")
                print(f"# {name}, round {number}: {entry['kind']}, {entry['foreign_cores']:.2f} cores taken by others", flush=True)
    tables(entries, by_phase=options.phases)


if __name__ == "__main__":
    main()
