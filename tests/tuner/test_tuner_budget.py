"""What a budget of real runs has room for, and what it counts."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
from tuner_fakes import FakeRunner, layers_experiment, target_experiment

from fleetbench.plan.combination import OUTSIDE
from fleetbench.strategy import DistributedStrategy
from real.processes.diagnosis import LegFailed
from tuner.budget import BudgetSpent, leg_steps_of, with_leg_steps
from tuner.evidence import Run
from tuner.ledger import Ledger, Wanted
from tuner.real_runs import RealRuns
from tuner.recommendation import Arm
from tuner.verify import verify

DEFAULT = DistributedStrategy()
FUSED = DistributedStrategy(fuse_grad_size_in_MB=1.0)


def arms(**strategies: DistributedStrategy) -> list[Arm]:
    """The default and others, by name."""
    return [Arm(name=name, strategy=strategy, simulated_s=0.01) for name, strategy in {"default": DEFAULT, **strategies}.items()]


def by_fusion(strategy: DistributedStrategy) -> float:
    """Small buckets take 10 ms a step, large ones 12."""
    return 0.010 if strategy.fuse_grad_size_in_MB <= 1 else 0.012


def ran(legs: RealRuns, *strategies: DistributedStrategy) -> Ledger:
    """Legs of strategies, one after the other, as a decision asks for them; those that fail are passed over."""
    while True:
        ledger = Ledger(legs.experiment, legs.evidence, legs.step_s)
        try:
            for window, strategy in enumerate(strategies):
                with contextlib.suppress(LegFailed):
                    ledger.run(Run(arm="any", leg=ledger.leg(strategy, window)))
        except Wanted as wanted:
            legs.carry_out(wanted.request)
        else:
            return ledger


def test_the_budget_ends_the_legs_before_it_is_exceeded(tmp_path: Path) -> None:
    """Two trainers, ten steps a leg at one second each: 60 trainer-seconds carry three legs and no fourth."""
    experiment = layers_experiment(budget_gpu_hours=65 / 3600)
    clock = iter(10.0 * (number // 2) + 10.0 * (number % 2) for number in range(100))
    legs = RealRuns(experiment=experiment, runner=FakeRunner(experiment, by_fusion), folder=tmp_path, step_s=1.0, clock=lambda: next(clock))
    assert experiment.cluster.trainers == 2
    assert ran(legs, *[DEFAULT] * 3).spent_s == pytest.approx(60.0)
    with pytest.raises(BudgetSpent):
        ran(legs, *[DEFAULT] * 4)


@pytest.mark.parametrize(("seconds", "steps"), [(None, 60), (1.8, 60), (1.7, 30), (0.9, 30), (0.89, 15), (0.1, 15)])
def test_legs_of_slow_steps_are_shorter(seconds: float | None, steps: int) -> None:
    """A step computes for 30 ms, so 60 take 1.8 s. A round of 32 local steps needs more than 15 all the same."""
    resolved = with_leg_steps(layers_experiment(leg_steps=60, leg_seconds=seconds))
    assert leg_steps_of(resolved) == resolved.tune.leg_steps == steps
    assert with_leg_steps(resolved) == resolved
    rounds = with_leg_steps(target_experiment(leg_steps=60, leg_seconds=seconds, local_steps=[32]))
    assert leg_steps_of(rounds) == max(steps, OUTSIDE + 32)


def test_a_spent_budget_keeps_the_default(tmp_path: Path) -> None:
    """A budget that ends in the middle is said in the reason, and nothing is recommended on half of the pairs: later legs take longer."""
    experiment = layers_experiment()
    experiment = experiment.replace(tune=replace(experiment.tune, budget_gpu_hours=110 / 3600))
    now = iter([0, 5, *range(20, 10_000, 20)])
    runner = FakeRunner(experiment, by_fusion)
    legs = RealRuns(experiment=experiment, runner=runner, folder=tmp_path, step_s=1.0, clock=lambda: float(next(now)))
    found = verify(experiment, arms(one=FUSED), legs)
    assert (found.verdict, found.undecided, len(runner.legs), len(found.pairs)) == ("KEEP DEFAULT", True, 3, 0)
    assert "the budget (tune.budget_gpu_hours = 0.0305556) ended" in found.reason


@pytest.mark.parametrize(("minutes", "num_pairs", "verdict"), [(10 / 6, 3, "USE"), (5 / 6, 0, "KEEP DEFAULT")])
def test_minutes_end_the_pairs_with_a_last_look(tmp_path: Path, minutes: float, num_pairs: int, verdict: str) -> None:
    """Ten seconds a leg, on both trainers at once: of 100 seconds four legs choose and six make three pairs, no look but the last."""
    experiment = layers_experiment(pairs=48, budget_minutes=minutes)
    now = iter(10.0 * ((number + 1) // 2) for number in range(100))
    runner = FakeRunner(experiment, by_fusion)
    legs = RealRuns(experiment=experiment, runner=runner, folder=tmp_path, step_s=1.0, clock=lambda: next(now))
    found = verify(experiment, arms(one=FUSED), legs)
    assert (found.verdict, found.undecided, len(found.pairs)) == (verdict, verdict != "USE", num_pairs)
