"""Verify: runs what the decision requests, and adds the results to the evidence, until there is a verdict."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from fleetbench.experiment import Experiment
from fleetbench.quantities import counted
from fleetbench.strategy import DistributedStrategy
from tuner.budget import DEFAULT
from tuner.decide import decide
from tuner.evidence import Done
from tuner.evidence import Pair as PairOfRuns
from tuner.ledger import Ledger, Wanted
from tuner.real_runs import RealRuns
from tuner.recommendation import Arm, Pair, Recommendation
from tuner.state import Setting

Progress = Callable[[str, int, int], None]


def verify(
    experiment: Experiment,
    arms: Sequence[Arm],
    runs: RealRuns,
    progress: Progress | None = None,
    *,
    others: Mapping[DistributedStrategy, float] | None = None,
    prepare: Callable[[Arm], Arm] = lambda arm: arm,
) -> Recommendation:
    """Run legs until there is a verdict on the arms, of which the first is the default.

    Some of the ``others`` may become arms; for these and ``prepare`` see ``Setting``. The recommendation does
    not contain the search yet. Raises the errors of ``decide`` and of the runner.
    """
    setting = Setting(experiment=experiment, arms=tuple(arms), others=others or {}, prepare=functools.cache(prepare), step_s=runs.step_s)
    tell, ranked, seeds, pairs = progress or (lambda *_: None), list[str](), set[int | None](), 0
    while not isinstance(wanted := decide(runs.evidence, setting), Done):
        if isinstance(wanted, PairOfRuns):
            pairs += 1
        elif wanted.leg.ends_at_target:
            seeds.add(wanted.leg.seed)
        else:
            ranked.append(wanted.arm)
        num = max(len(arms), len({*ranked})) - 1
        counts = [counted(number, noun) for number, noun in ((len(seeds), "seed"), (pairs, "pair")) if number]
        if counts:
            tell(f"verify: {', '.join(counts)}", pairs, experiment.tune.pairs)
        else:
            tell(f"run the best {num}", len(ranked), 2 * (num + 1))
        runs.carry_out(wanted)
    runs.close(wanted.comparisons)
    return wanted.recommendation


def measured_pairs(experiment: Experiment, strategy: DistributedStrategy, runs: RealRuns) -> list[Pair]:
    """Run ``tune.pairs`` fresh pairs of the experiment's own strategy and another; return those that are not void."""
    other, default = (Arm(name=name, strategy=one, simulated_s=0.0) for name, one in (("other", strategy), (DEFAULT, experiment.strategy)))
    while True:
        ledger = Ledger(experiment, runs.evidence, runs.step_s)
        try:
            return [*ledger.pairs(other, default, ledger.comparison(other, default))]
        except Wanted as wanted:
            runs.carry_out(wanted.request)
