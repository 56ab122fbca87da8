"""Answer: the best strategy for a cluster that is not available, its gain, and what the answer depends on."""

import dataclasses
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from fleetbench import units
from fleetbench.config import Config
from fleetbench.cores import on_cores
from fleetbench.digests import sealed_json, write_whole
from fleetbench.experiment import Experiment
from fleetbench.plan.rounds import levels
from fleetbench.profile import profile_of, table_for
from fleetbench.quantities import counted, hours_or_days
from fleetbench.result import parts_of
from fleetbench.store import new_run_id
from fleetbench.strategy import DistributedStrategy
from fleetbench.utilisation import Utilisation, utilisation
from sim.many.pool import Where
from sim.run import simulate
from tuner.budget import seeds_of
from tuner.learning import Learn, by_virtual_trainers
from tuner.notes import Annotated, Note, Remark
from tuner.pytorch import page_of
from tuner.simulated import candidates, sharded
from tuner.simulated.assumptions import assumptions, changed
from tuner.simulated.churn import UnderChurn, by_local_steps, under_churn
from tuner.simulated.uncertainty import CONFIDENCE, Spread, spread_of, ways_outside
from tuner.space import way_of
from tuner.to_target import Updates
from tuner.verify import Progress
from tuner.ways import Ways, over_seeds

SCHEMA = 1
RUNNERS_UP = 4
OWN_DOES_NOT_FIT = "the experiment's own strategy needs more memory than a trainer has"

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival(Config):
    """A simulated strategy that is not recommended."""

    strategy: DistributedStrategy
    step_s: float
    to_target: float | None = None
    """Time to the target with the experiment's own strategy, divided by that with this one; None if unknown."""
    interval: tuple[float, ...] = ()
    """Ends of the 90 % interval of ``to_target``, or else of the speed-up. Only the first runner-up has it, if the
    answer is to keep the experiment's own strategy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(Config):
    """Answer under one changed assumption, with unchanged random draws. The first case changes no assumption."""

    assumption: str
    best: DistributedStrategy
    best_s: float
    """Seconds with the fastest strategy, per step or to the target. The next two fields have the same unit."""
    recommended_s: float
    default_s: float
    changes_answer: bool
    """Whether keeping the recommended strategy costs more than ``tune.min_gain``. If not, ``best`` is the
    recommended strategy."""

    @property
    def cost(self) -> float:
        """Extra time of keeping the recommended strategy, as a share of the fastest strategy's time."""
        return self.recommended_s / self.best_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRecommendation(Annotated):
    """Recommendation by simulation alone.

    ``speedup`` is the step time of the experiment's own strategy divided by that of the recommended one.
    """

    schema: int = SCHEMA
    simulated: Literal[True] = True
    experiment: str
    """Digest of the experiment."""
    name: str
    compute: str
    """Source of the layer times, and the stragglers, in words."""
    trainers: int
    strategy: DistributedStrategy
    step_s: float
    default_s: float
    parts: dict[str, float]
    """Seconds of the parts of the recommended strategy's step, as means over trainers, steps and seeds, by the
    names in ``summary.json``; and ``undelayed_s``: forward and backward of the layer table, without delays."""
    samples_per_s: float
    tokens_per_s: float | None
    per_trainer: Utilisation
    speedup: float
    low: float
    """Lower end of the two-sided 90 % interval of ``speedup``."""
    high: float
    spread: Spread
    """Parts of the interval; if the answer is to keep the experiment's own strategy, of the first runner-up's
    interval."""
    outside: tuple[str, ...]
    """Ways in which the experiment lies outside of the measurements that the simulator was compared with."""
    target_loss: float | None = None
    """Target loss if the steps to it are known; strategies are then compared by their time to it."""
    to_target: float | None = None
    """Time to the target with the own strategy, divided by that with the recommended one. None if both train
    alike, or if it is unknown."""
    to_target_interval: tuple[float, ...] = ()
    """Ends of the 90 % interval of ``to_target``; empty if both strategies arrived with fewer than two seeds."""
    trained: int = 0
    """Number of seeds with which virtual trainers trained."""
    arrived: int = 0
    """Number of these seeds with which the recommended and the experiment's own strategy both arrive."""
    fits_in_memory: bool | None
    memory: dict[str, int] = field(default_factory=dict)
    """Memory of a trainer under the recommended strategy, in bytes by content; empty if no profile has it."""
    runners_up: tuple[Rival, ...]
    cases: tuple[Case, ...]
    churn: UnderChurn | None = None
    """Choice under ``cluster.churn``, if the experiment has it; all other fields are of an undisturbed cluster."""
    seeds: int
    num_trials: int
    caveat: str | None = None
    """Caveats for the line, if any: the own strategy does not fit, no way is known to reach the target, or another
    learning rate alone makes the default faster."""

    @property
    def keeps(self) -> bool:
        """Whether the answer is to keep the experiment's own strategy."""
        return self.speedup == 1.0 and self.to_target is None

    @property
    def line(self) -> str:
        """The answer in one line."""
        return self._answer if self.caveat is None else f"{self._answer}; {self.caveat}"

    @property
    def _answer(self) -> str:
        if self.keeps:
            faster = "faster" if self.target_loss is None else f"sooner at loss {self.target_loss:g}"
            keep = f"SIMULATED, {self.compute}: keep the experiment's own strategy; nothing tried is {faster} by more than tune.min_gain"
            rivals = [best for best in self.runners_up[:1] if best.interval]
            ratios = [(best.to_target or self.default_s / best.step_s, *best.interval) for best in rivals]
            return keep + "".join(f": the best other {ratio:.3f}x [{low:.2f}, {high:.2f}]" for ratio, low, high in ratios)
        return f"SIMULATED, {self.compute}: use {units.changes(self.strategy.changes())}: {self._gain}"

    @property
    def _gain(self) -> str:
        step = f"{self.speedup:.2f}x [{self.low:.2f}, {self.high:.2f}]"
        if self.to_target is None:
            return step if self.target_loss is None else f"{step} to loss {self.target_loss:g} and a step"
        ends = f" [{', '.join(f'{end:.2f}' for end in self.to_target_interval)}]" if self.to_target_interval else ""
        missed = "" if self.arrived == self.trained else f", {self.arrived} of which arrive with both"
        trained = f"{counted(self.trained, 'seed')} of virtual trainers{missed}"
        least = "" if self.arrived else "at least "
        return f"{least}{self.to_target:.2f}x{ends} to loss {self.target_loss:g} ({step} a step; {trained})"

    def save(self, folder: Path) -> None:
        """Write ``recommended.toml``, then ``recommendation.json``, each whole or not at all."""
        nothing_ran = "nothing was run: fleetbench tune without --simulate-only measures it"
        self.strategy.save(folder / "recommended.toml", self.line, nothing_ran, f"experiment {self.name} {self.experiment}", *self.notes)
        if self.churn is not None:
            self.churn.choices[0].strategy.save(folder / "recommended_churn.toml", self.churn.line, nothing_ran, *self.churn.told)
        write_whole(folder / "recommendation.json", sealed_json(self.plain()))


