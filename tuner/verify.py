"""Verify: real runs choose the finalist, price its local steps, and measure its gain.

Three rounds in one launch: every arm twice, forward then backward (A B C C B A), and the fastest
goes on; where the workload has a target, a run to it from the initial parameters, which may
reject an arm, so that the next fastest goes on; then fresh pairs of default and finalist in
alternating order. Only the pairs speak in the verdict: the runs that chose a winner flatter it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy import stats

from fleetbench.experiment import Experiment
from fleetbench.quantities import counted
from fleetbench.strategy import DistributedStrategy
from real.processes.diagnosis import LegFailed, LegLost
from tuner.real_runs import BudgetSpent, RealRuns, step_s_of
from tuner.recommendation import Arm, Pair, Recommendation, TargetCheck

DEFAULT = "default"
LEAST_PAIRS = 2
"""With fewer there is no interval."""
CONFIDENCE = 0.90
"""Two-sided: the lower end is a one-sided 95 % bound."""
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Speedup:
    """How many times as fast the finalist is as the default, with the ends of its interval."""

    mean: float
    low: float
    high: float

    def exceeds(self, min_gain: float) -> bool:
        """Whether the whole interval lies above ``1 + min_gain``."""
        return self.low > 1 + min_gain

    def __str__(self) -> str:
        return f"{self.mean:.3f}x [{self.low:.3f}, {self.high:.3f}]"


def paired_speedup(default_s: Sequence[float], finalist_s: Sequence[float], confidence: float = CONFIDENCE) -> Speedup:
    """Student's t interval of the mean of ``log(default_s[i] / finalist_s[i])``, as ratios of times.

    Pairs share their moment, so what slows the machine for both cancels. Needs at least two pairs.
    """
    ratios = np.log(np.asarray(default_s, dtype=np.float64) / np.asarray(finalist_s, dtype=np.float64))
    assert len(ratios) >= LEAST_PAIRS, "an interval needs at least two pairs"
    mean, error = float(ratios.mean()), float(stats.sem(ratios))
    half = float(stats.t.ppf((1 + confidence) / 2, len(ratios) - 1)) * error
    return Speedup(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def measure_pairs(
    experiment: Experiment, legs: RealRuns, finalist: str, strategy: DistributedStrategy, on_pair: Callable[[Pair], None]
) -> None:
    """Run ``tune.pairs`` pairs of the experiment's own strategy and ``strategy``: A B, B A, A B, ....

    ``on_pair`` is told every pair as it is complete. Raises what the legs raise.
    """
    arms = [(DEFAULT, experiment.strategy), (finalist, strategy)]
    for number in range(experiment.tune.pairs):
        default_first = number % 2 == 0
        ordered = arms if default_first else arms[::-1]
        legs.together((arm for _, arm in ordered), steps=experiment.tune.leg_steps)
        step_s = {name: step_s_of(legs.run(name, arm, steps=experiment.tune.leg_steps)) for name, arm in ordered}
        on_pair(Pair(default_s=step_s[DEFAULT], finalist_s=step_s[finalist], default_first=default_first))


def verify(experiment: Experiment, arms: Sequence[Arm], legs: RealRuns, progress: Progress | None = None) -> Recommendation:
    """Run the arms, the first of which is the default; see the module. Raises what the runner raises.

    The recommendation knows nothing of the search yet.
    """
    return _Verifier(experiment, {arm.name: arm for arm in arms}, legs, progress or (lambda *_: None)).run()


@dataclass(slots=True)
class _Verifier:
    experiment: Experiment
    arms: dict[str, Arm]
    legs: RealRuns
    progress: Progress
    pairs: list[Pair] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    finalist: str | None = None

    def run(self) -> Recommendation:
        try:
            self._choose()
            self._check_target(DEFAULT)
            self.finalist, reason = self._find_finalist()
            if self.finalist is None:
                return self._keep(reason)
            try:
                self._measure_pairs(self.arms[self.finalist])
            except LegLost:  # both strategies have run before: it is the machine's doing, and no verdict
                raise
            except LegFailed as failure:
                self._update(self.finalist, rejected=_says(failure))
                return self._keep(f"a leg of the comparison failed: {_says(failure)}")
        except BudgetSpent:
            hours = self.experiment.tune.budget_gpu_hours
            self.notes.append(f"real runs stopped within the budget of {hours:g} GPU hours")
            return self._keep(f"the budget of {hours:g} GPU hours ended before the comparison did")
        return self._judge()

    def _choose(self) -> None:
        """Every arm twice, in an order in which a drift of the machine favours none."""
        order = [*self.arms, *reversed(self.arms)]
        for done, name in enumerate(order):
            self.progress("real runs of every arm", done, len(order))
            if self.arms[name].rejected is not None:
                continue
            with self._rejecting(name):
                result = self.legs.run(name, self.arms[name].strategy, steps=self.experiment.tune.leg_steps)
                arm = self.arms[name]
                peaks = [*result.peak_bytes, *([] if arm.peak_bytes is None else [arm.peak_bytes])]  # of all ranks and legs
                self._update(name, measured_s=(*arm.measured_s, step_s_of(result)), peak_bytes=max(peaks, default=None))
        self.progress("real runs of every arm", len(order), len(order))

    @contextmanager
    def _rejecting(self, name: str) -> Iterator[None]:
        """Reject an arm whose leg fails; without the default nothing can be compared."""
        try:
            yield
        except LegFailed as failure:
            if name == DEFAULT:
                raise
            self._update(name, rejected=_says(failure))

    def _find_finalist(self) -> tuple[str | None, str]:
        """The fastest arm that keeps the target; none, and the reason, where that is the default."""
        fastest = sorted((arm for arm in self.arms.values() if arm.rejected is None), key=lambda arm: arm.real_s or 0.0)
        rejected = []
        for arm in fastest:
            if arm.name == DEFAULT:
                break
            with self._rejecting(arm.name):
                self._check_target(arm.name)
                rejection = self._rejection(arm.name)
                if rejection is None:
                    return arm.name, ""
                self._update(arm.name, rejected=rejection)
            rejected.append(f"{arm.name} {self.arms[arm.name].rejected}")
        if rejected:
            return None, f"what is faster was rejected: {'; '.join(rejected)}"
        default = self.arms[DEFAULT]
        return None, f"the default, at {_ms(default)} a step, is the fastest of {len(fastest)} in real runs"

    def _check_target(self, name: str) -> None:
        workload = self.experiment.workload
        if workload.target_loss is None:
            return
        self.progress(f"target of {name}", 0, 1)
        result = self.legs.run(name, self.arms[name].strategy, steps=workload.steps, start="initial", evaluate=True)
        time_s = result.summary.time_to_target_s
        steps = int(result.steps["step"].max()) if len(result.steps) else workload.steps
        check = TargetCheck(reached=time_s is not None, time_s=time_s, final_loss=result.summary.final_loss, steps=steps)
        self._update(name, target=check)
        if name == DEFAULT and time_s is None:
            self.notes.append(
                f"the default does not reach the target loss {workload.target_loss:g} in {steps} steps: "
                "only a strategy that does can be recommended"
            )
        self.progress(f"target of {name}", 1, 1)

    def _rejection(self, name: str) -> str | None:
        """Why an arm's target run rules it out. Without a target nothing does."""
        arm, default = self.arms[name], self.arms[DEFAULT]
        if arm.target is None or default.target is None:
            return None
        if not arm.target.reached:
            final = "" if arm.target.final_loss is None else f" (final loss {arm.target.final_loss:.3g})"
            target = self.experiment.workload.target_loss
            return f"does not reach the target loss {target:g} in {arm.target.steps} steps{final}"
        assert arm.target.time_s is not None
        own, other = ((one.strategy.localsgd, one.strategy.localsgd_configs) for one in (arm, default))
        if own == other:
            # Step for step the same training: time to the target is the step time, which the pairs measure better than two runs.
            self.notes.append(f"{name} trains step for step like the default: its run to the target is not judged by its time")
            return None
        if default.target.time_s is not None and arm.target.time_s > default.target.time_s:
            return f"reaches the target in {arm.target.time_s:.3g} s, later than the default ({default.target.time_s:.3g} s)"
        others = "the default does not" if default.target.time_s is None else f"the default in {default.target.time_s:.3g} s"
        self.notes.append(
            f"{name} takes {arm.strategy.local_steps} local steps and still reaches the target in {arm.target.time_s:.3g} s, {others}; "
            "one run each, from the initial parameters"
        )
        return None

    def _measure_pairs(self, finalist: Arm) -> None:
        wanted, done, void = self.experiment.tune.pairs, 0, self.legs.num_void
        self.progress("fresh pairs", 0, wanted)

        def on_pair(pair: Pair) -> None:
            nonlocal done, void
            if self.legs.num_void == void:  # a pair of which a leg is void says nothing
                self.pairs.append(pair)
            done, void = done + 1, self.legs.num_void
            self.progress("fresh pairs", done, wanted)

        measure_pairs(self.experiment, self.legs, finalist.name, finalist.strategy, on_pair)

    def _judge(self) -> Recommendation:
        if len(self.pairs) < LEAST_PAIRS:
            reason = f"only {len(self.pairs)} of {self.experiment.tune.pairs} pairs of {self.finalist} were measured on a quiet machine"
            return self._keep(reason)
        speedup = paired_speedup([pair.default_s for pair in self.pairs], [pair.finalist_s for pair in self.pairs])
        min_gain, count = self.experiment.tune.min_gain, len(self.pairs)
        if not speedup.exceeds(min_gain):
            reason = f"{self.finalist} measured {speedup} in {count} pairs, and USE needs a lower end above {1 + min_gain:g}"
            return self._keep(reason, speedup)
        reason = f"{self.finalist} is faster than the default in {count} fresh pairs"
        return self._recommend("USE", reason, speedup)

    def _keep(self, reason: str, speedup: Speedup | None = None) -> Recommendation:
        return self._recommend("KEEP DEFAULT", reason, speedup)

    def _recommend(self, verdict: Literal["USE", "KEEP DEFAULT"], reason: str, speedup: Speedup | None) -> Recommendation:
        if self.legs.num_void:
            void = f"{counted(self.legs.num_void, 'real run')} {'is' if self.legs.num_void == 1 else 'are'} void"
            self.notes.append(f"{void}, as the machine was not quiet in any of their repeats; pairs with one are left out: tune again")
        used = self.finalist if verdict == "USE" and self.finalist is not None else DEFAULT
        return Recommendation(
            experiment=self.experiment.digest(),
            name=self.experiment.name,
            verdict=verdict,
            reason=reason,
            strategy=self.arms[used].strategy,
            finalist=self.finalist,
            speedup=None if speedup is None else speedup.mean,
            low=None if speedup is None else speedup.low,
            high=None if speedup is None else speedup.high,
            pairs=tuple(self.pairs),
            arms=tuple(dataclasses.replace(arm, measured_runs=tuple(self.legs.runs.get(arm.name, ()))) for arm in self.arms.values()),
            notes=tuple(self.notes),
        )

    def _update(self, name: str, **changes: object) -> None:
        self.arms[name] = dataclasses.replace(self.arms[name], **changes)  # type: ignore[arg-type]  # fields of Arm, by name


def _says(failure: LegFailed) -> str:
    return f"failed on {failure.where}: {failure.what}"


def _ms(arm: Arm) -> str:
    return f"{1e3 * (arm.real_s or 0.0):.3g} ms"
