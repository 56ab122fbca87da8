"""Targets: runs to the target from the initial parameters, and what they show about ways of training.

Time to the target is updates to the target times seconds per update. Updates depend only on the way of
training and the seed: all arms that train alike share their runs, and each finalist's runs are paired with
the default's for the same seeds (``tuner.to_target``).
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator

from fleetbench.quantities import counted
from fleetbench.target import median_arrival
from real.processes.diagnosis import LegFailed
from real.processes.roles import SEED
from tuner.budget import DEFAULT, budget_for, seeds_of
from tuner.notes import left_out
from tuner.recommendation import TargetCheck
from tuner.sequential import ERROR, FIRST_LOOK
from tuner.state import State, says
from tuner.to_target import FEWEST_SEEDS, SPREAD, Updates, too_few


def reaches_target(state: State, name: str) -> bool:
    """Run an arm to the target, and return whether its runs allow recommending it; if not, reject the arm."""
    with state.rejecting(name):
        check_target(state, name)
        if (rejection := next(_rejections(state, name), None)) is not None:
            state.update(name, rejected=rejection)
    return state.arms[name].rejected is None


def check_target(state: State, name: str) -> None:
    """Run the arm to the target, if there is one, with several seeds if it trains differently from the default."""
    if (target := state.experiment.workload.target_loss) is None:
        return
    way = state.way(name)
    _run_to_target(state, name, 0)
    if way != state.way(DEFAULT):
        _run_other_seeds(state, name)
    for shown in (DEFAULT, name):
        _show(state, shown)
    if name == DEFAULT and not state.ways[way].reached:
        missed = f"does not reach the target loss {target:g} in {state.ways[way].steps} steps"
        state.notes.append(left_out("the default", missed, "only a strategy that does can be recommended"))


def run_rates(state: State) -> None:
    """Run the arms that differ from the default only in learning rate to the target, once each."""
    default = state.default
    rated = [arm.name for arm in state.arms.values() if arm.strategy != default.strategy and arm.timed == default.timed]
    for name in rated if not state.asked else ():
        if not state.ledger.affords(2 * FIRST_LOOK, num_targets=1):
            return
        with state.rejecting(name):
            _run_to_target(state, name, 0)
            _show(state, name)


def missing(state: State, name: str) -> int:
    """Return the number of runs to the target that are still needed to prove an arm's gain.

    It is 0 without a target, if the arm trains like the default, or if losses are declared.
    """
    ways, experiment = {state.way(name), state.way(DEFAULT)}, state.experiment
    if len(ways) == 1 or experiment.workload.target_loss is None or experiment.run.device == "emulated":
        return 0
    return sum(max(0, FEWEST_SEEDS - len(state.ways[way].updates if way in state.ways else ())) for way in ways)


def may_prove(state: State, name: str) -> bool:
    """Whether ``tune.target_seeds`` and the budget allow the runs to the target that prove an arm's gain."""
    wanted = missing(state, name)
    return not wanted or (len(state.seeds) >= FEWEST_SEEDS and state.ledger.affords(2 * FIRST_LOOK, num_targets=wanted))


def too_few_runs(state: State, name: str, legs: int) -> str | None:
    """Describe that runs to the target are too few for USE, and what to change; None if there are enough.

    A proposed budget also has room for ``legs`` legs.
    """
    if not (wanted := missing(state, name)):
        return None
    ran = min(len(state.ways[way].updates) for way in (state.way(name), state.way(DEFAULT)))
    needs_s = state.ledger.expected_s(legs, num_targets=wanted)
    return too_few(ran, wanted, len(state.seeds), len(seeds_of(state.experiment)), budget_for(state.experiment, needs_s))


def updates_of(state: State, name: str) -> Updates | None:
    """Return the ratios of updates to the target, default over arm.

    None if the arm trains like the default or has not run, or if the default never arrives.
    """
    way, base = state.way(name), state.way(DEFAULT)
    if way == base or way not in state.ways or not state.ways[base].reached:
        return None
    steps = state.ways[base].steps
    assert steps is not None
    found = Updates.of_runs(state.ways[base].updates, state.ways[way].updates, steps, state.ways[way].steps)
    spread = SPREAD if missing(state, name) else 0.0
    return dataclasses.replace(found, noise=state.ways[way].noise_beside(state.ways[base]), spread=spread)


def metrics_of(state: State, name: str) -> tuple[float, float] | None:
    """Return the metric of the arm and of the default, as means over the seeds for which both are known.

    None without such seeds.
    """
    found = zip(state.ways[state.way(name)].metrics, state.ways[state.way(DEFAULT)].metrics, strict=False)
    known = [(own, default) for own, default in found if own is not None and default is not None]
    return None if not known else (statistics.fmean(own for own, _ in known), statistics.fmean(default for _, default in known))


