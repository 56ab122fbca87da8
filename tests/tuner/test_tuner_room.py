"""What takes the place of a finalist that real runs rule out, where virtual trainers have said what ways of training are worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from planted_ways import DILOCO, LOCAL, planted, searched, step_s
from tuner_fakes import FakeRunner, target_experiment

from fleetbench.result import RunResult
from fleetbench.strategy import DistributedStrategy
from real.leg import Leg
from real.processes.diagnosis import LegFailed
from tuner.real_runs import RealRuns
from tuner.recommendation import Arm, Recommendation
from tuner.space import name_of
from tuner.tune import _searched
from tuner.verify import verify
from tuner.ways import price_ways

DEFAULT = DistributedStrategy()


class Known(NamedTuple):
    """Of a strategy: seconds of a step; updates to the target, by virtual trainers and real ones; seconds of a real step, if others."""

    step_s: float
    virtual: float
    updates: float | None
    real_s: float | None = None


def local(k_steps: int, **fields: object) -> DistributedStrategy:
    """Local SGD with K local steps."""
    return DistributedStrategy().replace(localsgd=True, localsgd_configs={"k_steps": k_steps}, **fields)


ALL = {DEFAULT: Known(0.012, 100.0, 60.0), local(16): Known(0.006, 110.0, None), local(2): Known(0.0108, 100.0, 60.0)}
"""K = 16 is promised to be the fastest, and never arrives; K = 2 gains 11 %."""


class Runner(FakeRunner):
    """By what is known of strategies; some legs fail."""

    known: Mapping[DistributedStrategy, Known]
    fails: Callable[[Leg, int], bool]
    """Of a leg, and how many its strategy had before."""

    def run(self, leg: Leg) -> RunResult:
        """See ``Runner``."""
        if self.fails(leg, sum(one.strategy == leg.strategy for one in self.legs)):
            raise LegFailed("no space", "rank 1")
        return super().run(leg)


def compared(
    folder: Path,
    arms: Sequence[DistributedStrategy],
    known: Mapping[DistributedStrategy, Known],
    fails: Callable[[Leg, int], bool] = lambda *_: False,
) -> tuple[Recommendation, Runner]:
    """The verdict on arms beside the default; all that is known may follow, one at a time: ``tune.finalists`` is 1."""
    experiment = target_experiment()
    experiment = experiment.replace(tune=replace(experiment.tune, finalists=1))
    runner = Runner(experiment, lambda one: known[one].real_s or known[one].step_s, updates=lambda leg: known[leg.strategy].updates)
    runner.known, runner.fails = known, fails
    own = known[DEFAULT]
    others = {one: of.step_s * of.virtual / (own.step_s * own.virtual) for one, of in known.items()}

    def prepared(arm: Arm) -> Arm:
        paced_by = None if arm.strategy.lr_scale == 1 else arm.strategy.replace(lr_scale=1.0)
        return replace(arm, simulated_s=known[arm.strategy].step_s, virtual_updates=known[arm.strategy].virtual, paced_by=paced_by)

    names = ["default", *(f"finalist {number}" for number in range(len(arms)))]
    tried = [prepared(Arm(name=name, strategy=one, simulated_s=0.0)) for name, one in zip(names, [DEFAULT, *arms], strict=True)]
    legs = RealRuns(experiment=experiment, runner=runner, folder=folder, step_s=0.01)
    return verify(experiment, tried, legs, others=others, prepare=prepared), runner


def evaluated(runner: Runner) -> set[DistributedStrategy]:
    """What ran to the target."""
    return {leg.strategy for leg in runner.legs if leg.evaluate}


def test_a_way_that_misses_the_target_makes_room_for_another(tmp_path: Path) -> None:
    """Which was not worth its legs before; no other bucket of K = 16 runs to the target, and none is tried once it is out."""
    wide, small = (local(16, fuse_grad_size_in_MB=size) for size in (64.0, 0.5))
    found, runner = compared(tmp_path, [local(16)], ALL | {wide: Known(0.00601, 110.0, None), small: Known(0.00602, 110.0, None)})
    assert (found.verdict, found.strategy) == ("USE", local(2))
    assert [arm.strategy for arm in found.arms] == [DEFAULT, local(16), wide, local(2)]
    assert evaluated(runner) == {DEFAULT, local(16), local(2)}


def test_another_rate_of_a_way_that_misses_may_follow(tmp_path: Path) -> None:
    """It has the legs of the one that was rejected, and no part in why."""
    high = local(16, lr_scale=2.0)
    known = {DEFAULT: ALL[DEFAULT], local(16): ALL[local(16)], high: Known(0.006, 180.0, 90.0)}
    found, _ = compared(tmp_path, [local(16)], known)
    assert (found.verdict, found.strategy) == ("USE", high)
    assert found.arms[2].measured_s == found.arms[1].measured_s


def test_as_many_follow_as_there_are_finalists(tmp_path: Path) -> None:
    """Two ways miss, of one finalist: the third has no place."""
    known = ALL | {local(4): Known(0.010, 100.0, None)}
    found, runner = compared(tmp_path, [local(16)], known)
    assert found.verdict == "KEEP DEFAULT"
    assert evaluated(runner) == {DEFAULT, local(16), local(4)}


def test_what_may_follow_are_all_ways_that_arrive(tmp_path: Path) -> None:
    """By hand, of the default's 2 s: in the search at both rates and in both buckets, and DiLoCo beside it, but not with K = 16."""
    experiment, found = searched(tmp_path, lr_scale=(1.0, 2.0), gradient_merge=(1,))
    ways = price_ways(experiment, found, step_s, planted, tmp_path)
    others = _searched(found, ways)
    twice = LOCAL.replace(lr_scale=2.0, fuse_grad_size_in_MB=1.0)
    for strategy, seconds in (
        (DEFAULT, 2.0),
        (twice, 55 * 0.01225),
        (twice.replace(fuse_grad_size_in_MB=32.0), 55 * 0.0125),
        (DEFAULT.replace(lr_scale=2.0), 50 * 0.020),
        (DILOCO.replace(fuse_grad_size_in_MB=1.0), 90 * 0.01225),
    ):
        assert others[strategy] == pytest.approx(seconds / 2.0), name_of(strategy)
    assert not any(one.local_steps == 16 and one.localsgd_configs.has_outer for one in others)
    assert all(math.isfinite(ratio) for ratio in others.values())
