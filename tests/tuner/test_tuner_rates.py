"""What is searched beside K, by planted trainings: learning rates, the outer optimizer's rate and momentum, fragments and overlap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from planted_ways import DILOCO, LOCAL, planted, searched, step_s
from tuner_fakes import FakeRunner, FakeSimulate

from fleetbench.experiment import Experiment
from fleetbench.result import RunResult
from fleetbench.strategy import DistributedStrategy
from real.leg import Leg
from tuner.learning import by_virtual_trainers
from tuner.space import name_of, way_of
from tuner.tune import tune
from tuner.ways import over_seeds, price_ways


def test_the_best_ways_and_the_default_have_their_learning_rate_searched(tmp_path: Path) -> None:
    """Planted: with an outer optimizer 80 and 200 steps at two and four times, the default 70 at half, 60 at a quarter; no others.

    By hand: DiLoCo's 80 steps of 12.25 ms are the fewest seconds, its 90 the second fewest, which are of the same way; then 60 of 19 ms.
    The verdict of another strategy says what the rate alone would do.
    """
    experiment, found = searched(tmp_path, lr_scale=(), finalists=2)
    asked: list[tuple[str, float]] = []
    steps = {(DILOCO.local_steps, True): {2.0: 80.0, 4.0: 200.0}, (1, False): {0.5: 70.0, 0.25: 60.0, 0.125: None}}

    def learn(one: Experiment, limit_s: float, _at_least: int = 0) -> float | None:
        own, rate = one.strategy, one.strategy.lr_scale
        asked.append((name_of(own.replace(lr_scale=1.0)), rate))
        if rate == 1:
            return planted(one, limit_s)
        known = {} if own.gradient_merge else steps.get((own.local_steps, own.localsgd_configs.has_outer), {})
        return None if (taken := known.get(rate)) is None else taken

    ways = price_ways(experiment, found, step_s, learn, tmp_path)
    of_default = [rate for name, rate in asked if name == "synchronous"]
    assert of_default == [1.0, 2.0, 0.5, 0.25, 0.125]
    assert [rate for name, rate in asked if name == "K = 4 and an outer optimizer"] == [1.0, 2.0, 4.0]
    assert [rate for name, rate in asked if name == "K = 4"] == [0.25, 1.0, 2.0, 0.5], "at the default's rate; then the second best"
    assert [rate for name, rate in asked if name == "K = 16"] == [0.25, 1.0]
    best = found.best(3, ways.others, ways.seconds)
    assert [name_of(tried.strategy) for tried in best] == [
        "K = 4 and an outer optimizer at 2 times the learning rate",
        "synchronous at 0.25 times the learning rate",
        "synchronous",
    ]
    assert [ways.seconds(tried) for tried in best] == pytest.approx([80 * 0.01225, 60 * 0.019, 100 * 0.019])
    said = "lr_scale = 0.25 alone needs 1.67x fewer steps, by virtual trainers (1 seed), not run for real"
    assert ways.said_beside(LOCAL) == said
    assert ways.said_beside(DistributedStrategy(lr_scale=0.25)) is None
    ways = over_seeds(experiment, ways, [LOCAL], lambda *_: 95.0, tmp_path, range(7, 9), limit_s=30.0)
    assert ways.said_beside(LOCAL) is None, "other seeds say that the rate helps nothing"
    assert len(ways.updates) == 3


@pytest.mark.parametrize(("wanted", "tried"), [((1.0,), {1.0}), ((0.5, 3.0), {0.5, 1.0, 3.0}), ((), {1.0, 2.0, 4.0, 8.0})])
def test_rates_are_those_of_the_file(wanted: tuple[float, ...], tried: set[float], tmp_path: Path) -> None:
    """Planted: the higher the rate, the fewer steps; lower ones are tried last."""
    experiment, found = searched(tmp_path, lr_scale=wanted)
    asked: set[float] = set()

    def noting(one: Experiment, limit_s: float, _at_least: int = 0) -> float | None:
        asked.add(one.strategy.lr_scale)
        return planted(one, limit_s)

    ways = price_ways(experiment, found, step_s, noting, tmp_path)
    assert asked == tried
    assert (ways.rated is None) == (tried == {1.0})


def test_trainings_are_given_up_where_the_default_is_there_much_sooner(tmp_path: Path) -> None:
    """By hand: the default takes 10 steps of 19 ms, so that K = 16 has 2 x 10 x 19 / 10.5625 = 36 and six more to be sure of it, of 100.

    A rate has as many as the one before it.
    """
    experiment, found = searched(tmp_path, lr_scale=())
    asked: dict[str, int] = {}

    def learn(one: Experiment, _limit_s: float, _at_least: int = 0) -> float | None:
        asked[name_of(one.strategy)] = one.workload.steps
        return {"synchronous": 10.0, "K = 4": 12.0}.get(name_of(one.strategy))

    experiment = experiment.replace(workload=replace(experiment.workload, eval_every=2, steps=100))
    price_ways(experiment, found, step_s, learn, tmp_path)
    assert asked["synchronous"] == 100
    assert asked["K = 16"] == round(2 * 10 * 0.019 / 0.0105625 + 6) == 42
    assert asked["synchronous at 2 times the learning rate"] == 16


def test_the_best_local_steps_are_refined(tmp_path: Path) -> None:
    """Planted: an outer rate of 1 takes 80 steps for 90, an exchange beside a step 2 ms less for 84; the others never arrive.

    By hand: 84 x 10.25 ms are fewer seconds than 80 x 12.25. What a plain average cannot have is not tried with one.
    """
    experiment, found = searched(tmp_path)
    asked: list[str] = []

    def learn(one: Experiment, limit_s: float, _at_least: int = 0) -> float | None:
        asked.append(name_of(one.strategy))
        configs = one.strategy.localsgd_configs
        if (configs.outer_lr, configs.outer_momentum, configs.fragments, configs.overlap_steps) == (1.0, 0.9, 1, 0):
            return 80.0
        if configs.outer_lr == 1 and configs.overlap_steps == 1:
            return 84.0 if configs.outer_momentum == 0.9 and configs.fragments == 1 else None
        is_new = configs.outer_lr not in (0.7, 1.0) or configs.outer_momentum == 0.5 or configs.has_fragments
        return None if is_new else planted(one, limit_s)

    def faster(strategy: DistributedStrategy) -> float:
        return step_s(strategy) - 0.002 * bool(strategy.localsgd_configs.overlap_steps)

    ways = price_ways(experiment, found, faster, learn, tmp_path)
    best = found.best(1, ways.others, ways.seconds)[0]
    assert name_of(best.strategy) == "K = 4 and an outer optimizer of rate 1 and momentum 0.9 and exchanges beside 1 step"
    assert ways.seconds(best) == pytest.approx(84 * 0.01025)
    assert [name for name in asked if "of rate" in name or "beside" in name or "fragments" in name] == [
        "K = 4 and an outer optimizer of rate 0.4 and momentum 0.9",
        "K = 4 and an outer optimizer of rate 1 and momentum 0.9",
        "K = 4 and an outer optimizer of rate 1 and momentum 0.5",
        "K = 4 and an outer optimizer of rate 1 and momentum 0.9 and exchanges beside 1 step",
        "K = 4 and an outer optimizer of rate 1 and momentum 0.9 and 2 fragments and exchanges beside 1 step",
    ]
    asked.clear()
    plain, found = searched(tmp_path / "plain", diloco=False)
    price_ways(plain, found, faster, learn, tmp_path / "plain")
    assert not any("optimizer" in name or "fragments" in name for name in asked)


@pytest.mark.slow
def test_a_rate_that_loses_the_target_again_does_not_arrive() -> None:
    """Four times a rate that grows sixfold after 200 steps: at the target after 40, and far above it after 320, when the default is not."""
    workload = {"model": "digits_mlp", "batch_size": 16, "steps": 400, "eval_every": 20, "lr": 0.05, "target_loss": 0.4}
    grows = {"lr_decay": [{"step": 200, "factor": 6.0}]}
    experiment = Experiment.from_dict({"name": "high", "workload": {**workload, **grows}, "cluster": {"trainers_per_node": 2}})
    high = experiment.replace(strategy=DILOCO.replace(lr_scale=4.0, localsgd_configs={"outer_lr": 1.0}))
    assert by_virtual_trainers(high, 600.0) is not None
    assert by_virtual_trainers(high, 600.0, 320) is None
    assert by_virtual_trainers(experiment, 600.0) == by_virtual_trainers(experiment, 600.0, 320) is not None


def test_a_tuning_that_ran_out_of_time_begins_no_training_when_it_is_taken_up_again(tmp_path: Path) -> None:
    """Time passes in the fourth training: what the default's climb left out is not tried later, and the finalists are the same."""
    experiment, found = searched(tmp_path, lr_scale=())
    asked: list[str] = []

    def slow(one: Experiment, limit_s: float, _at_least: int = 0) -> float | None:
        if len(asked) == 3:
            raise TimeoutError
        asked.append(name_of(one.strategy))
        return planted(one, limit_s)

    first = price_ways(experiment, found, step_s, slow, tmp_path)
    assert asked == ["synchronous", "synchronous at 2 times the learning rate", "synchronous at 4 times the learning rate"]
    again = price_ways(experiment, found, step_s, lambda *_: pytest.fail("trained"), tmp_path)
    assert found.best(3, again.others, again.seconds) == found.best(3, first.others, first.seconds)
    assert again.notes == first.notes


