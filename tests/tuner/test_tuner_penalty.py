"""What runs at some K say of steps to the target at another, against planted penalties."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tuner_fakes import FakeRunner, target_experiment

from fleetbench.strategy import DistributedStrategy, LocalSGDConfigs
from real.leg import Leg
from tuner.real_runs import RealRuns
from tuner.recommendation import Arm
from tuner.to_target import Penalty
from tuner.verify import verify

LEVELS = (2, 4, 8, 16)


def local(k_steps: int) -> DistributedStrategy:
    """Local SGD with K local steps."""
    return DistributedStrategy(localsgd=k_steps > 1, localsgd_configs=LocalSGDConfigs(k_steps=k_steps))


def step_s(strategy: DistributedStrategy) -> float:
    """4 ms of compute, and 8 of an exchange that K steps share."""
    return 0.004 + 0.008 / strategy.local_steps


def test_a_straight_line_is_found_as_it_was_planted() -> None:
    """12 % a local step from one K or from two; beyond the largest it says so, and of synchronous runs alone it says nothing."""
    for run in ({16: [2.8]}, {4: [1.36, 1.36], 16: [2.8, 2.8]}):
        found = Penalty.of({1: [1.0], **run})
        assert found is not None
        assert [found.ratio(k) for k in LEVELS] == pytest.approx([1.12, 1.36, 1.84, 2.8])
    alone = Penalty.of({4: [1.36]})
    assert alone is not None
    assert alone.half is None
    assert str(alone.at(LEVELS)) == (
        "steps to the target, 12 % more with each local step (one run, no interval; run up to K = 4): "
        "K = 2 +12 %, K = 4 +36 %, K = 8 +84 %, K = 16 +180 %"
    )
    assert Penalty.of({1: [1.0, 1.1]}) is None


def test_its_interval_covers_in_nine_of_ten() -> None:
    """Three seeds each at K = 4 and 16, with deviations of 0.15 between them."""
    dice, covered, rounds = np.random.default_rng(1), 0, 2000
    for _ in range(rounds):
        found = Penalty.of({k: list(1 + 0.1 * (k - 1) + dice.normal(0, 0.15, 3)) for k in (4, 16)})
        assert found is not None
        assert found.half is not None
        covered += abs(found.c - 0.1) <= found.half
    assert 0.88 < covered / rounds < 0.92


@pytest.mark.sample(3)
@pytest.mark.parametrize(("c", "chosen", "ran"), [(0.12, 4, {1, 16, 4}), (0.001, 16, {1, 16}), (3.0, 1, {1, 16})])
def test_a_k_that_no_finalist_had_is_run_where_it_promises_to_be_first(c: float, chosen: int, ran: set[int], tmp_path: Path) -> None:
    """By hand, over synchronous training's time: K = 2 0.75, 4 0.68, 8 0.77, 16 1.05 with 12 % a step; all slower with 300 %."""
    experiment = target_experiment(pairs=8, finalists=1)
    others = {local(k): step_s(local(k)) / step_s(local(1)) for k in (1, *LEVELS)}
    runner = FakeRunner(experiment, step_s, updates=lambda leg: 100 * (1 + c * (leg.strategy.local_steps - 1)))
    arms = [Arm(name=name, strategy=local(k), simulated_s=step_s(local(k))) for name, k in (("default", 1), ("candidate 1", 16))]
    found = verify(experiment, arms, RealRuns(experiment=experiment, runner=runner, folder=tmp_path, step_s=0.01), others=others)
    assert (found.verdict, found.strategy) == ("USE" if chosen > 1 else "KEEP DEFAULT", local(chosen))
    assert {leg.strategy.local_steps for leg in runner.legs} == ran
    assert {leg.steps for leg in runner.legs if not leg.evaluate} == {18}  # five were asked for, in which K = 16 has no whole round
    assert any("local step (one run, no interval;" in note for note in found.notes) == (chosen != 16)


@pytest.mark.slow
def test_a_k_that_other_runs_have_named_is_run_with_all_seeds(tmp_path: Path) -> None:
    """By chance synchronous training is late under the first. Over all five it is first, and stays. K = 16 is surely later after three."""
    experiment = target_experiment(pairs=8, finalists=1)
    experiment = experiment.replace(run=replace(experiment.run, device="cpu"))
    others = {local(k): step_s(local(k)) / step_s(local(1)) for k in (1, *LEVELS)}

    def updates(leg: Leg) -> float:
        k, late = leg.strategy.local_steps, 1.3 if leg.strategy.local_steps == 1 and leg.seed == 0 else 1.0
        return late * {1: 100.0, 4: 190.0, 8: 205.0, 16: 400.0}[k] + (leg.seed or 0)

    runner = FakeRunner(experiment, step_s, updates=updates)
    arms = [Arm(name=name, strategy=local(k), simulated_s=step_s(local(k))) for name, k in (("default", 1), ("candidate 1", 16))]
    found = verify(experiment, arms, RealRuns(experiment=experiment, runner=runner, folder=tmp_path, step_s=0.01), others=others)
    ran = [(leg.strategy.local_steps, leg.seed) for leg in runner.legs if leg.evaluate]
    assert ran[:6] == [(k, seed) for seed in range(3) for k in (1, 16)]
    assert ran[6:] == [(4, 0), (4, 1), (4, 2), (1, 3), (4, 3), (1, 4), (4, 4)]
    assert found.strategy == local(1)


def test_learning_rates_run_to_the_target_first_and_take_no_legs(tmp_path: Path) -> None:
    """A script's: the default's 100 updates are 25 at four times the rate, with which K = 16 never arrives; at its own it takes 150.

    A rate moves no clock: what has it has the times of legs at the script's own, and what its updates promise.
    """
    experiment, high = target_experiment(pairs=8), local(1).replace(lr_scale=4.0)
    many = high.replace(localsgd=True, localsgd_configs={"k_steps": 16})
    steps = {local(1): 100.0, high: 25.0, local(16): 150.0, many: None}
    runner = FakeRunner(experiment, step_s, updates=lambda leg: steps[leg.strategy])
    arms = [Arm(name=name, strategy=local(k), simulated_s=step_s(local(k))) for name, k in (("default", 1), ("candidate 1", 16))]
    arms += [replace(arms[0], name="candidate 2", strategy=high, paced_by=local(1))]
    arms += [replace(arms[1], name="candidate 3", strategy=many, paced_by=local(16))]
    found = verify(experiment, arms, RealRuns(experiment=experiment, runner=runner, folder=tmp_path, step_s=0.01))
    assert (found.verdict, found.strategy) == ("USE", high)
    assert found.to_target == pytest.approx(4.0, rel=1e-3)
    assert [leg.strategy for leg in runner.legs if leg.evaluate] == [local(1), high, many]
    legs = [leg.strategy for leg in runner.legs if not leg.evaluate]
    assert legs[:4] == [local(1), local(16), local(16), local(1)]
    assert {*legs[4:]} == {local(1)}, "pairs of the default beside itself"
    assert [arm.target is not None for arm in found.arms] == [True, False, True, True]
    assert found.arms[3].measured_s == found.arms[1].measured_s != ()
