"""What is searched beside K, by planted trainings: learning rates, the outer optimizer's rate and momentum, fragments and overlap."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from planted_ways import DILOCO, LOCAL, planted, searched, step_s
from tuner_fakes import FakeRunner, FakeSimulate

from fleetbench.experiment import Experiment
from fleetbench.report.html import render
from fleetbench.report.model import read_report
from fleetbench.result import RunResult
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import LrDecay
from real.leg import Leg
from tuner.learning import Arrival, and_stays, by_virtual_trainers
from tuner.search import search
from tuner.simulated.answer import tune_simulated
from tuner.space import name_of, search_space, way_of
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
    said = "lr_scale = 0.25 alone needs 1.67x fewer steps, by virtual trainers (1 seed), not run for real"
    assert ways.said_beside(LOCAL) == said
    assert ways.said_beside(DistributedStrategy(lr_scale=0.25)) is None
    assert ways.said_beside(LOCAL, [DistributedStrategy(lr_scale=0.25)]) == said.removesuffix(", not run for real")
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
    said = "lr_scale = 0.125 alone reaches the target, by virtual trainers (1 seed), not run for real"
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
    assert "K = 16: not in 42" in str(ways.notes[0])
    asked.clear()
    slower = [replace(one, simulated_s=one.simulated_s + 0.01 * (one.strategy.local_steps == 1)) for one in found.tried]
    moved = replace(found, tried=tuple(slower))
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


@pytest.mark.slow
def test_a_rate_that_loses_the_target_again_does_not_arrive() -> None:
    """Four times a rate that grows sixfold after 200 steps: at the target after 40, and far above it after 320, when the default is not."""
    workload = {"model": "digits_mlp", "batch_size": 16, "steps": 400, "eval_every": 20, "lr": 0.05, "target_loss": 0.4}
    grows = {"lr_decay": [{"step": 200, "factor": 6.0}]}
    experiment = Experiment.from_dict({"name": "high", "workload": {**workload, **grows}, "cluster": {"trainers_per_node": 2}})
    high = experiment.replace(strategy=DILOCO.replace(lr_scale=4.0, localsgd_configs={"outer_lr": 1.0}))
    stays = and_stays(by_virtual_trainers, 320)
    assert by_virtual_trainers(high, 600.0) is not None
    assert stays(high, 600.0) is None
    assert by_virtual_trainers(experiment, 600.0) == stays(experiment, 600.0) is not None
    assert and_stays(planted, 320) is planted


def test_a_tuning_that_ran_out_of_time_begins_no_training_when_it_is_taken_up_again(tmp_path: Path) -> None:
    """Time passes in the fourth training: what the default's climb left out is not tried later, and the finalists are the same."""
    experiment, found = searched(tmp_path, lr_scale=())
    asked: list[str] = []

    def slow(one: Experiment, limit_s: float) -> Arrival | None:
        if len(asked) == 3:
            raise TimeoutError
        asked.append(name_of(one.strategy))
        return planted(one, limit_s)

    first = price_ways(experiment, found, step_s, slow, tmp_path)
    assert asked == ["synchronous", "synchronous at 2 times the learning rate", "synchronous at 4 times the learning rate"]
    again = price_ways(experiment, found, step_s, lambda *_: pytest.fail("trained"), tmp_path)
    assert found.best(3, again.others, again.seconds) == found.best(3, first.others, first.seconds)
    assert again.notes == first.notes


def test_every_strategy_that_was_simulated_or_ran_is_a_trial_of_one_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DiLoCo and other rates, too, once each; a rate moves no clock; the page has a row for each, and marks the winner's."""
    experiment = searched(tmp_path, local_steps=(1, 4), lr_scale=(1.0, 2.0), gradient_merge=(1,), finalists=2, pairs=4)[0]
    monkeypatch.setattr("tuner.ways.REFINED", ())
    monkeypatch.setattr("tuner.tune.by_virtual_trainers", planted)

    def updates(leg: Leg) -> float | None:
        arrival = planted(experiment.replace(strategy=leg.strategy), 0.0)
        return None if arrival is None else arrival.steps + 0.01 * (leg.seed or 0)

    ran, folder = tune(experiment, out=tmp_path / "runs", runner=FakeRunner(experiment, step_s, updates=updates))
    assert sorted(trial.arm for trial in ran.trials if trial.arm is not None) == sorted(arm.name for arm in ran.arms)
    assert {"K = 4 and an outer optimizer", "synchronous at 2 times the learning rate"} <= {trial.way for trial in ran.trials}
    assert len({(*trial.parameters.values(), trial.way) for trial in ran.trials}) == len(ran.trials)
    of_way = {(trial.way.partition(" at ")[0], *trial.parameters.values()): trial.simulated_s for trial in ran.trials}
    assert all(of_way[(one.way.partition(" at ")[0], *one.parameters.values())] == one.simulated_s for one in ran.trials)
    report = read_report(folder)
    page = render(report)
    assert ran.verdict == "USE"
    assert f"{len(ran.trials)} strategies simulated" in page
    assert re.findall(r'<tr class="chosen"><td class="n">[^<]*</td><td class="name">([^<]*)</td><td>([^<]*)<', page) == [
        (f"{ran.finalist} (recommended)", name_of(ran.strategy))
    ]