def _run_other_seeds(state: State, name: str) -> None:
    """Run the default and the arm to the target with further seeds, while the budget allows and the arm may pass.

    If an earlier tuning has judged enough seeds, no more run, because they would be another look.
    """
    way, base, late = state.way(name), state.way(DEFAULT), math.log(state.ratios[name])
    judged = state.ledger.seeds_before(state.arms[name], state.seeds)
    for number in range(1, judged if judged >= FEWEST_SEEDS else len(state.seeds)) if missing(state, name) else ():
        check, default = state.ways[way], state.ways[base]
        if check.num_reached < default.num_beside(check) or len(state.seeds) == 1:
            return
        if (known := updates_of(state, name)) is not None and known.mean + known.half(ERROR, 1) < late:
            return
        if not state.ledger.affords(2 * FIRST_LOOK, num_targets=2):
            what = f"more than {counted(number, 'seed')} of {name}'s runs to the target"
            state.notes.append(left_out(what, "are left out", "the budget has no room for them"))
            return
        try:
            _run_to_target(state, DEFAULT, number)
        except LegFailed as failure:
            state.notes.append(left_out("further seeds", "are not run", f"the default, with seed {state.seeds[number]}, {says(failure)}"))
            return
        if len(state.seeds) > 1:
            _run_to_target(state, name, number)


def _run_to_target(state: State, name: str, number: int) -> None:
    """Run the arm to the target with ``state.seeds[number]``, unless its way of training has that run."""
    way = state.way(name)
    check = state.ways.get(way, TargetCheck(reached=False, from_arm=name))
    if number < len(check.updates):
        return
    outcome = state.ledger.run(state.ledger.to_target(state.arms[name], state.seeds[number]))
    reached = outcome.reached
    assert reached is not None
    if number and (reached.updates, reached.final_loss) == (check.updates[0], check.final_loss):
        state.seeds = state.seeds[:1]
        state.notes.append(left_out(f"two seeds of {name}", "count as one", f"runs are equal; a script takes its seed from {SEED}"))
        return
    state.ways[way] = check.with_run(reached, outcome.steps, outcome.run)


def _show(state: State, name: str) -> None:
    """Store the runs of the arm's way of training in the arm, with times from its own steps."""
    check = state.ways[state.way(name)]
    assert check.steps is not None
    median, step_s = median_arrival(check.updates), state.arms[name].real_s
    time_s = None if median is None or step_s is None else median * step_s
    state.update(name, target=dataclasses.replace(check, time_s=time_s, from_arm=None if check.from_arm == name else check.from_arm))


def _rejections(state: State, name: str) -> Iterator[str]:
    """Yield the reasons for which an arm's runs to the target rule it out; none without a target."""
    arm, tune, target = state.arms[name], state.experiment.tune, state.experiment.workload.target_loss
    if arm.target is None or target is None:
        return
    own, base = (state.ways[state.way(one)] for one in (name, DEFAULT))
    runs, ends, default_ends = len(own.updates), own.final_loss, base.final_loss
    if not own.reached:
        needs = ", of three evaluations in a row: workload.eval_every" if ends is not None and ends <= target else ""
        final = "" if ends is None else f" (final loss {ends:.3g}{needs})"
        of_all = "" if runs == 1 else f", in none of {runs} runs"
        yield f"does not reach the target loss {target:g} in {own.steps} steps{of_all}{final}"
    if state.way(name) == state.way(DEFAULT):
        return
    if own.misses_beside(base):
        of_runs = f"in {own.num_reached} of {counted(runs, 'run')}, the default in {base.num_beside(own) or 'none'}"
        yield f"reaches the target loss {target:g} {of_runs}"
    if ends is not None and default_ends is not None and default_ends <= target < ends:
        yield f"reaches the target loss {target:g} and loses it again: it ends at {ends:.3g}, the default at {default_ends:.3g}"
    metrics = metrics_of(state, name)
    if metrics is not None and metrics[1] - metrics[0] > tune.metric_drop:
        fallen = f"{tune.metric} is {metrics[0]:.4g} at the target, and the default's {metrics[1]:.4g}"
        yield f"{fallen}: it may fall by tune.metric_drop = {tune.metric_drop:g}"
    updates, took = updates_of(state, name), "" if arm.target.time_s is None else f" in {arm.target.time_s:.3g} s"
    if updates is not None and updates.mean - math.log(state.ratios[name]) < 0:
        yield f"reaches the target{took}, later than the default ({state.default.target})"
