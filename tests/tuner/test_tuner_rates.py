"""What is searched beside K, by planted trainings: learning rates, the outer optimizer's rate and momentum, fragments and overlap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from planted_ways import DILOCO, LOCAL, planted, searched, step_s

from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from tuner.learning import Arrival
from tuner.space import name_of
from tuner.ways import over_seeds, price_ways


def test_the_best_ways_and_the_default_have_their_learning_rate_searched(tmp_path: Path) -> None:
    """Planted: with an outer optimizer 80 and 200 steps at two and four times, the default 70 at half, 60 at a quarter; no others.

    By hand: DiLoCo's 80 steps of 12.25 ms are the fewest seconds, its 90 the second fewest, which are of the same way; then 60 of 19 ms.
    The verdict of another strategy says what the rate alone would do.
    """
    experiment, found = searched(tmp_path, lr_scale=(), finalists=2)
    asked: list[tuple[str, float]] = []
    steps = {(DILOCO.local_steps, True): {2.0: 80.0, 4.0: 200.0}, (1, False): {0.5: 70.0, 0.25: 60.0, 0.125: None}}

    def learn(one: Experiment, limit_s: float) -> Arrival | None:
        own, rate = one.strategy, one.strategy.lr_scale
        asked.append((name_of(own.replace(lr_scale=1.0)), rate))
        if rate == 1:
            return planted(one, limit_s)
        known = {} if own.gradient_merge else steps.get((own.local_steps, own.localsgd_configs.has_outer), {})
        return None if (taken := known.get(rate)) is None else Arrival(taken)

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
    numbers = [tried.trial.number for tried in (*found.tried, *ways.others)]
    assert numbers == list(range(len(numbers)))
    said = "lr_scale = 0.25 alone takes 60 (60 to 60) steps, the default 100 (100 to 100) (virtual trainers, 1 seed)"
    assert ways.said_beside(LOCAL) == said
    assert ways.said_beside(DistributedStrategy(lr_scale=0.25)) is None
    ways = over_seeds(experiment, ways, [LOCAL], lambda *_: Arrival(95.0), tmp_path, range(7, 9), limit_s=30.0)
    assert ways.said_beside(LOCAL) is None, "other seeds say that the rate helps nothing"
    assert len(ways.updates) == 3


@pytest.mark.parametrize(("wanted", "tried"), [((1.0,), {1.0}), ((0.5, 3.0), {0.5, 1.0, 3.0}), ((), {1.0, 2.0, 4.0, 8.0})])
def test_rates_are_those_of_the_file(wanted: tuple[float, ...], tried: set[float], tmp_path: Path) -> None:
    """Planted: the higher the rate, the fewer steps; lower ones are tried last."""
    experiment, found = searched(tmp_path, lr_scale=wanted)
    asked: set[float] = set()

    def noting(one: Experiment, limit_s: float) -> Arrival | None:
        asked.add(one.strategy.lr_scale)
        return planted(one, limit_s)

    ways = price_ways(experiment, found, step_s, noting, tmp_path)
    assert asked == tried
    assert (ways.rated is None) == (tried == {1.0})


def test_rates_further_off_are_tried_where_nothing_arrives(tmp_path: Path) -> None:
    """Only an eighth of the rate arrives, which is a candidate then."""
    experiment, found = searched(tmp_path, lr_scale=())
    ways = price_ways(experiment, found, step_s, lambda one, _: Arrival(30.0) if one.strategy.lr_scale == 0.125 else None, tmp_path)
    (first, _) = found.best(2, ways.others, ways.seconds)
    assert first.strategy.lr_scale == 0.125
    said = "lr_scale = 0.125 alone takes 30 (30 to 30) steps, the default never (virtual trainers, 1 seed)"
    assert ways.said_beside(LOCAL) == said


def test_trainings_are_given_up_where_the_default_is_there_much_sooner(tmp_path: Path) -> None:
    """By hand: the default takes 10 steps of 19 ms, so that K = 16 has 2 x 10 x 19 / 10.5625 = 36 and six more to be sure of it, of 100.

    A rate has as many as the one before it. What does not arrive by then is not known to take longer, and a tuning with other times of a
    step trains it again; what does arrive is known.
    """
    experiment, found = searched(tmp_path, lr_scale=())
    asked: dict[str, int] = {}

    def learn(one: Experiment, _limit_s: float) -> Arrival | None:
        asked[name_of(one.strategy)] = one.workload.steps
        return {"synchronous": Arrival(10.0), "K = 4": Arrival(12.0)}.get(name_of(one.strategy))

    experiment = experiment.replace(workload=replace(experiment.workload, eval_every=2, steps=100))
    ways = price_ways(experiment, found, step_s, learn, tmp_path)
    assert asked["synchronous"] == 100
    assert asked["K = 16"] == round(2 * 10 * 0.019 / 0.0105625 + 6) == 42
    assert asked["synchronous at 2 times the learning rate"] == 16
    assert "K = 16: not in 42" in ways.notes[0]
    asked.clear()
    slower = [replace(one.trial, simulated_s=one.trial.simulated_s + 0.01 * (one.strategy.local_steps == 1)) for one in found.tried]
    moved = replace(found, tried=tuple(replace(one, trial=trial) for one, trial in zip(found.tried, slower, strict=True)))
    price_ways(experiment, moved, step_s, learn, tmp_path / "moved", None, ways.learnt)
    merged = "synchronous and 2 micro-batches an update"
    assert asked.keys() == {"K = 16", "K = 16 and an outer optimizer", "K = 4 and an outer optimizer", merged}


def test_the_best_local_steps_are_refined(tmp_path: Path) -> None:
    """Planted: an outer rate of 1 takes 80 steps for 90, an exchange beside a step 2 ms less for 84; the others never arrive.

    By hand: 84 x 10.25 ms are fewer seconds than 80 x 12.25. What a plain average cannot have is not tried with one.
    """
    experiment, found = searched(tmp_path)
    asked: list[str] = []

    def learn(one: Experiment, limit_s: float) -> Arrival | None:
        asked.append(name_of(one.strategy))
        configs = one.strategy.localsgd_configs
        if (configs.outer_lr, configs.outer_momentum, configs.fragments, configs.overlap_steps) == (1.0, 0.9, 1, 0):
            return Arrival(80.0)
        if configs.outer_lr == 1 and configs.overlap_steps == 1:
            return Arrival(84.0) if configs.outer_momentum == 0.9 and configs.fragments == 1 else None
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
