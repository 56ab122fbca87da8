"""Verify: real runs choose a finalist, price its local steps, and measure its gain.

Three rounds: every arm twice, forward then backward (A B C C B A), which ranks them, and as many more arms as there
are finalists, each named by what the legs before it say of the simulator's errors (``tuner.bias``); where the workload has a
target, runs to it from the initial parameters, which may reject an arm; then fresh pairs of the default and the fastest arm in
alternating order, until the verdict is known. Where that arm is rejected, fails or gains nothing, the next that promises to be faster
than the default takes its place. Only the pairs speak in the verdict: the runs that chose a winner flatter it.

Time to the target is updates to the target times seconds an update. Updates depend on the way of training alone, and on the seed: their
runs are shared by all arms that train alike, and each finalist's are paired with the default's of the same seeds (``tuner.to_target``).

However many finalists are compared, in a tuning and in those that go on from it, the chance of a USE without the gain is that of one: the
first has ``FIRST_SHARE`` of it, the next that share of what is left. One whose legs fail leaves what its looks had not spent.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.quantities import counted
from fleetbench.result import RunResult, step_s_of
from fleetbench.strategy import DistributedStrategy
from fleetbench.target import median_arrival
from real.processes.diagnosis import LegFailed, LegLost
from real.processes.roles import SEED
from tuner.bias import named
from tuner.earlier import Held
from tuner.real_runs import DEFAULT, ROUNDS, BudgetSpent, RealRuns, budget_for, budget_of, leg_steps_of, seeds_of
from tuner.recommendation import Arm, Pair, Recommendation, TargetCheck
from tuner.sequential import ERROR, FIRST_LOOK, LEAST_PAIRS, Judgement, gone, judge, looks, outlook
from tuner.space import differs_in, learns_as, name_of, parameters_of
from tuner.to_target import FEWEST_SEEDS, SPREAD, Penalty, Updates, arrival_of, too_few

FIRST_SHARE = 0.85
"""Of the error that is left, what a finalist takes."""
_KEPT_LEGS = 20
"""For which a budget must have room where another arm is to run: four of that, and eight pairs."""
Progress = Callable[[str, int, int], None]


def verify(
    experiment: Experiment,
    arms: Sequence[Arm],
    legs: RealRuns,
    progress: Progress | None = None,
    *,
    others: Mapping[DistributedStrategy, float] | None = None,
    prepare: Callable[[Arm], Arm] = lambda arm: arm,
    held: Held | None = None,
) -> Recommendation:
    """Run the arms, the first of which is the default, and some of the ``others``; see the module. Raises what the runner raises.

    ``others``: simulated time over the default's, of strategies that may become arms, and of those that are: to the target where virtual
    trainers were asked, else of a step. ``prepare`` completes what becomes one. ``held``: of an earlier tuning, whose legs, runs to the
    target and pairs are not run again. The recommendation knows nothing of the search yet.
    """
    named = {arm.name: arm for arm in arms}
    tell, seeds, left = progress or (lambda *_: None), seeds_of(experiment), ERROR if held is None else held.error_left
    return _Verifier(experiment, named, legs, tell, others or {}, prepare, held, seeds, left).run()


@dataclass(slots=True)
class _Verifier:
    experiment: Experiment
    arms: dict[str, Arm]
    legs: RealRuns
    progress: Progress
    others: Mapping[DistributedStrategy, float]
    prepare: Callable[[Arm], Arm]
    held: Held | None
    seeds: range
    """Of runs to the target: as many as may be."""
    left: float
    """Chance of a USE without the gain that finalists to come may take."""
    ratios: dict[str, float] = field(default_factory=dict)
    """Of the legs that ranked an arm: its mean time over the default's in the same round."""
    notes: list[str] = field(default_factory=list)
    finalist: str | None = None
    """The arm that is compared with the default."""
    pairs: list[Pair] = field(default_factory=list)
    """Of the finalist."""
    error: float = 0.0
    """Chance that it may be used without the gain."""
    ended: tuple[int, ...] = ()
    """After how many of its pairs budgets ended."""
    judged: Judgement | None = None
    open: tuple[str, list[Pair], float, tuple[int, ...], Judgement | None] | None = None
    """The first finalist that stayed undecided, with its pairs, error, ends and judgement, while others are compared."""
    undecided: bool = False
    """Measuring ended before a verdict."""
    ways: dict[tuple[object, ...], TargetCheck] = field(default_factory=dict)
    """Runs to the target of each way of training; ``from_arm`` names the arm that they were of."""
    in_vain: set[tuple[object, ...]] = field(default_factory=set)
    """Ways that real runs have ruled out."""

    def run(self) -> Recommendation:
        try:
            self._choose()
            self._check_target(DEFAULT)
            self._run_rates()
            reason = self._compare()
        except BudgetSpent as spent:
            self.undecided, num_void = True, self.legs.num_void
            busy = f"; {counted(num_void, 'real run')} did not count, because the machine was busy" if num_void else ""
            reason = f"{spent}" or f"the budget ({budget_of(self.experiment)[1]}) ended before the comparison did{busy}"
            self.notes.append(reason)
            if self.judged is None:
                self._judge(final=True)
        return self._recommend(reason)

    def _compare(self) -> str:
        """Compare finalists with the default until one is faster, or may be; why none is."""
        compared, ruled_out = list[str](), list[str]()
        while ranked := self._ranked(compared):
            arm = ranked[0]
            if compared and self._expected(arm) >= 1:
                break
            near = (1 + self.experiment.tune.min_gain) * self._expected(arm)
            if not compared and (alike := [other.name for other in ranked[1:] if self._expected(other) < near]):
                self.notes.append(f"chosen before {', '.join(alike)} by less than tune.min_gain, which may be chance: {arm.name}")
            compared.append(arm.name)
            may_follow = self._asked and len({self._way(name)[:-1] for name in compared}) <= self.experiment.tune.finalists
            if reaches := self._reaches_target(arm.name):
                self._measure_pairs(self.arms[arm.name])
            elif len(compared) <= self.experiment.tune.finalists and (k := self._between()) is not None:
                self._rank([DEFAULT, k.name], f"real runs of {k.name}")
            rejected, verdict = self.arms[arm.name].rejected, None if self.judged is None else self.judged.verdict
            if rejected is None and verdict in (None, "USE"):
                return ""
            if rejected is None and verdict == "UNDECIDED":  # others of its way would be, too; another way may be a sure gain
                self.open = self.open or (arm.name, self.pairs, self.error, self.ended, self.judged)
                compared += [name for name in self.arms if self._way(name) == self._way(arm.name)]
            else:
                ruled_out.append(f"{arm.name} {rejected or self._measured()}")
                self._rule_out(arm.name, is_slow=not reaches or rejected is None, is_followed=may_follow)
        if self.open is not None:
            self.finalist, self.pairs, self.error, self.ended, self.judged = self.open
            self.notes += [f"{why}: not to be used either" for why in ruled_out]
            return ""
        default, target = self.arms[DEFAULT].target, self.experiment.workload.target_loss
        if default is not None and ruled_out and not any(arm.target is not None and arm.target.reached for arm in self.arms.values()):
            ended = "" if default.final_loss is None else f"; the default ended at {default.final_loss:.3g}"
            return (
                f"no strategy that was tried reached loss {target:g} in {default.steps} steps{ended}: raise workload.steps, or the target"
            )
        found = "what is faster was rejected" if self.judged is None else f"no gain above {100 * self.experiment.tune.min_gain:g} %"
        failed = "; ".join(f"{arm.name} {arm.rejected}" for arm in self.arms.values() if arm.rejected)
        none = f"no other strategy ran: {failed or 'the search found none (its notes say what was not searched)'}"
        return f"{found}: {'; '.join(ruled_out)}" if ruled_out else none

    def _rule_out(self, name: str, *, is_slow: bool, is_followed: bool) -> None:
        """Let another way take the arm's place, if virtual trainers know one; not its own, if that is slow and not the default's."""
        if is_slow and self._way(name) != self._way(DEFAULT):
            self.in_vain.add(self._way(name))
        if is_followed and (arm := self._following()) is not None:
            self._rank([DEFAULT, arm.name], f"real runs of {arm.name}")

    def _ranked(self, compared: Sequence[str]) -> list[Arm]:
        """The arms that are still to be compared with the default, the most promising first of those that may be used."""
        left = [arm for arm in self.arms.values() if arm.name not in (DEFAULT, *compared) and arm.rejected is None]
        return sorted(left, key=lambda arm: (self._expected(arm) >= 1, not self._may_prove(arm.name), self._expected(arm)))

    def _expected(self, arm: Arm) -> float:
        """Its time over the default's: of a step as measured, times updates to the target by virtual trainers, or by runs at other K."""
        return self.ratios[arm.name] * (self._virtual(arm) if self._asked else self._known(arm))

    @property
    def _asked(self) -> bool:
        """Whether virtual trainers have said what ways of training are worth."""
        return self.arms[DEFAULT].virtual_updates is not None

    def _virtual(self, arm: Arm) -> float:
        """Updates to the target over the default's, by virtual trainers; 1 where they say nothing."""
        default = self.arms[DEFAULT].virtual_updates
        return 1.0 if default is None or arm.virtual_updates is None else arm.virtual_updates / default

    def _known(self, arm: Arm) -> float:
        """Updates over the default's by runs to the target: of the default at the arm's learning rate, times those of the arm's K."""
        default, strategy, penalty = self.arms[DEFAULT].strategy, arm.strategy, self._penalty()
        ways = (learns_as(default.replace(lr_scale=scale)) for scale in (strategy.lr_scale, default.lr_scale))
        taken = [check.updates[0] or check.steps or 1 for check in map(self.ways.get, ways) if check is not None]
        known = taken[0] / taken[1] if len(taken) == 2 else 1.0
        is_plain = penalty is not None and self._is_plain(strategy.replace(lr_scale=default.lr_scale))
        return known * (penalty.ratio(strategy.local_steps) if penalty is not None and is_plain else 1.0)

    def _penalty(self) -> Penalty | None:
        """What runs to the target with plain local steps say of those at another K, beside a synchronous default."""
        if self.arms[DEFAULT].strategy.is_local:
            return None
        ran = [arm for arm in self.arms.values() if arm.strategy.is_local and self._is_plain(arm.strategy)]
        found = {arm.strategy.local_steps: updates for arm in ran if (updates := self._updates(arm.name)) is not None}
        return Penalty.of({k: [math.exp(-ratio) for ratio in updates.ratios] for k, updates in found.items()})

    def _between(self) -> Arm | None:
        """An arm with a K that has none, where runs at other K say that it is there before the default and all arms that are left."""
        penalty = self._penalty()
        if penalty is None or self._asked or not self.legs.affords(_KEPT_LEGS, num_targets=2 * len(self.seeds)):
            return None
        known = {arm.strategy.local_steps for arm in self.arms.values()}
        prices = {
            strategy: ratio * penalty.ratio(strategy.local_steps)
            for strategy, ratio in self.others.items()
            if self._is_plain(strategy) and strategy.local_steps not in known
        }
        if not prices:
            return None
        self.notes.append(penalty.says(sorted({strategy.local_steps for strategy in prices})))
        best = min(prices, key=lambda strategy: prices[strategy])
        if prices[best] >= min([1.0, *(self._expected(arm) for arm in self._ranked(()))]):
            return None
        return self._added(best)

    def _is_plain(self, strategy: DistributedStrategy) -> bool:
        """Synchronous, or fixed local steps that are averaged; in all else that is learnt as the default's."""
        default = self.arms[DEFAULT].strategy
        configs = dataclasses.replace(default.localsgd_configs, k_steps=strategy.localsgd_configs.k_steps)
        return learns_as(strategy) in (learns_as(default), learns_as(default.replace(localsgd=True, localsgd_configs=configs)))

    def _added(self, strategy: DistributedStrategy) -> Arm:
        """A strategy of the search as an arm."""
        number = sum(name.startswith("candidate") for name in self.arms) + 1
        arm = Arm(name=f"candidate {number}", strategy=strategy, simulated_s=self.others[strategy] * self.arms[DEFAULT].simulated_s)
        self.arms[arm.name] = arm = self.prepare(arm)
        return arm

    def _choose(self) -> None:
        """Rank the arms; then others, as long as one promises a gain by what the simulator has erred by so far."""
        self._rank([*self.arms], "real runs of every arm")
        for _ in range(self.experiment.tune.finalists):
            if (arm := self._following()) is None:
                break
            self._rank([DEFAULT, arm.name], f"real runs of {arm.name}")
        if (erred := self._erred()) and self.others:
            self.notes.append(f"real over simulated time of a step, relative to the default's: {erred}")

    def _following(self) -> Arm | None:
        """The strategy with the largest expected gain, as a new arm; of ways that real runs have ruled out, none."""
        if not self.legs.affords(_KEPT_LEGS, num_targets=2):
            return None
        default, target = self.arms[DEFAULT].strategy, self.experiment.workload.target_loss
        in_vain = {one for one in self.others if self.in_vain and learns_as(one) in self.in_vain}
        ran = {arm.strategy: arm for arm in self.arms.values() if arm.name != DEFAULT and arm.strategy in self.others}
        measured = {one: math.log(self.ratios[arm.name] * self._virtual(arm)) for one, arm in ran.items() if arm.name in self.ratios}
        simulated = {one: math.log(ratio) for one, ratio in self.others.items() if one in measured or not (one in in_vain or one in ran)}
        lost = in_vain | {one for one, arm in ran.items() if arm.rejected is not None}
        same = learns_as if target is not None and not self._asked else lambda _: None
        strategy = named(default, measured, simulated, same, lost)
        return None if strategy is None else self._added(strategy)

    def _erred(self) -> str:
        """By how much, for each family that ran."""
        default, errors = self.arms[DEFAULT], dict[str, list[float]]()
        for name, ratio in self.ratios.items():
            arm = self.arms[name]
            if name != DEFAULT:
                error = math.log(ratio * default.simulated_s / arm.simulated_s)
                errors.setdefault(differs_in(arm.strategy, default.strategy), []).append(error)
        return ", ".join(f"{family} {100 * math.expm1(statistics.fmean(found)):+.0f} %" for family, found in errors.items())

    def _rank(self, names: Sequence[str], stage: str) -> None:
        """Every arm twice, in an order in which a drift of the machine favours none; but for those that an earlier tuning has ranked.

        What has the legs of another arm, as at another learning rate, has its times.
        """
        names = [name for name in names if not self._recall(name)]
        first = {arm.timed: name for name, arm in reversed(self.arms.items())}
        twins = {name: whose for name in names if (whose := first[self.arms[name].timed]) != name}
        own = [name for name in names if name != DEFAULT and name not in twins]
        order = [DEFAULT, *own, *reversed(own), DEFAULT] if own or DEFAULT in names else []
        took: dict[str, list[float]] = {}
        for done, name in enumerate(order):
            self.progress(stage, done, len(order))
            if self.arms[name].rejected is not None:
                continue
            with self._rejecting(name):
                window = ROUNDS * done // len(order)  # of each round, so that arms share draws, and two are seen
                result = self.legs.run(name, self.arms[name].timed, steps=leg_steps_of(self.experiment), window=window)
                self.legs.refuse_small_budget(len(own))
                arm = self.arms[name]
                peaks = [*result.peak_bytes, *([] if arm.peak_bytes is None else [arm.peak_bytes])]  # of all ranks and legs
                took.setdefault(name, []).append(step_s_of(result))
                self._update(name, measured_s=(*arm.measured_s, took[name][-1]), peak_bytes=max(peaks, default=None))
        self.progress(stage, len(order), len(order))
        for name, times in took.items():
            if self.arms[name].rejected is None:
                self.ratios[name] = statistics.fmean(times) / statistics.fmean(took[DEFAULT])
        for name, whose in twins.items():
            arm, failed = self.arms[whose], None if whose in self.ratios else self.arms[whose].rejected
            self._update(name, measured_s=arm.measured_s, peak_bytes=arm.peak_bytes, rejected=failed)
            self.ratios |= {name: self.ratios[whose]} if whose in self.ratios else {}

    def _recall(self, name: str) -> bool:
        """Take what an earlier tuning has of the arm; whether it has."""
        earlier = None if self.held is None else self.held.arm(self.arms[name])
        if self.held is None or earlier is None or earlier.ratio is None:
            return False
        if name not in self.ratios:
            self.ratios[name] = earlier.ratio
            self._update(name, measured_s=earlier.measured_s, peak_bytes=earlier.peak_bytes)
            self.legs.runs[name], self.legs.void[name] = [*earlier.measured_runs], [*earlier.void_runs]
            self.held.copy_runs(earlier, self.legs.folder)
            if earlier.target is not None and earlier.target.updates:
                self.ways.setdefault(self._way(name), dataclasses.replace(earlier.target, from_arm=name))
        return True

    @contextmanager
    def _rejecting(self, name: str) -> Iterator[None]:
        """Reject an arm whose leg fails; without the default nothing can be compared."""
        try:
            yield
        except LegFailed as failure:
            if name == DEFAULT:
                raise
            self._update(name, rejected=_says(failure))

    def _reaches_target(self, name: str) -> bool:
        """Whether the arm's run to the target lets it be recommended; otherwise it is rejected."""
        with self._rejecting(name):
            self._check_target(name)
            if (rejection := self._rejection(name)) is not None:
                self._update(name, rejected=rejection)
        return self.arms[name].rejected is None

    def _check_target(self, name: str) -> None:
        """Run to the target, and, where the arm trains otherwise than the default, with several seeds."""
        if (target := self.experiment.workload.target_loss) is None:
            return
        way = self._way(name)
        is_new = way not in self.ways
        self._run_to_target(name, 0)
        if way != self._way(DEFAULT):
            self._run_other_seeds(name)
        for shown in (DEFAULT, name):
            self._show_target(shown)
        if not is_new and (whose := self.ways[way].from_arm) not in (name, DEFAULT):
            self.notes.append(f"{name} trains step for step like {whose}, whose runs to the target stand for it")
        if name == DEFAULT and not self.ways[way].reached:
            missed = f"the default does not reach the target loss {target:g} in {self.ways[way].steps} steps"
            self.notes.append(f"{missed}: only a strategy that does can be recommended")

    def _run_rates(self) -> None:
        """A script's default at every other learning rate to the target, once: a rate moves no clock, and ranks all that has it."""
        default = self.arms[DEFAULT]
        rated = [arm.name for arm in self.arms.values() if arm.strategy != default.strategy and arm.timed == default.timed]
        for name in rated if not self._asked else ():
            if not self.legs.affords(2 * FIRST_LOOK, num_targets=1):
                self.notes.append(f"the budget has no room for a run of {name} to the target")
                return
            with self._rejecting(name):
                self._run_to_target(name, 0)
                self._show_target(name)

    def _run_other_seeds(self, name: str) -> None:
        """The default and the arm to the target with every further seed, as far as the budget has room, and as long as the arm may pass.

        None where there are enough already: an earlier tuning has judged them, and more would be another look.
        """
        way, base, late = self._way(name), self._way(DEFAULT), math.log(self.ratios[name])
        for number in range(1, len(self.seeds)) if self._missing(name) else ():
            missed = self.ways[way].missed_beside(self.ways[base], self.experiment.workload.target_loss)
            if missed or len(self.seeds) == 1:
                return
            if (known := self._updates(name)) is not None and known.mean + known.half(ERROR, 1) < late:
                return
            if not self.legs.affords(2 * FIRST_LOOK, num_targets=2):
                self.notes.append(f"the budget has no room for more than {counted(number, 'seed')} of {name}'s runs to the target")
                return
            try:
                self._run_to_target(DEFAULT, number)
            except LegFailed as failure:
                self.notes.append(f"the default, with seed {self.seeds[number]}, {_says(failure)}: no further seed was run")
                return
            if len(self.seeds) > 1:
                self._run_to_target(name, number)

    def _run_to_target(self, name: str, number: int) -> None:
        """The arm's run with the n-th seed, if none of its way has it."""
        way, steps = self._way(name), self.experiment.workload.steps
        check = self.ways.get(way, TargetCheck(reached=False, from_arm=name))
        if number < len(check.updates):
            return
        seed = self.seeds[number]
        stage = f"target of {name}" + (f", seed {seed}" if number else "")
        self.progress(stage, 0, 1)
        result = self.legs.run(name, self.arms[name].strategy, steps=steps, start="initial", seed=seed, evaluate=True)
        trained = int(result.steps["step"].max()) if len(result.steps) else steps
        self.progress(stage, 1, 1)
        (updates, noise), final_loss = arrival_of(result, self.experiment), result.summary.final_loss
        if number and (updates, final_loss) == (check.updates[0], check.final_loss):
            self.seeds = self.seeds[:1]
            self.notes.append(f"the runs of {name} with two seeds are equal, and count as one: a script takes its seed from {SEED}")
            return
        self.ways[way] = check.with_run(updates, final_loss, trained, self._metric_of(result), noise)

    def _missing(self, name: str) -> int:
        """Runs to the target without which nothing is proved of an arm; 0 where it trains like the default, or losses are declared."""
        ways, experiment = {self._way(name), self._way(DEFAULT)}, self.experiment
        if len(ways) == 1 or experiment.workload.target_loss is None or experiment.run.device == "emulated":
            return 0
        return sum(max(0, FEWEST_SEEDS - len(self.ways[way].updates if way in self.ways else ())) for way in ways)

    def _may_prove(self, name: str) -> bool:
        """Whether setting and budget allow for the runs to the target that an arm needs."""
        missing = self._missing(name)
        return not missing or (len(self.seeds) >= FEWEST_SEEDS and self.legs.affords(2 * FIRST_LOOK, num_targets=missing))

    def _too_few(self, name: str) -> str | None:
        """Says that the runs to the target are too few for USE, and what to change; none where they are enough."""
        if not (missing := self._missing(name)):
            return None
        ran = min(len(self.ways[way].updates) for way in (self._way(name), self._way(DEFAULT)))
        needs_s = self.legs.expected_s(_KEPT_LEGS, num_targets=missing)
        return too_few(ran, missing, len(self.seeds), len(seeds_of(self.experiment)), budget_for(self.experiment, needs_s))

    def _metric_of(self, result: RunResult) -> float | None:
        """``tune.metric`` at the target; none where there is none, or the run did not arrive."""
        wanted, reported = self.experiment.tune.metric, result.summary.metrics or {}
        if wanted is None or result.summary.steps_to_target is None:
            return None
        if wanted not in reported:
            known = ", ".join(reported) or "none"
            hint = f"known here: {known}; a script calls fleet.report(loss=loss, {wanted}=value), {wanted} wherever it reports the loss"
            raise ConfigError("is nothing that a run reports", "tune.metric", repr(wanted), hint)
        return reported[wanted]

    def _metrics(self, name: str) -> tuple[float, float] | None:
        """The arm's and the default's metric, in the mean over seeds of which both are known; none where none are."""
        found = zip(self.ways[self._way(name)].metrics, self.ways[self._way(DEFAULT)].metrics, strict=False)
        known = [(own, default) for own, default in found if own is not None and default is not None]
        return None if not known else (statistics.fmean(own for own, _ in known), statistics.fmean(default for _, default in known))

    def _falls(self, name: str) -> str | None:
        tune, metrics = self.experiment.tune, self._metrics(name)
        if metrics is None or metrics[1] - metrics[0] <= tune.metric_drop:
            return None
        fallen = f"{tune.metric} is {metrics[0]:.4g} at the target, and the default's {metrics[1]:.4g}"
        return f"{fallen}: it may fall by tune.metric_drop = {tune.metric_drop:g}"

    def _show_target(self, name: str) -> None:
        """Let the arm have what is known of its way, in seconds of its own steps."""
        check = self.ways[self._way(name)]
        assert check.steps is not None
        median, step_s = median_arrival(check.updates, [float(check.steps)] * len(check.updates)), self.arms[name].real_s
        time_s = None if median is None or step_s is None else median * step_s
        self._update(name, target=dataclasses.replace(check, time_s=time_s, from_arm=None if check.from_arm == name else check.from_arm))

    def _updates(self, name: str) -> Updates | None:
        """What the finalist's runs say of its updates; none where they are the default's, or it never arrives."""
        way, base = self._way(name), self._way(DEFAULT)
        if way == base or way not in self.ways or not self.ways[base].reached:
            return None
        steps = self.ways[base].steps
        assert steps is not None
        found = Updates.of_runs(self.ways[base].updates, self.ways[way].updates, steps, self.ways[way].steps)
        spread = SPREAD if self._missing(name) else 0.0
        return dataclasses.replace(found, noise=self.ways[way].noise_beside(self.ways[base]), spread=spread)

    def _way(self, name: str) -> tuple[object, ...]:
        return learns_as(self.arms[name].strategy)

    def _rejection(self, name: str) -> str | None:
        """Why an arm's runs to the target rule it out. Without a target nothing does."""
        arm, default, target = self.arms[name], self.arms[DEFAULT], self.experiment.workload.target_loss
        if arm.target is None or default.target is None:
            return None
        runs = len(arm.target.updates)
        if not arm.target.reached:
            loss = arm.target.final_loss
            needs = (
                ", of three evaluations in a row: workload.eval_every" if loss is not None and target is not None and loss <= target else ""
            )
            final = "" if loss is None else f" (final loss {loss:.3g}{needs})"
            of_all = "" if runs == 1 else f", in none of {runs} runs"
            return f"does not reach the target loss {target:g} in {arm.target.steps} steps{of_all}{final}"
        if self._way(name) == self._way(DEFAULT):
            self.notes.append(f"{name} trains step for step like the default: its gain to the target is that of its steps")
            return None
        own, beside = (self.ways[self._way(one)] for one in (name, DEFAULT))
        lost = own.missed_beside(beside, target) or arm.target.lost_beside(default.target, target)
        if (worse := lost or own.seldom_beside(beside, target) or self._falls(name)) is not None:
            return worse
        updates, took = self._updates(name), "" if arm.target.time_s is None else f" in {arm.target.time_s:.3g} s"
        if updates is not None and updates.mean - math.log(self.ratios[name]) < 0:
            return f"reaches the target{took}, later than the default ({default.target})"
        others = "the default does not" if updates is None else f"the default {default.target}"
        way = f"{name_of(arm.strategy)}, gradients in {parameters_of(arm.strategy)['wire']}"
        each = f"{'one run' if runs == 1 else f'{runs} runs'} each, from the initial parameters"
        self.notes.append(f"{name}, {way}, reaches the target{took}, {others}; {each}")
        return None

    def _measure_pairs(self, finalist: Arm) -> None:
        """Run the finalist's pairs until they are judged, after those of an earlier tuning, with the error that it had for them."""
        if self.finalist is not None:
            verdict = "no gain" if self.judged is not None and self.judged.verdict == "NO GAIN" else "undecided"
            self.notes.append(f"before {finalist.name}, {self.finalist} {self._measured()}: {verdict}")
        self.finalist, self.pairs, self.judged, limit = finalist.name, [], None, self.experiment.tune.pairs
        found = None if self.held is None else self.held.compared(finalist)
        self.error, self.ended = (FIRST_SHARE * self.left, ()) if found is None else (found.error, found.ended)
        self.left -= self.error if found is None else 0.0
        known = () if found is None else found.pairs
        try:
            fresh = self.legs.pairs(finalist.name, finalist.timed, self.arms[DEFAULT].timed, first=len(known))
            for pair in itertools.chain(known, fresh):
                self.pairs.append(pair)
                count = len(self.pairs)
                self.progress(f"fresh pairs of {finalist.name}, to the next look", count, next(n for n in looks(limit) if n >= count))
                self._judge()
                if self.judged is not None:
                    return
        except LegLost:  # both strategies have run before: it is the machine's doing, and no verdict
            raise
        except LegFailed as failure:
            self._update(finalist.name, rejected=f"in the comparison {_says(failure)}")
            self.left += self.error * (1 - gone(len(self.pairs), limit, self.ended))
            self.finalist, self.pairs, self.error, self.ended = None, [], 0.0, ()
            return
        self._judge(final=True)  # void pairs have left fewer than the limit

    def _judge(self, *, final: bool = False) -> None:
        tune, name, num = self.experiment.tune, self.finalist or DEFAULT, len(self.pairs)
        ratios, enough = [math.log(pair.speedup) for pair in self.pairs], not self._missing(name)
        judged = partial(judge, ratios, tune.min_gain, tune.pairs, error=self.error, ended=self.ended, final=final)
        self.judged = judged(updates=self._updates(name), enough=enough)
        if final and enough and LEAST_PAIRS <= num < tune.pairs:
            self.ended = (*self.ended, num)

    def _measured(self) -> str:
        if self.judged is None:
            return f"has {counted(len(self.pairs), 'pair')}, and an interval needs {LEAST_PAIRS}"
        once = len(self.ways.get(self._way(self.finalist), TargetCheck(reached=False)).updates) == 1 if self.finalist else False
        what = "" if self.judged.speedup == self.judged.step else f" to the target{', one run each,' if once else ''}"
        return f"measured {self.judged.speedup}{what} in {self.judged.pairs} pairs"

    def _recommend(self, reason: str) -> Recommendation:
        judged = self.judged
        used = self.finalist if judged is not None and judged.verdict == "USE" else None
        if used is not None:
            reason = f"{used} is faster than the default in {len(self.pairs)} fresh pairs"
        elif self.finalist is not None and (judged is None or judged.verdict == "UNDECIDED"):
            self.undecided = True
            more = self._too_few(self.finalist) or (None if judged is None else outlook(judged, self.experiment.tune.pairs))
            reason = "; ".join(filter(None, (reason, f"{self.finalist} {self._measured()}", more)))
        if self.legs.num_void:
            void = f"{counted(self.legs.num_void, 'real run')} {'is' if self.legs.num_void == 1 else 'are'} void"
            self.notes.append(f"{void}, as the machine was not quiet in any of their repeats; pairs with one are left out: tune again")
        if len(self.pairs) > LEAST_PAIRS:
            both = zip(*((pair.default_s, pair.speedup) for pair in self.pairs), strict=True)
            alone, paired = (f"{100 * statistics.stdev(map(math.log, values)):.2g} %" for values in both)
            self.notes.append(f"A/A: the default's own legs differ by {alone}, the pairs by {paired} (standard deviations of logarithms)")
        return Recommendation(
            experiment=self.experiment.digest(),
            name=self.experiment.name,
            verdict="KEEP DEFAULT" if used is None else "USE",
            undecided=used is None and self.undecided,
            reason=reason,
            strategy=self.arms[used or DEFAULT].strategy,
            finalist=self.finalist,
            **self._gains(),
            target_loss=self.experiment.workload.target_loss,
            pairs=tuple(self.pairs),
            error=self.error,
            error_left=self.left,
            ended=self.ended,
            arms=tuple(self._with_runs(arm) for arm in self.arms.values()),
            notes=tuple(self.notes),
        )

    def _gains(self) -> dict[str, Any]:
        """Of the recommendation: of a step, and, where the finalist trains otherwise than the default, to the target."""
        if self.judged is None:
            return {}
        step, found = self.judged.step, self.judged.speedup
        gains = {"speedup": step.mean, "low": step.low, "high": step.high}
        if self.finalist is None or (updates := self._updates(self.finalist)) is None:
            return gains
        seeds = len(updates.ratios)
        has_ends = (seeds > 1 or updates.noise + updates.spread > 0) and math.isfinite(found.high)
        ends = {"to_target_low": found.low, "to_target_high": found.high} if has_ends else {}
        metrics, name = self._metrics(self.finalist), self.experiment.tune.metric
        metric = None if metrics is None else f"{name} {metrics[0]:.4g}, the default's {metrics[1]:.4g}"
        return {**gains, "to_target": found.mean, "seeds": seeds, "metric": metric, **ends}

    def _with_runs(self, arm: Arm) -> Arm:
        runs, void = (tuple(names.get(arm.name, ())) for names in (self.legs.runs, self.legs.void))
        return dataclasses.replace(arm, measured_runs=runs, void_runs=void, ratio=self.ratios.get(arm.name))

    def _update(self, name: str, **changes: object) -> None:
        self.arms[name] = dataclasses.replace(self.arms[name], **changes)  # type: ignore[arg-type]  # fields of Arm, by name


def _says(failure: LegFailed) -> str:
    return f"failed on {failure.where}: {failure.what}"
