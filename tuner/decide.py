"""Decide: what a tuning measures next, and its verdict, as a function of its measurements.

There are three rounds. Real runs rank the arms (``tuner.ranking``). If the workload has a target, runs to it
from the initial parameters may reject an arm (``tuner.targets``). Then fresh pairs of the default and the
fastest arm run in alternating order until the verdict is known. If that arm is rejected, fails or gains
nothing, the next one that promises to be faster than the default takes its place. Only the pairs count for
the verdict, because the runs that chose a winner are biased in its favour.

The chance of a wrong USE is limited to that of one comparison, for all finalists of a tuning and its
continuations together: the first finalist gets ``FIRST_SHARE`` of it, each later one the same share of the rest.
A finalist whose legs fail returns the part that its looks have not spent.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from fleetbench.quantities import counted
from real.processes.diagnosis import LegFailed, LegLost
from tuner.budget import DEFAULT, BudgetSpent, budget_of
from tuner.evidence import Comparison, Done, Evidence, Pair, Run
from tuner.ledger import Ledger, Wanted
from tuner.notes import Noise, left_out
from tuner.ranking import KEPT_LEGS, choose, expected, following, rank, ranked
from tuner.recommendation import Arm, Recommendation
from tuner.recommendation import Pair as Paired
from tuner.sequential import LEAST_PAIRS, Judgement, judge, outlook, widening
from tuner.state import Setting, State, says
from tuner.targets import check_target, metrics_of, missing, reaches_target, run_rates, too_few_runs, updates_of

WIDE = 0.15
"""Relative half width of a proved gain's interval above which more pairs run, if the budget allows."""


def decide(evidence: Evidence, setting: Setting) -> Run | Pair | Done:
    """Return the next request, or the verdict.

    Raises ``LegFailed`` if the default cannot run, and ``LegLost`` if it fails or a launch breaks in a pair.
    """
    state = State(setting, Ledger(setting.experiment, evidence, setting.step_s))
    found = Finalists(state)
    try:
        reason = _reason(found)
    except Wanted as wanted:
        return wanted.request
    return Done(recommendation=_recommendation(found, reason), comparisons=found.comparisons())


@dataclass(slots=True)
class Finalists:
    """The finalist that is compared with the default, and the results of its pairs."""

    state: State
    finalist: str | None = None
    pairs: tuple[Paired, ...] = ()
    comparison: Comparison | None = None
    judged: Judgement | None = None
    looked: dict[str, Comparison] = field(default_factory=dict)
    """Comparisons with a last look because the budget ended, by their digest."""
    undecided: bool = False
    """Whether measuring ended before a verdict."""
    open: tuple[str, tuple[Paired, ...], Comparison, Judgement | None] | None = None
    """First finalist that stayed undecided, with its results, while others are compared."""

    def measure(self, arm: Arm) -> None:
        """Make an arm the finalist, and run pairs with the default until they are judged."""
        state = self.state
        self.leave()
        self.finalist, self.pairs, self.judged = arm.name, (), None
        self.comparison = state.ledger.comparison(arm, state.default)
        try:
            for pair in state.ledger.pairs(arm, state.default, self.comparison):
                self.pairs = (*self.pairs, pair)
                self.judge()
                if self.judged is not None and not self.is_wide():
                    break
        except BudgetSpent:
            if self.judged is None:
                raise
        except LegLost:  # both strategies have run before, so the machine is to blame, and there is no verdict
            raise
        except LegFailed as failure:
            state.update(arm.name, rejected=f"in the comparison {says(failure)}")
            self.finalist, self.pairs, self.comparison, self.judged = None, (), None, None
            return
        if self.judged is None:
            self.judge(final=True)  # void pairs have left fewer than the limit
        else:
            self.pairs = self.pairs[: self.judged.pairs]  # more pairs ran than the last look used

    def leave(self) -> None:
        """Add a note with the finalist's result, before another arm becomes the finalist."""
        if self.finalist is not None:
            verdict = "no gain" if self.judged is not None and self.judged.verdict == "NO GAIN" else "undecided"
            self.state.notes.append(left_out(self.finalist, self.measured(), verdict))

    def reopen(self) -> None:
        """Make the first undecided finalist the finalist again, if there is one."""
        if self.open is not None and self.open[0] != self.finalist:
            self.leave()
            self.finalist, self.pairs, self.comparison, self.judged = self.open

    def is_wide(self) -> bool:
        """Whether a gain is proved but its size is uncertain: the interval's half width exceeds ``WIDE``."""
        if self.judged is None or self.judged.verdict != "USE":
            return False
        return math.log(self.judged.step.high / self.judged.step.low) / 2 > math.log1p(WIDE)

    def judge(self, *, final: bool = False) -> None:
        """Judge the pairs so far.

        ``final``: whether the budget has ended. A proved gain stays proved, with the interval of the last look
        that proves it.
        """
        state, comparison, num = self.state, self.comparison, len(self.pairs)
        if self.finalist is None or comparison is None:
            return
        tune, enough = state.experiment.tune, not missing(state, self.finalist)
        ratios = [math.log(pair.speedup) for pair in self.pairs]
        judged = partial(judge, ratios, tune.min_gain, tune.pairs, error=comparison.error, ended=comparison.ended, final=final)
        now = judged(updates=updates_of(state, self.finalist), enough=enough)
        self.judged = now if self.judged is None or (now is not None and now.verdict == "USE") else self.judged
        if final and enough and LEAST_PAIRS <= num < tune.pairs and num not in comparison.ended:
            self.comparison = dataclasses.replace(comparison, ended=(*comparison.ended, num))
            self.looked[comparison.among] = self.comparison

    def measured(self) -> str:
        """Describe the finalist's measured gain."""
        if self.judged is None:
            return f"has {counted(len(self.pairs), 'pair')}, and an interval needs {LEAST_PAIRS}"
        check = self.state.ways.get(self.state.way(self.finalist)) if self.finalist is not None else None
        once = check is not None and len(check.updates) == 1
        what = "" if self.judged.speedup == self.judged.step else f" to the target{', one run each,' if once else ''}"
        return f"measured {self.judged.speedup}{what} in {self.judged.pairs} pairs"

    def keep_open(self, name: str) -> None:
        """Remember the first undecided arm: it becomes the finalist again if no other arm is recommended."""
        assert self.comparison is not None
        self.open = self.open or (name, self.pairs, self.comparison, self.judged)

    def comparisons(self) -> tuple[Comparison, ...]:
        """Return the evidence's comparisons, including last looks that this decision took."""
        return tuple(one if one.closed else self.looked.get(one.among, one) for one in self.state.ledger.evidence.comparisons)


