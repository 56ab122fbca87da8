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


@pytest.mark.slow
def test_another_wire_of_a_way_takes_no_place(tmp_path: Path) -> None:
    """Virtual trainers do not tell wires apart: twice the rate with 16 bits is as promising as with 32. Both miss; K = 2 follows."""
    high, rounded = DEFAULT.replace(lr_scale=2.0), DEFAULT.replace(lr_scale=2.0, fp16_allreduce=True)
    known = {DEFAULT: ALL[DEFAULT], high: Known(0.012, 50.0, None), rounded: Known(0.0119, 50.0, None), local(2): ALL[local(2)]}
    known |= {DEFAULT.replace(fp16_allreduce=True): Known(0.0119, 100.0, 60.0)}  # whose legs are those of the other rate
    found, _ = compared(tmp_path, [high], known)
    assert (found.verdict, found.strategy) == ("USE", local(2))


@pytest.mark.slow
def test_a_leg_that_fails_rules_out_no_way(tmp_path: Path) -> None:
    """The largest bucket has no space; a smaller one trains as the default does, and takes its place."""
    large, small = (DEFAULT.replace(fuse_grad_size_in_MB=size) for size in (64.0, 1.0))
    known = {one: of for one, of in ALL.items() if one != local(2)} | {large: Known(0.0119, 100.0, 60.0), small: Known(0.0108, 100.0, 60.0)}
    found, _ = compared(tmp_path, [local(16), large], known, lambda leg, _: leg.strategy == large)
    assert (found.verdict, found.strategy) == ("USE", small)


@pytest.mark.sample(2)
@pytest.mark.parametrize("next_one", [local(2), local(16, fuse_grad_size_in_MB=64.0)], ids=["another way", "its own"])
def test_a_finalist_whose_pairs_fail_makes_room(tmp_path: Path, next_one: DistributedStrategy) -> None:
    """Two legs, three runs to the target; the first leg of a pair has no space. That says nothing of its way."""
    known = {DEFAULT: ALL[DEFAULT], local(16): Known(0.006, 110.0, 60.0), next_one: Known(0.0095, 110.0, 60.0)}
    found, _ = compared(tmp_path, [local(16)], known, lambda leg, before: leg.strategy == local(16) and before == 5)
    assert found.arms[1].rejected == "in the comparison failed on rank 1: no space"
    assert (found.verdict, found.strategy) == ("USE", next_one)


def test_a_way_without_a_gain_makes_room(tmp_path: Path) -> None:
    """Promised in half of the time, it is there in 99 %: what it promised is no bar for others, and error is left for them."""
    found, runner = compared(tmp_path, [local(16)], ALL | {local(16): Known(0.006, 100.0, 118.8)})
    assert (found.verdict, found.strategy) == ("USE", local(2))
    assert found.to_target == pytest.approx(0.012 / 0.0108, rel=1e-3)
    assert evaluated(runner) == {DEFAULT, local(16), local(2)}


def test_a_bucket_without_a_gain_makes_room_for_another(tmp_path: Path) -> None:
    """All train as the default does, whose way is not ruled out: the third follows, as the second was named by the first one's legs."""
    slow, next_one, small = (DEFAULT.replace(fuse_grad_size_in_MB=size) for size in (64.0, 16.0, 1.0))
    known = {DEFAULT: ALL[DEFAULT], slow: Known(0.010, 100.0, 60.0, real_s=0.0119), next_one: Known(0.010, 100.0, 60.0, real_s=0.0118)}
    found, _ = compared(tmp_path, [slow], known | {small: Known(0.0101, 100.0, 60.0, real_s=0.0108)})
    assert (found.verdict, found.strategy) == ("USE", small)
    assert [arm.strategy for arm in found.arms] == [DEFAULT, slow, next_one, small]


def test_as_many_follow_as_there_are_finalists(tmp_path: Path) -> None:
    """Two ways miss, of one finalist: the third has no place."""
    known = ALL | {local(4): Known(0.010, 100.0, None)}
    found, runner = compared(tmp_path, [local(16)], known)
    assert found.verdict == "KEEP DEFAULT"
    assert evaluated(runner) == {DEFAULT, local(16), local(4)}


def test_others_are_weighed_by_their_time_to_the_target(tmp_path: Path) -> None:
    """K = 16 has the fastest step and takes twice the updates: neither its way nor K = 2 promises more than K = 4, and no leg is wasted."""
    known = {DEFAULT: ALL[DEFAULT], local(16): Known(0.006, 200.0, 120.0), local(4): Known(0.0084, 100.0, 60.0)}
    known |= {local(16, fuse_grad_size_in_MB=1.0): Known(0.0059, 200.0, 120.0), local(2): Known(0.0108, 100.0, 60.0)}
    found, _ = compared(tmp_path, [local(16), local(4)], known)
    assert (found.verdict, found.strategy) == ("USE", local(4))
    assert [arm.strategy for arm in found.arms] == [DEFAULT, local(16), local(4)]


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