def tune_simulated(
    experiment: Experiment,
    *,
    out: Path = Path("runs"),
    progress: Progress | None = None,
    learn: Learn = by_virtual_trainers,
    on: Where = "local",
) -> tuple[SimulatedRecommendation, Path]:
    """Recommend a strategy by simulation alone, and return it with its folder below ``out``.

    With a target, virtual trainers (``learn``) determine the steps that ways of training take to it, as in
    ``tuner.tune``. ``on``: see ``tuner.search``. Raises ``ConfigError`` for what cannot be simulated, and if layer times are unknown.
    """
    experiment = candidates.with_compute(experiment, out)
    folder = out / f"{experiment.name}-simulated-{experiment.digest()}-{new_run_id()}"
    with tempfile.TemporaryDirectory(prefix="fleetbench-") as scratch:
        found = _Answering(experiment, out, Path(scratch), progress or (lambda *_: None), learn, on).answer()
    folder.mkdir(parents=True, exist_ok=True)
    experiment.save(folder / "experiment.toml")
    found.save(folder)
    if found.strategy != experiment.strategy:
        write_whole(folder / "recommended.md", page_of(found.strategy, experiment.strategy, found.line))
    return found, folder


@dataclass(slots=True)
class _Answering:
    experiment: Experiment
    out: Path
    scratch: Path
    progress: Progress
    learn: Learn
    on: Where
    ways: Ways = field(default_factory=Ways)

    def answer(self) -> SimulatedRecommendation:
        experiment, default = self.experiment, self.experiment.strategy
        learning = partial(self.progress, "virtual trainers")
        ranking = candidates.ranked(
            experiment,
            out=self.out,
            progress=lambda done, total: self.progress(f"search {total} strategies", done, total),
            learn=self.learn,
            learning=learning,
            on=self.on,
        )
        best, measure = candidates.finalists(default, ranking.with_ways(experiment.tune.finalists)), self._over_seeds(experiment)
        seeds = seeds_of(experiment)
        limit_s = len(seeds) * experiment.tune.search_seconds
        self.ways = over_seeds(experiment, ranking.ways, best, self.learn, self.out, seeds, learning, limit_s=limit_s)
        best = [strategy for strategy in best if self.ways.arrives(strategy)]
        times = {strategy: measure(strategy) for strategy in self._told("try the best {} with other seeds", best)}
        step_s = {strategy: statistics.fmean(found) for strategy, found in times.items()}
        chosen = candidates.choose(experiment, step_s)
        assumed, notes = assumptions(experiment, self.scratch)
        told = self._told("assume {} other conditions", list(assumed))
        cases = [self._case("as declared", step_s, chosen)]
        cases += [self._case(name, self._assumed(assumed[name], best, chosen), chosen) for name in told]
        memory = sharded.memory_of(experiment.replace(strategy=chosen)) or {}
        own_s, chosen_s = (step_s[strategy] / self.ways.weight(strategy) for strategy in (default, chosen))
        one, trainers = utilisation(experiment, chosen_s, sum(memory.values()) or None), experiment.cluster.trainers
        gains = self._gains(chosen, times)
        lowest = min(gains.get("to_target_interval", ())[:1], default=gains["low"])
        does_not_fit = OWN_DOES_NOT_FIT if sharded.fits(experiment) is False else None
        return SimulatedRecommendation(
            experiment=experiment.digest(),
            name=experiment.name,
            compute=candidates.says(experiment),
            trainers=trainers,
            strategy=chosen,
            step_s=chosen_s,
            default_s=own_s,
            parts=self._parts(chosen),
            samples_per_s=trainers * one.samples_per_s,
            tokens_per_s=None if one.tokens_per_s is None else trainers * one.tokens_per_s,
            per_trainer=one,
            outside=ways_outside(experiment),
            target_loss=experiment.workload.target_loss if self.ways.updates else None,
            trained=len(self.ways.updates.get(self.ways.own, ())),
            fits_in_memory=sharded.fits(experiment.replace(strategy=chosen)),
            memory=memory,
            cases=tuple(cases),
            churn=self._under_churn(chosen, ranking),
            num_trials=ranking.num_trials,
            caveat="; ".join(filter(None, [does_not_fit, self.ways.said_beside(chosen)])) or None,
            told=(*self._caveats(chosen, lowest, trainers * one.samples_per_s), *ranking.notes, *self.ways.notes, *notes),
            **gains,
        )

    def _gains(self, chosen: DistributedStrategy, times: Mapping[DistributedStrategy, Sequence[float]]) -> dict[str, Any]:
        """Return the gains as fields of the recommendation, with their intervals and the runners-up.

        ``times``: seconds with each seed, per step or to the target. If the answer is to keep the experiment's own
        strategy, the interval is that of the first runner-up.
        """
        default, ways = self.experiment.strategy, self.ways
        step_s = {strategy: statistics.fmean(found) for strategy, found in times.items()}
        others = [other for other in sorted(step_s, key=lambda strategy: step_s[strategy]) if other != chosen]
        keeps, compared = chosen == default, next(iter(others), default) if chosen == default else chosen
        ratios = [own / other for own, other in zip(times[default], times[compared], strict=True)]
        gain, updates = statistics.geometric_mean(ratios), ways.ratios(compared)
        outside, is_compared = ways_outside(self.experiment), compared != default
        spread = spread_of(ratios, outside, self._ends(default, compared)) if is_compared else Spread(seeds=0.0, model=0.0)
        speedup = 1.0 if keeps else gain * ways.weight(chosen) / ways.weight(default)
        low, high = (1.0, 1.0) if keeps else spread.interval(speedup)
        spread, interval = _with_updates(spread, gain, updates)
        to_target = {"to_target": gain, "to_target_interval": interval} if not keeps and updates is not None else {}
        rivals = [
            Rival(
                strategy=other,
                step_s=step_s[other] / ways.weight(other),
                to_target=step_s[default] / step_s[other] if ways.updates else None,
                interval=interval if other == compared else (),
            )
            for other in others[:RUNNERS_UP]
        ]
        return to_target | {
            "speedup": speedup,
            "low": low,
            "high": high,
            "spread": spread,
            "seeds": len(ratios),
            "arrived": 0 if updates is None else updates.num_known,
            "runners_up": tuple(rivals),
        }

    def _over_seeds(self, experiment: Experiment) -> Callable[[DistributedStrategy], list[float]]:
        """Return a function from a strategy to its seconds with each seed, per step or to the target."""
        measures = candidates.over_seeds(experiment)
        return lambda strategy: [step_s(strategy) * self.ways.weight(strategy) for step_s in measures]

    def _under_churn(self, chosen: DistributedStrategy, ranking: candidates.Ranking) -> UnderChurn | None:
        if self.experiment.cluster.churn is None:
            return None

        def samples_to_target(strategy: DistributedStrategy) -> float | None:
            """Return the multiple of the own strategy's, from several seeds or, if it ran with one, from the ranking's."""
            way = way_of(strategy)
            ways = self.ways if way in self.ways.updates else ranking.ways
            arrives = any(ways.updates.get(way, ())) and ways.arrives(strategy)
            return ways.weight(strategy) / ways.default_steps if arrives else None

        strategies = by_local_steps(self.experiment, [chosen, *ranking.step_s], others=not self.ways.updates)
        return under_churn(self.experiment, strategies, samples_to_target)

    def _told(self, what: str, items: Sequence[Item]) -> Iterator[Item]:
        """Yield the items, and report progress before each."""
        for done, item in enumerate(items):
            self.progress(what.format(len(items)), done, len(items))
            yield item

    def _parts(self, chosen: DistributedStrategy) -> dict[str, float]:
        workload, experiments = self.experiment.workload, candidates.seeded(self.experiment)
        shares = levels(chosen.replace(lr_scale=1.0), workload.steps, workload.steps_per_epoch)
        found = [
            (parts_of(simulate(experiment.replace(strategy=one), timeline=False, table=True)), share / len(experiments))
            for experiment in experiments
            for one, share in shares
        ]
        own = experiments[0].replace(strategy=chosen)
        table = on_cores(own, table_for(own))
        means = {name: sum(share * parts[name] for parts, share in found) for name in found[0][0]}
        return {"undelayed_s": (table.forward_ns + table.backward_ns) / 1e9, **means}

    def _ends(self, default: DistributedStrategy, chosen: DistributedStrategy) -> list[float]:
        """Return the speed-up at both ends of the estimated compute times; empty if compute is not estimated."""
        profile = profile_of(self.experiment)
        if profile is None or profile.estimated is None:
            return []
        found = []
        for factor in (1 - profile.estimated, 1 + profile.estimated):
            measure = self._over_seeds(changed(self.experiment, "compute", factor, self.scratch))
            found.append(statistics.fmean(measure(default)) / statistics.fmean(measure(chosen)))
        return found

    def _assumed(self, experiment: Experiment, best: Sequence[DistributedStrategy], chosen: DistributedStrategy) -> candidates.Times:
        """Return the times of the own strategy, the recommended one, and the fastest of short trials of the ``best``.

        The last is left out if it is not faster than the recommended one by more than ``TIE``.
        """
        trial = candidates.step_time(candidates.seeded(experiment, trial=True)[0])
        trial_s = {strategy: trial(strategy) * self.ways.weight(strategy) for strategy in best}
        fastest = min(sharded.fitting(self.experiment, trial_s), key=lambda strategy: trial_s[strategy])
        again, asked = self._over_seeds(experiment), [self.experiment.strategy, chosen]
        asked += [fastest] if trial_s[chosen] / trial_s[fastest] > 1 + candidates.TIE else []
        return {strategy: statistics.fmean(again(strategy)) for strategy in dict.fromkeys(asked)}

    def _case(self, name: str, step_s: candidates.Times, chosen: DistributedStrategy) -> Case:
        best = min(sharded.fitting(self.experiment, step_s), key=lambda strategy: step_s[strategy])
        changes = step_s[chosen] / step_s[best] - 1 > self.experiment.tune.min_gain
        return Case(
            assumption=name,
            best=best if changes else chosen,
            best_s=step_s[best],
            recommended_s=step_s[chosen],
            default_s=step_s[self.experiment.strategy],
            changes_answer=changes,
        )

    def _caveats(self, chosen: DistributedStrategy, low: float, samples_per_s: float) -> list[Note]:
        profile, notes, k = profile_of(self.experiment), list[str](), chosen.local_steps
        if profile is not None:
            notes += filter(None, (profile.busy, profile.short_of(self.experiment)))
        if low < 1:
            notes.append("the interval reaches below 1: whether the strategy gains anything, only a measurement says")
        if k > 1 and not self.ways.updates:
            notes.append(f"what {k} local steps cost in loss is not simulated: train to the target before relying on them")
        tune, trainers = self.experiment.tune, self.experiment.cluster.trainers
        samples, price = tune.samples or candidates.PER_SAMPLES, tune.price_per_trainer_hour
        hours, hourly = samples / samples_per_s / 3600, trainers * (price or 0.0)
        costs = f" and cost {hours * hourly:,.2f}; a day costs {24 * hourly:,.0f}" if price is not None else ""
        if costs or tune.samples is not None:
            notes.append(f"{samples:g} samples take {hours_or_days(hours)}{costs}")
        return [*(Remark(text=text) for text in notes), *candidates.caveats(self.experiment)]


def _with_updates(spread: Spread, gain: float, updates: Updates | None) -> tuple[Spread, tuple[float, ...]]:
    """Return the spread with that of the steps to the target added, and the interval of ``gain``.

    The interval is empty if the steps to the target differ and too few seeds arrived.
    """
    if updates is not None:
        low, high = (updates.half((1 - CONFIDENCE) / 2, side) for side in (-1, 1))
        if len(updates.ratios) < 2 or math.isinf(low + high):
            return spread, ()
        spread = dataclasses.replace(spread, updates_low=low, updates_high=high)
    return spread, spread.interval(gain)