def _reason(found: Finalists) -> str:
    """Rank the arms and compare finalists; return a reason to keep the default, or "" if pairs give the reason."""
    state = found.state
    try:
        choose(state)
        check_target(state, DEFAULT)
        run_rates(state)
        return _compare(found)
    except BudgetSpent as spent:
        found.undecided = True
        if found.judged is None:
            found.judge(final=True)
        if found.judged is None:  # too few pairs of another one
            found.reopen()
        return f"{spent}" or f"the budget ({budget_of(state.experiment)[1]}) ended before the comparison did"


def _compare(found: Finalists) -> str:
    """Compare arms with the default, one after the other, until one is proved faster.

    Return the reason if none is faster, or "" if one is or may be.
    """
    state, compared, ruled_out = found.state, list[str](), list[str]()
    finalists, has_target = state.experiment.tune.finalists, state.experiment.workload.target_loss is not None
    while left := ranked(state, compared):
        arm = left[0]
        if compared and expected(state, arm) >= 1:
            break
        compared.append(arm.name)
        may_follow = has_target and len({state.way(name)[:-1] for name in compared}) <= finalists
        if reaches := reaches_target(state, arm.name):
            found.measure(state.arms[arm.name])
        rejected, verdict = state.arms[arm.name].rejected, None if found.judged is None else found.judged.verdict
        if rejected is None and verdict in (None, "USE"):
            return ""
        if rejected is None and verdict == "UNDECIDED":  # other arms of its way would be undecided, too; another way may be a sure gain
            found.keep_open(arm.name)
            compared += [name for name in state.arms if state.way(name) == state.way(arm.name)]
        else:
            ruled_out.append(f"{arm.name} {rejected or found.measured()}")
            _rule_out(state, arm.name, is_slow=not reaches or rejected is None, is_followed=may_follow)
    found.reopen()
    if found.open is not None:
        return ""
    return _nothing_found(found, ruled_out)