@pytest.mark.slow
def test_legs_run_at_the_experiments_rate_and_runs_to_the_target_at_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate moves no clock, and one that is too high would leave the living script with no loss. The verdict says what it brings alone."""
    experiment = searched(tmp_path, lr_scale=(1.0, 2.0), pairs=8)[0]
    monkeypatch.setattr("tuner.ways.REFINED", ())
    monkeypatch.setattr("tuner.tune.by_virtual_trainers", planted)

    def updates(leg: Leg) -> float:
        arrival = planted(experiment.replace(strategy=leg.strategy), 0.0)
        return 400.0 if arrival is None else arrival.steps + 0.01 * (leg.seed or 0)

    runner = FakeRunner(experiment, step_s, updates=updates)
    ran, _ = tune(experiment, out=tmp_path / "runs", runner=runner)
    assert ran.strategy.lr_scale == 2
    assert {leg.strategy.lr_scale for leg in runner.legs if not leg.evaluate} == {1.0}
    assert {leg.strategy.lr_scale for leg in runner.legs if leg.evaluate} == {1.0, 2.0}
    assert ran.line.endswith("lr_scale = 2 alone needs 2.00x fewer steps, by virtual trainers (16 seeds), not run for real")
    assert ran.arms[-1].paced_by is None or ran.arms[-1].paced_by.lr_scale == 1


def test_a_script_tries_the_rates_of_the_file_with_its_own_strategy_and_the_fastest_local_steps(tmp_path: Path) -> None:
    """Each once, and none without the file's word."""
    experiment, found = searched(tmp_path, lr_scale=(2.0, 1.0, 2.0), diloco=False)
    script = experiment.replace(run=replace(experiment.run, launcher="command"))
    tried = [one.strategy for one in price_ways(script, found, step_s, None, tmp_path).others]
    assert [(one.local_steps, one.lr_scale) for one in tried] == [(1, 2.0), (16, 2.0)]
    silent = script.replace(tune=replace(script.tune, lr_scale=()))
    assert price_ways(silent, found, step_s, None, tmp_path).others == ()


def test_local_steps_that_fleet_advises_late_are_one_way(tmp_path: Path) -> None:
    """K = 4 from the first decay of the rate, by the advice and from the search: what both are is trained and named once."""
    experiment, _ = searched(tmp_path, diloco=False, gradient_merge=(1,), local_steps=(1, 4), adaptive=True)
    experiment = experiment.replace(workload=replace(experiment.workload, lr_decay=(LrDecay(step=20, factor=0.5),)))
    late = LOCAL.replace(localsgd_configs=replace(LOCAL.localsgd_configs, begin_step=20))
    found = search(experiment, search_space(experiment), late, out=tmp_path / "late", step_s=step_s)
    ways = price_ways(experiment, found, step_s, planted, tmp_path / "late")
    assert sum(note.startswith("K = 4 from step 20 has the step time") for note in map(str, ways.notes)) == 1


def test_a_way_whose_best_rate_fails_with_other_seeds_stays_at_the_experiments_rate(tmp_path: Path) -> None:
    """K = 4 takes 55 steps at twice the rate with the first seed and never arrives with the second, where the experiment's rate does."""
    experiment, found = searched(tmp_path, lr_scale=(1.0, 2.0), diloco=False, gradient_merge=(1,))

    def learn(one: Experiment, limit_s: float) -> Arrival | None:
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


def test_ways_that_vary_are_trained_at_the_defaults_best_rate_if_that_is_worth_it(tmp_path: Path) -> None:
    """Planted: the default takes 85 or 95 of 100 steps at twice the rate, of which 95 are not worth a note, nor another rate for others."""
    for steps, rate in ((85.0, 2.0), (95.0, 1.0)):
        experiment, found = searched(tmp_path / str(steps), lr_scale=(1.0, 2.0), adaptive=True, diloco=False, gradient_merge=(1,))
        asked: dict[str, list[float]] = {}

        def learn(one: Experiment, limit_s: float, asked: dict[str, list[float]] = asked, steps: float = steps) -> Arrival | None:
            own, scale = one.strategy, one.strategy.lr_scale
            asked.setdefault(name_of(own.replace(lr_scale=1.0)), []).append(scale)
            if own.adaptive_localsgd:
                return Arrival(90.0, 8.0)
            return Arrival(steps) if scale == 2 and not own.localsgd else planted(one.replace(strategy=own.replace(lr_scale=1.0)), limit_s)

        ways = price_ways(experiment, found, step_s, learn, tmp_path / str(steps))
        assert asked["adaptive K from 16 (paper)"] == asked["adaptive K from 16 (fleet)"] == [rate]
        assert [one.strategy.lr_scale for one in ways.others if one.strategy.adaptive_localsgd] == [rate]
        assert asked["K = 16"][0] == rate
        assert (ways.rated is None) == (rate == 1)


