"""Verify: ask what to run, run it, add what it gave, until there is a verdict."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from tuner.budget import DEFAULT, budget_of
from tuner.decide import decide
from tuner.evidence import Done, Run
from tuner.ledger import Ledger, Wanted
from tuner.real_runs import RealRuns
from tuner.recommendation import Arm, Pair, Recommendation
from tuner.state import Setting

Progress = Callable[[str, int, int], None]
SPENT = "trainer seconds spent, of the budget's"
"""Stage of the progress in which the budget is shown."""


def verify(
    experiment: Experiment,
    arms: Sequence[Arm],
    runs: RealRuns,
    progress: Progress | None = None,
    *,
    others: Mapping[DistributedStrategy, float] | None = None,
    prepare: Callable[[Arm], Arm] = lambda arm: arm,
) -> Recommendation:
    """Measure until there is a verdict on the arms, the first of which is the default, and on some of the ``others``.

    ``others`` and ``prepare``: see ``Setting``. The recommendation knows nothing of the search yet. Raises what ``decide`` and the runner
    raise.
    """
    setting = Setting(experiment=experiment, arms=tuple(arms), others=others or {}, prepare=functools.cache(prepare), step_s=runs.step_s)
    tell, trainers = progress or (lambda *_: None), experiment.cluster.trainers
    show_spent(experiment, runs.evidence.spent_s(trainers), progress)
    while not isinstance(wanted := decide(runs.evidence, setting), Done):
        stage, done, total = (wanted if isinstance(wanted, Run) else wanted.runs[0]).stage
        tell(stage, done, total)
        runs.carry_out(wanted)
        tell(stage, done + 1, total)
        show_spent(experiment, runs.evidence.spent_s(trainers), progress)
    runs.close(wanted.comparisons)
    return wanted.recommendation


def measured_pairs(experiment: Experiment, strategy: DistributedStrategy, runs: RealRuns) -> list[Pair]:
    """As many fresh pairs of the experiment's own strategy and another as ``tune.pairs`` says, but for void ones, whatever they come to."""
    other, default = (Arm(name=name, strategy=one, simulated_s=0.0) for name, one in (("other", strategy), (DEFAULT, experiment.strategy)))
    while True:
        ledger = Ledger(experiment, runs.evidence, runs.step_s)
        try:
            return [*ledger.pairs(other, default, ledger.comparison(other, default))]
        except Wanted as wanted:
            runs.carry_out(wanted.request)


def show_spent(experiment: Experiment, spent_s: float, progress: Progress | None) -> None:
    """Tell what was spent of a budget, where there is one."""
    budget_s, _ = budget_of(experiment)
    if progress is not None and math.isfinite(budget_s):
        progress(SPENT, round(spent_s), round(budget_s))
