"""Answer: a strategy for a cluster that one does not have, how much faster it should be, and what that hangs on."""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fleetbench.config import Config, encode, flat
from fleetbench.digests import sealed_json, write_whole
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.profile import profile_of
from fleetbench.store import new_run_id
from fleetbench.strategy import DistributedStrategy
from tuner.simulated.assumptions import assumptions, changed
from tuner.simulated.candidates import (
    FINAL_STEPS,
    OUTSIDE,
    PER_SAMPLES,
    fits,
    ranked,
    samples_and_tokens,
    says,
    shortened,
    step_time,
    with_compute,
)
from tuner.simulated.uncertainty import Spread, spread_of, ways_outside
from tuner.space import FIELDS

SCHEMA = 1
_DEFAULTS = "Fleet's defaults"
SEEDS, SERVED_SEEDS = 8, 3
"""Draws under which the best are simulated again; servers are simulated event by event, a hundred times as long."""
FINALISTS, SERVED_FINALISTS = 6, 3
RERANKED, SERVED_RERANKED = 6, 3
"""Of the best strategies, simulated again under each changed assumption; beside them the best one with each value of any knob."""
RUNNERS_UP = 4
TIE = 0.002
"""Ten simulated steps tell strategies no further apart than this."""
KNOBS: dict[str, tuple[str, ...]] = {
    "local steps": FIELDS["local_steps"],
    "fusion": FIELDS["fusion"],
    "communicators": ("nccl_comm_num", "sync_nccl_allreduce"),
    "hierarchy": FIELDS["hierarchy"],
    "wire": FIELDS["wire"],
    "update by bucket": FIELDS["update_by_bucket"],
    "threads": ("thread_num",),
    "parameter servers' mode": ("a_sync", "a_sync_configs"),
}
"""What a candidate may change of the experiment's strategy, by the fields that go together."""

Progress = Callable[[str, int, int], None]
Times = dict[DistributedStrategy, float]
"""Seconds of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival(Config):
    """Another strategy beside the recommended one."""

    strategy: DistributedStrategy
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob(Config):
    """What one knob is worth."""

    name: str
    worth: float
    """Step time with the knob as in the experiment, all others as recommended, over the recommended strategy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(Config):
    """The answer under one changed assumption."""

    assumption: str
    best: DistributedStrategy
    best_s: float
    """Seconds of a step, as are the next two."""
    recommended_s: float
    default_s: float
    changes_answer: bool
    """Whether keeping the recommended strategy costs more than ``tune.min_gain``; otherwise ``best`` is that one."""

    @property
    def cost(self) -> float:
        """What keeping the recommended strategy costs, as a share of the best one's time."""
        return self.recommended_s / self.best_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRecommendation(Config):
    """What to use, by simulation alone. ``speedup`` is the experiment's own strategy's step time over the recommended one's."""

    schema: int = SCHEMA
    simulated: Literal[True] = True
    experiment: str
    """Digest of the experiment."""
    name: str
    compute: str
    """Where layer times come from."""
    trainers: int
    strategy: DistributedStrategy
    step_s: float
    default_s: float
    samples_per_s: float
    tokens_per_s: float | None
    speedup: float
    low: float
    """Lower end of the two-sided 90 % interval."""
    high: float
    spread: Spread
    """What the interval is made of."""
    outside: tuple[str, ...]
    """In which ways the experiment lies outside of what the simulator was compared with."""
    fits_in_memory: bool | None
    knobs: tuple[Knob, ...]
    runners_up: tuple[Rival, ...]
    cases: tuple[Case, ...]
    seeds: int
    num_trials: int
    num_reranked: int
    """Strategies simulated under each changed assumption."""
    notes: tuple[str, ...]

    @property
    def line(self) -> str:
        """The answer in one line."""
        changed_fields = self.strategy.changes()
        changes = ", ".join(f"{key} = {str(value).lower() if isinstance(value, bool) else value}" for key, value in flat(changed_fields))
        if self.speedup == 1.0:
            return f"SIMULATED, {self.compute}: keep the experiment's own strategy; nothing tried is faster by more than tune.min_gain"
        return f"SIMULATED, {self.compute}: use {changes or _DEFAULTS}: {self.speedup:.2f}x [{self.low:.2f}, {self.high:.2f}]"

    def save(self, folder: Path) -> None:
        """Write ``recommended.toml``, then ``recommendation.json``, each whole or not at all."""
        nothing_ran = "nothing was run: fleetbench tune without --simulate-only measures it"
        self.strategy.save(folder / "recommended.toml", self.line, nothing_ran, f"experiment {self.name} {self.experiment}", *self.notes)
        write_whole(folder / "recommendation.json", sealed_json(encode(self)))