def test_a_script_tries_the_rates_of_the_file_with_its_own_strategy_and_the_fastest_local_steps(tmp_path: Path) -> None:
    """Each once, and none without the file's word."""
    experiment, found = searched(tmp_path, lr_scale=(2.0, 1.0, 2.0), diloco=False)
    script = experiment.replace(run=replace(experiment.run, launcher="command"))
    tried = [one.strategy for one in price_ways(script, found, step_s, None, tmp_path).others]
    assert [(one.local_steps, one.lr_scale) for one in tried] == [(1, 2.0), (16, 2.0)]
    silent = script.replace(tune=replace(script.tune, lr_scale=()))
    assert price_ways(silent, found, step_s, None, tmp_path).others == ()


def test_a_way_whose_best_rate_fails_with_other_seeds_stays_at_the_experiments_rate(tmp_path: Path) -> None:
    """K = 4 takes 55 steps at twice the rate with the first seed and never arrives with the second, where the experiment's rate does."""
    experiment, found = searched(tmp_path, lr_scale=(1.0, 2.0), diloco=False, gradient_merge=(1,))

    def learn(one: Experiment, limit_s: float, _at_least: int = 0) -> float | None:
        return None if one.strategy.lr_scale > 1 and one.run.seed and one.strategy.localsgd else planted(one, limit_s)

    ways = price_ways(experiment, found, step_s, learn, tmp_path)
    (first, *_) = best = found.best(3, ways.others, ways.seconds)
    assert (first.strategy.local_steps, first.strategy.lr_scale) == (4, 2.0)
    ways = over_seeds(experiment, ways, [one.strategy for one in best], learn, tmp_path, range(2), limit_s=30.0)
    assert not ways.arrives(first.strategy)
    assert ways.updates[way_of(LOCAL)] == (110.0, 110.0)
    assert ("K = 4", 1.0) in [(name_of(one.strategy), one.strategy.lr_scale) for one in found.best(3, ways.others, ways.seconds)]


def test_a_run_that_ends_above_the_target_again_is_rejected(tmp_path: Path) -> None:
    """As a script's may, which trains on: local steps are at the target sooner, and end at 0.9 where the default ends at 0.4."""

    class Losing(FakeRunner):
        def run(self, leg: Leg) -> RunResult:
            found = super().run(leg)
            lost = leg.evaluate and leg.strategy.localsgd
            return replace(found, summary=replace(found.summary, final_loss=0.9)) if lost else found

    experiment = searched(tmp_path, pairs=8, local_steps=(1, 4))[0]
    runner = Losing(experiment, step_s, updates=lambda _: 100.0)
    ran, _ = tune(experiment, out=tmp_path / "runs", runner=runner, simulate=FakeSimulate(step_s))
    assert not ran.strategy.localsgd
    local = next(arm for arm in ran.arms if arm.strategy.localsgd)
    assert local.rejected == "reaches the target loss 0.5 and loses it again: it ends at 0.9, the default at 0.4"