def _nothing_found(found: Finalists, ruled_out: list[str]) -> str:
    """Return why no arm is recommended, with the reasons in ``ruled_out``."""
    state = found.state
    default, target = state.default.target, state.experiment.workload.target_loss
    if default is not None and ruled_out and not any(arm.target is not None and arm.target.reached for arm in state.arms.values()):
        ended = "" if default.final_loss is None else f"; the default ended at {default.final_loss:.3g}"
        return f"no strategy that was tried reached loss {target:g} in {default.steps} steps{ended}: raise workload.steps, or the target"
    if ruled_out:
        gain = f"no gain above {100 * state.experiment.tune.min_gain:g} %"
        return f"{'what is faster was rejected' if found.judged is None else gain}: {'; '.join(ruled_out)}"
    failed = "; ".join(f"{arm.name} {arm.rejected}" for arm in state.arms.values() if arm.rejected)
    return f"no other strategy ran: {failed or 'the search found none (its notes say what was not searched)'}"


def _rule_out(state: State, name: str, *, is_slow: bool, is_followed: bool) -> None:
    """Exclude an arm's way of training if ``is_slow``; rank another strategy in its place if ``is_followed``.

    The default's way is never excluded.
    """
    if is_slow and state.way(name) != state.way(DEFAULT):
        state.in_vain.add(state.way(name))
    if is_followed and (arm := following(state)) is not None:
        rank(state, [DEFAULT, arm.name])


def _recommendation(found: Finalists, reason: str) -> Recommendation:
    """Return the recommendation with the evidence of real runs; the caller adds the search."""
    state, judged, undecided = found.state, found.judged, found.undecided
    used = found.finalist if judged is not None and judged.verdict == "USE" else None
    if used is not None:
        reason = f"{used} is faster than the default in {len(found.pairs)} fresh pairs"
    elif found.finalist is not None and (judged is None or judged.verdict == "UNDECIDED"):
        undecided = True
        more = None if judged is None else outlook(judged, state.experiment.tune.pairs)
        more = too_few_runs(state, found.finalist, KEPT_LEGS) or more
        reason = "; ".join(filter(None, (reason, f"{found.finalist} {found.measured()}", more)))
    return Recommendation(
        experiment=state.experiment.digest(),
        name=state.experiment.name,
        verdict="KEEP DEFAULT" if used is None else "USE",
        undecided=used is None and undecided,
        reason=reason,
        strategy=state.arms[used or DEFAULT].strategy,
        finalist=found.finalist,
        **_gains(found),
        target_loss=state.experiment.workload.target_loss,
        pairs=found.pairs,
        arms=tuple(_with_runs(state, arm) for arm in state.arms.values()),
        noise=_noise(found),
        told=tuple(state.notes),
    )


def _noise(found: Finalists) -> Noise | None:
    """Return the spread of the default's step times and of the pairs' speed-ups, with the number of void runs.

    None if there are too few pairs and no run was void.
    """
    num_void = len(found.state.ledger.void)
    if len(found.pairs) <= LEAST_PAIRS:
        return Noise(num_void=num_void) if num_void else None
    logs = np.log([(pair.default_s, pair.speedup) for pair in found.pairs])
    alone, paired = logs.std(axis=0, ddof=1).tolist()
    return Noise(default=alone, pairs=paired, widening=float(widening(logs[:, 1])), num_void=num_void)


def _gains(found: Finalists) -> dict[str, Any]:
    """Return the gains as fields of the recommendation: per step and, if training differs, to the target."""
    state, judged = found.state, found.judged
    if judged is None:
        return {}
    step, whole = judged.step, judged.speedup
    gains = {"speedup": step.mean, "low": step.low, "high": step.high}
    if found.finalist is None or (updates := updates_of(state, found.finalist)) is None:
        return gains
    seeds = len(updates.ratios)
    has_ends = (seeds > 1 or updates.noise + updates.spread > 0) and math.isfinite(whole.high)
    ends = {"to_target_low": whole.low, "to_target_high": whole.high} if has_ends else {}
    metrics, name = metrics_of(state, found.finalist), state.experiment.tune.metric
    metric = None if metrics is None else f"{name} {metrics[0]:.4g}, the default's {metrics[1]:.4g}"
    return {**gains, "to_target": whole.mean, "seeds": seeds, "metric": metric, **ends}


def _with_runs(state: State, arm: Arm) -> Arm:
    runs = tuple(state.ledger.runs.get(arm.name, ()))
    void = tuple(run for run in runs if run in state.ledger.void)
    ratio = state.ratios.get(arm.name)
    paid = None if ratio is None else expected(state, arm)
    return dataclasses.replace(arm, measured_runs=runs, void_runs=void, ratio=ratio, expected=paid)