def tune_simulated(
    experiment: Experiment, *, out: Path = Path("runs"), progress: Progress | None = None
) -> tuple[SimulatedRecommendation, Path]:
    """Recommend a strategy by simulation alone, and return it with its folder below ``out``.

    Raises ``ConfigError`` for what cannot be simulated, and where layer times are neither declared nor in a profile.
    """
    experiment = with_compute(experiment, out)
    folder = out / f"{experiment.name}-simulated-{experiment.digest()}-{new_run_id()}"
    try:
        with tempfile.TemporaryDirectory(prefix="fleetbench-") as scratch:
            found = _Answering(experiment, out, Path(scratch), progress or (lambda *_: None)).answer()
        folder.mkdir(parents=True, exist_ok=True)
        experiment.save(folder / "experiment.toml")
        found.save(folder)
    except BaseException:  # a Ctrl-C too leaves no half of it
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return found, folder


@dataclass(slots=True)
class _Answering:
    experiment: Experiment
    out: Path
    scratch: Path
    progress: Progress

    def answer(self) -> SimulatedRecommendation:
        experiment, served = self.experiment, self.experiment.strategy.mode == "ps"
        ranking = ranked(experiment, out=self.out, progress=lambda done, total: self.progress("simulated trials", done, total))
        default, best = experiment.strategy, ranking.strategies[: SERVED_FINALISTS if served else FINALISTS]
        times = self._over_seeds(list(dict.fromkeys([default, *best])))
        step_s = {strategy: statistics.fmean(found) for strategy, found in times.items()}
        retried = list(dict.fromkeys([*times, *ranking.telling(SERVED_RERANKED if served else RERANKED)]))
        assumed, notes = self._under_assumptions(retried)
        chosen = self._choose(default, step_s, list(assumed.values()))
        ratios = [own / other for own, other in zip(times[default], times[chosen], strict=True)]
        outside = ways_outside(experiment)
        speedup, spread = 1.0, Spread(seeds=0.0, model=0.0)
        if chosen != default:
            speedup, spread = statistics.geometric_mean(ratios), spread_of(ratios, outside, self._ends(default, chosen))
        low, high = spread.interval(speedup)
        samples_per_s, tokens_per_s = samples_and_tokens(experiment, step_s[chosen])
        others = [other for other in sorted(step_s, key=lambda strategy: step_s[strategy]) if other != chosen]
        return SimulatedRecommendation(
            experiment=experiment.digest(),
            name=experiment.name,
            compute=says(experiment),
            trainers=experiment.cluster.trainers,
            strategy=chosen,
            step_s=step_s[chosen],
            default_s=step_s[default],
            samples_per_s=samples_per_s,
            tokens_per_s=tokens_per_s,
            speedup=speedup,
            low=low,
            high=high,
            spread=spread,
            outside=outside,
            fits_in_memory=fits(experiment),
            knobs=self._knobs(default, chosen),
            runners_up=tuple(Rival(strategy=other, step_s=step_s[other]) for other in others[:RUNNERS_UP]),
            cases=tuple(self._case(name, found, default, chosen) for name, found in assumed.items()),
            seeds=len(ratios),
            num_trials=ranking.num_trials,
            num_reranked=len(retried),
            notes=(*self._caveats(chosen, low, samples_per_s), *ranking.notes, *notes),
        )

    def _choose(self, default: DistributedStrategy, step_s: Times, assumed: Sequence[Times]) -> DistributedStrategy:
        """Of those near the fastest the one that costs least where an assumption is wrong; the default, where that gains little."""
        least = min(step_s.values())
        tied = [strategy for strategy in step_s if step_s[strategy] <= least * (1 + TIE)]

        def at_worst(strategy: DistributedStrategy) -> tuple[float, int]:
            costs = (found[strategy] / min(found.values()) for found in assumed)
            return round(max(costs, default=1.0) / TIE) * TIE, len(flat(strategy.changes()))

        chosen = min(tied, key=at_worst)
        return chosen if step_s[default] / step_s[chosen] > 1 + self.experiment.tune.min_gain else default

    def _seeds(self) -> list[Experiment]:
        """The experiment under seeds that the ranking has not seen; one where nothing is drawn."""
        experiment = self.experiment
        served = experiment.strategy.mode == "ps"
        length = shortened(experiment, None if served else FINAL_STEPS)
        number = (SERVED_SEEDS if served else SEEDS) if experiment.cluster.stragglers else 1
        first = experiment.run.seed + 1
        return [length.replace(run=dataclasses.replace(length.run, seed=seed)) for seed in range(first, first + number)]

    def _over_seeds(self, strategies: Sequence[DistributedStrategy]) -> dict[DistributedStrategy, list[float]]:
        found: dict[DistributedStrategy, list[float]] = {strategy: [] for strategy in strategies}
        experiments = self._seeds()
        for done, experiment in enumerate(experiments):
            self.progress("the best under other seeds", done, len(experiments))
            step_s = step_time(experiment)
            for strategy in strategies:
                found[strategy].append(step_s(strategy))
        self.progress("the best under other seeds", len(experiments), len(experiments))
        return found

    def _ends(self, default: DistributedStrategy, chosen: DistributedStrategy) -> list[float]:
        """The speed-up at both ends of the estimated compute times; nothing where they are not estimated."""
        profile = profile_of(self.experiment)
        if profile is None or profile.estimated is None:
            return []
        found = []
        for factor in (1 - profile.estimated, 1 + profile.estimated):
            step_s = step_time(shortened(changed(self.experiment, "compute", factor, self.scratch)))
            found.append(step_s(default) / step_s(chosen))
        return found

    def _knobs(self, default: DistributedStrategy, chosen: DistributedStrategy) -> tuple[Knob, ...]:
        """Each knob that the recommended strategy changes, set back alone; over one seed."""
        step_s, found = step_time(shortened(self.experiment)), []
        for name, fields in KNOBS.items():
            if all(getattr(default, field) == getattr(chosen, field) for field in fields):
                continue
            try:
                without = chosen.replace(**{field: getattr(default, field) for field in fields})
                found.append(Knob(name=name, worth=step_s(without) / step_s(chosen)))
            except ConfigError:  # it goes with another knob alone
                continue
        return tuple(sorted(found, key=lambda knob: -knob.worth))

    def _under_assumptions(self, strategies: Sequence[DistributedStrategy]) -> tuple[dict[str, Times], list[str]]:
        """Seconds of a step of each strategy under each changed assumption, and what cannot be changed."""
        assumed, notes = assumptions(self.experiment, self.scratch)
        found = {}
        for done, (name, experiment) in enumerate(assumed.items()):
            self.progress("other assumptions", done, len(assumed))
            step_s = step_time(shortened(experiment))
            found[name] = {strategy: step_s(strategy) for strategy in strategies}
        self.progress("other assumptions", len(assumed), len(assumed))
        return found, notes

    def _case(self, name: str, step_s: Times, default: DistributedStrategy, chosen: DistributedStrategy) -> Case:
        best = min(step_s, key=lambda strategy: step_s[strategy])
        changes = step_s[chosen] / step_s[best] - 1 > self.experiment.tune.min_gain
        return Case(
            assumption=name,
            best=best if changes else chosen,
            best_s=step_s[best],
            recommended_s=step_s[chosen],
            default_s=step_s[default],
            changes_answer=changes,
        )

    def _caveats(self, chosen: DistributedStrategy, low: float, samples_per_s: float) -> list[str]:
        notes = []
        if low < 1:
            notes.append("the interval reaches below 1: whether the strategy gains anything, only a measurement says")
        if chosen.local_steps > 1:
            notes.append(f"what {chosen.local_steps} local steps cost in loss is not simulated: train to the target before relying on them")
        if fits(self.experiment) is False:
            notes.append(f"a trainer needs more memory than {self.experiment.cluster.gpu} has")
        tune, trainers = self.experiment.tune, self.experiment.cluster.trainers
        if tune.price_per_trainer_hour is not None:
            samples = tune.samples or PER_SAMPLES
            hours, day = samples / samples_per_s / 3600, 24 * trainers * tune.price_per_trainer_hour
            notes.append(f"{samples:g} samples take {hours:.3g} h and cost {hours / 24 * day:,.2f}; a day costs {day:,.0f}")
        return [*notes, OUTSIDE]
