"""Ranking: which strategies run for real, and their step times relative to the default's.

Every arm runs twice: all arms in order, then in reverse order (A B C C B A). Up to ``tune.finalists`` more arms
follow, one at a time. Each is chosen by what earlier legs show about the simulator's errors (``tuner.bias``).
"""

import math
import statistics
from collections.abc import Sequence

from tuner.bias import named
from tuner.budget import DEFAULT
from tuner.evidence import ROUNDS, Outcome, Run, ranking_of
from tuner.recommendation import Arm
from tuner.space import learns_as
from tuner.state import State
from tuner.targets import may_prove

KEPT_LEGS = 20
"""Number of legs for which the budget must have room before another arm runs: four to rank it, and 16 in eight
pairs."""


def choose(state: State) -> None:
    """Rank the arms, then up to ``tune.finalists`` more strategies that promise a gain by the legs so far."""
    rank(state, [*state.arms])
    for _ in range(state.experiment.tune.finalists):
        if (arm := following(state)) is None:
            break
        rank(state, [DEFAULT, arm.name])


def rank(state: State, names: Sequence[str]) -> None:
    """Run every arm twice, in an order in which a drift of the machine favours no arm.

    An arm with the same legs as another one, for example at another learning rate, takes over its times.
    """
    first = {arm.timed: name for name, arm in reversed(state.arms.items())}
    twins = {name: whose for name in names if (whose := first[state.arms[name].timed]) != name}
    own = [name for name in names if name != DEFAULT and name not in twins]
    order = [DEFAULT, *own, *reversed(own), DEFAULT] if own or DEFAULT in names else []
    among = ranking_of([state.ledger.leg(state.arms[name].timed) for name in (DEFAULT, *own)])
    took: dict[str, list[Outcome]] = {}
    for done, name in enumerate(order):
        if state.arms[name].rejected is not None:
            continue
        with state.rejecting(name):
            window = ROUNDS * done // len(order)  # one per round, so that all arms share its straggler draws
            leg = state.ledger.leg(state.arms[name].timed, window)
            took.setdefault(name, []).append(state.ledger.run(Run(arm=name, leg=leg, among=among)))
            state.ledger.refuse_small_budget(len(own))
            _measured(state, name, took[name][-1:])
    for name, legs in took.items():
        if state.arms[name].rejected is None:
            state.ratios[name] = _ratio(legs, took[DEFAULT])
    for name, whose in twins.items():
        arm, failed = state.arms[whose], None if whose in state.ratios else state.arms[whose].rejected
        state.update(name, measured_s=arm.measured_s, peak_bytes=arm.peak_bytes, rejected=failed)
        state.ratios |= {name: state.ratios[whose]} if whose in state.ratios else {}


def following(state: State) -> Arm | None:
    """Add the strategy with the largest expected gain as a new arm, and return the arm.

    Ways that real runs have ruled out are excluded. None if no strategy promises a gain or the budget has no room.
    """
    if not state.ledger.affords(KEPT_LEGS, num_targets=2):
        return None
    others, target = state.setting.others, state.experiment.workload.target_loss
    in_vain = {one for one in others if state.in_vain and learns_as(one) in state.in_vain}
    ran = {arm.strategy: arm for arm in state.arms.values() if arm.name != DEFAULT and arm.strategy in others}
    measured = {one: math.log(state.ratios[arm.name] * state.virtual(arm)) for one, arm in ran.items() if arm.name in state.ratios}
    simulated = {one: math.log(ratio) for one, ratio in others.items() if one in measured or not (one in in_vain or one in ran)}
    lost = in_vain | {one for one, arm in ran.items() if arm.rejected is not None}
    same = learns_as if target is not None and not state.asked else lambda _: None
    strategy = named(state.default.strategy, measured, simulated, same, lost)
    return None if strategy is None else state.add(strategy)


def ranked(state: State, compared: Sequence[str]) -> list[Arm]:
    """Return the arms that are neither ``compared`` nor rejected, in the order in which they deserve pairs."""
    left = [arm for arm in state.arms.values() if arm.name not in (DEFAULT, *compared) and arm.rejected is None]
    return sorted(left, key=lambda arm: (expected(state, arm) >= 1, not may_prove(state, arm.name), expected(state, arm)))


def expected(state: State, arm: Arm) -> float:
    """Return the arm's expected time over the default's: the ratio of step times, times that of updates if known.

    The ratio of updates to the target comes from virtual trainers or, without them, from real runs.
    """
    return state.ratios[arm.name] * (state.virtual(arm) if state.asked else _known(state, arm))


def _known(state: State, arm: Arm) -> float:
    """Return the effect of the arm's learning rate on updates, over the default's, by real runs; 1 if not known."""
    default = state.default.strategy
    ways = (learns_as(default.replace(lr_scale=scale)) for scale in (arm.strategy.lr_scale, default.lr_scale))
    taken = [check.updates[0] or check.steps or 1 for check in map(state.ways.get, ways) if check is not None]
    return taken[0] / taken[1] if len(taken) == 2 else 1.0


def _measured(state: State, name: str, legs: Sequence[Outcome]) -> None:
    """Add the step times and the peak memory of ``legs`` to the arm."""
    arm = state.arms[name]
    peaks = [peak for peak in (arm.peak_bytes, *(leg.peak_bytes for leg in legs)) if peak is not None]
    state.update(name, measured_s=(*arm.measured_s, *(leg.step_s for leg in legs)), peak_bytes=max(peaks, default=None))


def _ratio(own: Sequence[Outcome], default: Sequence[Outcome]) -> float:
    """Return the arm's mean step time over the default's."""
    taken, base = (statistics.fmean(leg.step_s for leg in legs) for legs in (own, default))
    return taken / base