def test_a_refinement_is_given_up_where_the_best_is_there_sooner_and_left_out_where_it_cannot_be(tmp_path: Path) -> None:
    """By hand: 50 steps of 15 ms are as long as 73 of 10.25, of an outer rate of 0.4; two parts beside a step need rounds of four steps."""
    experiment, found = searched(tmp_path, local_steps=(1, 2), gradient_merge=(1,), fuse_grad_size_in_MB=(32.0,))
    experiment = experiment.replace(workload=replace(experiment.workload, eval_every=2, steps=100))
    asked: dict[str, int] = {}

    def learn(one: Experiment, _limit_s: float) -> Arrival | None:
        asked[name_of(one.strategy)] = one.workload.steps
        return Arrival(50.0) if one.strategy.localsgd_configs.outer_lr in (None, 0.7) else None

    def faster(strategy: DistributedStrategy) -> float:
        return step_s(strategy) - 0.00475 * (strategy.localsgd_configs.outer_lr == 0.4)

    price_ways(experiment, found, faster, learn, tmp_path)
    refined = {name: steps for name, steps in asked.items() if "of rate" in name or "beside" in name}
    of_rates = {0.4: round(50 * 0.015 / 0.01025) + 6, 1: 56}
    assert {
        f"K = 2 and an outer optimizer of rate {rate} and momentum 0.9": steps for rate, steps in of_rates.items()
    }.items() <= refined.items()
    assert not any("fragments" in name for name in refined)


def test_trainings_have_the_wire_of_the_experiment(tmp_path: Path) -> None:
    """The search tries both; what a rounded wire learns is the experiment's to say."""
    experiment, _ = searched(tmp_path, diloco=False, gradient_merge=(1,))
    experiment = experiment.replace(
        strategy=DistributedStrategy(bf16_allreduce=True), tune=replace(experiment.tune, wire=("fp32", "fp16", "bf16"), allow=("wire16",))
    )
    found = search(experiment, search_space(experiment), DistributedStrategy(), out=tmp_path / "wires", step_s=step_s)
    assert {one.strategy.fp16_allreduce for one in found.tried} == {False, True}
    wires: set[tuple[bool, bool]] = set()

    def learn(one: Experiment, limit_s: float) -> Arrival | None:
        wires.add((one.strategy.fp16_allreduce, one.strategy.bf16_allreduce))
        return planted(one, limit_s)

    price_ways(experiment, found, step_s, learn, tmp_path / "wires")
    assert wires == {(False, True)}


@pytest.mark.slow
def test_a_way_that_real_runs_rule_out_is_followed_by_the_next_at_its_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual trainers: 45 steps for DiLoCo, 50 for the default at twice the rate. Real DiLoCo never arrives; one finalist is asked for."""
    experiment = searched(tmp_path, lr_scale=(1.0, 2.0), pairs=8, finalists=1, gradient_merge=(1,))[0]
    monkeypatch.setattr("tuner.ways.REFINED", ())

    def is_diloco(strategy: DistributedStrategy) -> bool:
        return strategy.localsgd_configs.has_outer and strategy.local_steps == 4

    def learn(one: Experiment, limit_s: float) -> Arrival | None:
        return Arrival(45.0) if is_diloco(one.strategy) else planted(one, limit_s)

    def updates(leg: Leg) -> float | None:
        arrival = planted(experiment.replace(strategy=leg.strategy), 0.0)
        return None if arrival is None or is_diloco(leg.strategy) else arrival.steps + 0.01 * (leg.seed or 0)

    monkeypatch.setattr("tuner.tune.by_virtual_trainers", learn)
    ran, _ = tune(experiment, out=tmp_path / "runs", runner=FakeRunner(experiment, step_s, updates=updates))
    first = next(arm for arm in ran.arms if arm.name == "candidate 1")
    assert (name_of(first.strategy), first.rejected is None) == ("K = 4 and an outer optimizer", False)
    assert (ran.verdict, name_of(ran.strategy)) == ("USE", "synchronous at 2 times the learning rate")
    assert ran.to_target == pytest.approx(100 * 0.020 / (50 * 0.019), rel=0.02)


@pytest.mark.slow
def test_an_answer_by_simulation_says_what_the_rate_alone_would_do(tmp_path: Path) -> None:
    """As a verdict does: DiLoCo in 90 steps, at any rate; the default in 50 at twice the rate, in 100 at its own."""
    experiment = searched(tmp_path, lr_scale=(1.0, 2.0), gradient_merge=(1,))[0]

    def learn(one: Experiment, limit_s: float) -> Arrival | None:
        own = one.strategy if not one.strategy.localsgd else one.strategy.replace(lr_scale=1.0)
        return Arrival(5.0) if own.localsgd_configs.has_outer and own.local_steps == 4 else planted(one.replace(strategy=own), limit_s)

    answer, _ = tune_simulated(experiment, out=tmp_path / "simulated", learn=learn)
    assert answer.strategy.localsgd_configs.has_outer
    assert "lr_scale = 2 alone needs 2.00x fewer steps" in answer.line
