"""Ways of training, against virtual trainings to the last step, planted counts of steps, and a problem whose best K is neither end."""

from __future__ import annotations

import functools
import math
import operator
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from planted_ways import DILOCO, LOCAL, MANY, MERGED, planted, searched, step_s
from tuner_fakes import FakeRunner, profiled_experiment, target_experiment

from fleetbench.experiment import Experiment
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.profile import Profile, compute_key, name_profile
from fleetbench.strategy import DistributedStrategy
from sim.learning.virtual_training import train
from tuner.learning import Learn, by_virtual_trainers
from tuner.simulated.answer import tune_simulated
from tuner.space import name_of, way_of
from tuner.tune import tune
from tuner.ways import over_seeds, price_ways


@pytest.fixture(autouse=True)
def _without_refinements(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have tests of their own."""
    monkeypatch.setattr("tuner.ways.REFINED", ())


def test_steps_times_seconds_choose_and_not_seconds_alone(tmp_path: Path) -> None:
    """By hand: 100 steps of 19 ms, 110 of 12.25, 90 of 12.25, 300 of 10.6, 150 of 14.5: DiLoCo with K = 4 first, K = 4 second.

    One of the default's own way stays among them; what never arrives is left out, and each way takes the best bucket size.
    """
    experiment, found = searched(tmp_path)
    ways = price_ways(experiment, found, step_s, planted, tmp_path)
    best = found.best(3, ways.others, ways.seconds)
    assert [name_of(tried.strategy) for tried in best] == ["K = 4 and an outer optimizer", "K = 4", "synchronous"]
    assert [ways.seconds(tried) for tried in best] == pytest.approx([90 * 0.01225, 110 * 0.01225, 100 * 0.019])
    assert {tried.strategy.fuse_grad_size_in_MB for tried in best} == {1.0}
    assert [name_of(tried.strategy) for tried in found.best(3)] == ["K = 16", "K = 4", "synchronous"]
    every = found.best(20, ways.others, ways.seconds)
    assert "K = 16 and an outer optimizer" not in {name_of(tried.strategy) for tried in every}
    assert "2 micro-batches" in "; ".join(name_of(tried.strategy) for tried in every)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_what_there_is_no_time_for_is_named_and_left_out(tmp_path: Path, number: int) -> None:
    """Time passes in the n-th training. With the default and another way the others are left out; with less the seconds of a step rank."""
    experiment, found = searched(tmp_path)
    asked: list[float] = []

    def slow(one: Experiment, limit_s: float, _at_least: int = 0) -> float | None:
        asked.append(limit_s)
        if len(asked) > number:
            raise TimeoutError
        return planted(one, limit_s)

    ways = price_ways(experiment, found, step_s, slow, tmp_path)
    assert len(asked) == number + 1
    assert all(0 < limit_s <= experiment.tune.search_seconds for limit_s in asked)
    best = found.best(3, ways.others, ways.seconds)
    if number < 3:
        assert best == found.best(3)
        assert str(ways.notes[-1]).endswith("ways of training are ranked by the seconds of a step alone")
    else:
        assert [name_of(tried.strategy) for tried in best] == ["synchronous", "K = 16", "K = 16"]
        left = "K = 4, K = 4 and an outer optimizer, synchronous and 2 micro-batches an update"
        seconds = f"tune.search_seconds = {experiment.tune.search_seconds:g}"
        assert str(ways.notes[-1]) == f"{left} are not trained: there was no time; raise {seconds}"


def test_a_tuning_that_is_taken_up_again_has_the_same_ways(tmp_path: Path) -> None:
    """What was learnt is not asked for twice."""
    experiment, found = searched(tmp_path)
    first = price_ways(experiment, found, step_s, planted, tmp_path)
    assert price_ways(experiment, found, step_s, lambda *_: pytest.fail("asked again"), tmp_path) == first


def test_seeds_are_whole_rows(tmp_path: Path) -> None:
    """Of three seeds two ways have time for two. That the first seed arrives was known before, but not that it stays there."""
    experiment, found = searched(tmp_path)
    ways = price_ways(experiment, found, step_s, planted, tmp_path)
    asked: list[int] = []

    def slow(one: Experiment, limit_s: float, _at_least: int = 0) -> float | None:
        if len(asked) == 4:
            raise TimeoutError
        asked.append(one.run.seed)
        steps = planted(one, limit_s)
        return None if steps is None else steps + one.run.seed

    ways = over_seeds(experiment, ways, [LOCAL], slow, tmp_path, range(3), limit_s=30.0)
    assert ways.updates == {way_of(experiment.strategy): (100.0, 101.0), way_of(LOCAL): (110.0, 111.0)}
    assert asked == [0, 1, 1, 2]
    assert over_seeds(experiment, ways, [LOCAL], pytest.fail, tmp_path, range(3), limit_s=30.0).updates == ways.updates, "taken up again"
    by = "by virtual trainers of 2 seeds, not lost before the default is there"
    assert str(ways.notes[-1]) == f"steps to loss 0.5, {by}: synchronous: 100, 101; K = 4: 110, 111"


def script_of(experiment: Experiment) -> Experiment:
    """The same as a user's script."""
    return experiment.replace(run=replace(experiment.run, launcher="command"))


@pytest.mark.parametrize(("steps", "tried"), [((1, 4, 16), (16, 32)), ((1, 4), (4, 8)), ((1,), ())])
def test_a_script_tries_an_outer_optimizer_beside_its_finalists(tmp_path: Path, steps: tuple[int, ...], tried: tuple[int, ...]) -> None:
    """On the K of the fastest steps and the next one, with a note; on none where no K is searched, or without ``tune.diloco``."""
    experiment, found = searched(tmp_path, local_steps=steps)
    ways = price_ways(script_of(experiment), found, step_s, pytest.fail, tmp_path)  # type: ignore[arg-type]  # called, it fails
    assert [one.strategy.local_steps for one in ways.others] == list(tried)
    assert all(one.strategy.localsgd_configs.outer_momentum == 0.9 and one.strategy.fuse_grad_size_in_MB == 1.0 for one in ways.others)
    assert bool(ways.notes) == bool(tried)
    without, found = searched(tmp_path / "without", local_steps=steps, diloco=False)
    assert price_ways(script_of(without), found, step_s, None, tmp_path).others == ()


def test_ways_are_compared_on_the_experiments_wire(tmp_path: Path) -> None:
    """Whatever wire is the fastest among the strategies of a way: the default's steps are those of the default."""
    experiment, found = searched(tmp_path, wire=("fp32", "fp16"))
    asked: list[Experiment] = []

    def noting(one: Experiment, limit_s: float, _at_least: int = 0) -> float | None:
        asked.append(one)
        return planted(one, limit_s)

    price_ways(experiment, found, step_s, noting, tmp_path)
    assert not any(one.strategy.fp16_allreduce for one in asked)
    assert experiment.replace(strategy=asked[0].strategy).strategy.local_steps == 1


@pytest.mark.parametrize("without", [{"target_loss": None}, {"model": "layers"}, {"learn": None}])
def test_nothing_is_asked_where_nothing_is_learnt(tmp_path: Path, without: dict[str, object]) -> None:
    """No target, no model, or a simulator that stands in."""
    experiment, found = searched(tmp_path)
    learn: Learn | None = pytest.fail  # type: ignore[assignment]  # called, it fails
    if "target_loss" in without:
        experiment = experiment.replace(workload=replace(experiment.workload, target_loss=None))
    elif "model" in without:
        experiment = target_experiment()
    else:
        learn = None
    ways = price_ways(experiment, found, step_s, learn, tmp_path)
    assert (ways.updates, ways.others, ways.notes) == ({}, (), ())


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", [DistributedStrategy(), LOCAL, DILOCO, MERGED], ids=["synchronous", "local", "outer", "merged"])
def test_a_training_to_the_target_is_the_begin_of_the_whole_one(strategy: DistributedStrategy) -> None:
    """Same losses and held-out losses up to there, the same crossing; and it is the trajectory of an experiment of so many steps."""
    workload = {"model": "digits_mlp", "steps": 60, "eval_every": 2, "lr": 0.3, "target_loss": 1.6}
    experiment = Experiment.from_dict({"name": "small", "workload": workload, "cluster": {"trainers_per_node": 2}})
    experiment = experiment.replace(strategy=strategy)
    whole, early = train(experiment), train(experiment, until=1.6)
    reached = whole.crossing(1.6)
    assert reached is not None
    last = reached.step + 2 * 2
    assert early.workload.steps == last < 60
    assert early.losses.tolist() == whole.losses[: len(early.losses)].tolist()
    assert early.held_out == whole.held_out[: len(early.held_out)]
    assert by_virtual_trainers(experiment, 600.0) == early.crossing(1.6).smooth == reached.smooth  # type: ignore[union-attr]
    short = train(experiment.replace(workload=replace(experiment.workload, steps=last)))
    assert (short.key, short.final_loss, short.local_steps) == (early.key, early.final_loss, early.local_steps)


@pytest.mark.slow
def test_a_tuning_takes_the_way_that_arrives_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real simulator and virtual trainers, runs by formula: what is recommended has the least product of steps and seconds.

    Arms have the steps of virtual trainers in the mean over two seeds, none of which a real run has. A tuning from its folder starts
    no trainers. By simulation alone the ways take as many steps.
    """
    experiment = profiled_experiment(
        tmp_path, local_steps=(1, 4), gradient_merge=(1,), thread_num=(1,), nccl_comm_num=(1,), wire=("fp32",), pairs=8, trials=30
    )
    experiment = experiment.replace(workload=replace(experiment.workload, steps=60, eval_every=2, lr=0.3, target_loss=1.0))
    monkeypatch.setattr("tuner.tune._VIRTUAL_SEEDS", 2)
    seeded = [experiment.replace(run=replace(experiment.run, seed=seed)) for seed in (5, 6)]

    @functools.cache
    def steps_of(strategy: DistributedStrategy) -> list[float]:
        arrivals = [by_virtual_trainers(one.replace(strategy=strategy), 600.0) for one in seeded]
        return [arrival for arrival in arrivals if arrival is not None]

    def learn(strategy: DistributedStrategy) -> float | None:
        steps, defaults = steps_of(strategy), steps_of(DistributedStrategy())
        if strategy == DistributedStrategy() or len(steps) < len(seeded):
            return statistics.fmean(steps) if steps else None
        return statistics.fmean(defaults) * statistics.geometric_mean(map(operator.truediv, steps, defaults))

    runner = FakeRunner(experiment, step_s, updates=lambda leg: (learn(leg.strategy) or 0) + 0.01 * (leg.seed or 0) or None)
    found, folder = tune(experiment, out=tmp_path, runner=runner)
    known = {name_of(arm.strategy): arm.virtual_updates for arm in found.arms}
    assert known["synchronous"] == pytest.approx(learn(DistributedStrategy()))
    of_ways = {name_of(arm.strategy.replace(lr_scale=1.0)) for arm in found.arms}
    assert {"synchronous", "K = 4", "K = 4 and an outer optimizer"} <= of_ways
    assert found.line.startswith("USE ")
    expected = {name: steps * step_s(arm.strategy) for arm in found.arms if (steps := known[name := name_of(arm.strategy)]) is not None}
    best = min(expected, key=lambda name: expected[name])
    assert name_of(found.strategy) == best == "K = 4 and an outer optimizer"
    assert sorted(expected.values())[1] > 1.3 * expected[best]  # no rounding of a machine's sums makes another way the first
    assert {leg.seed for leg in runner.legs if leg.evaluate} == {0, 1, 2, 3, 4}
    once = experiment.replace(run=replace(experiment.run, seed=4), tune=replace(experiment.tune, target_seeds=1))
    simulated, _ = tune_simulated(once, out=tmp_path / "simulated")
    tables = [next(note for note in one.notes if "by virtual trainers of seed 5" in note) for one in (found, simulated)]
    said = [{*table.partition("workload.lr): ")[2].split("; ")} for table in tables]
    assert said[0] == said[1]
    monkeypatch.setattr("real.job.session.Session._begin", lambda _: pytest.fail("trainers were started"))
    again, _ = tune(experiment, out=tmp_path / "later", earlier=folder)
    assert (again.line, again.pairs) == (found.line, found.pairs)


def simulated_only(tmp_path: Path, on_a_node: int = 1, **tune: object) -> Experiment:
    """Two nodes at 8 Mbit/s, next to no compute and 4 MB of gradients: an all-reduce of two takes S / B = 4 s."""
    inter = {"bandwidth": "8 Mbit/s", "latency": "0 s", "payload": True}
    cluster = {"nodes": 2, "trainers_per_node": on_a_node, "inter": inter, "intra": {**inter, "bandwidth": "80 Mbit/s"}}
    wanted = {
        "wire": ["fp32"],
        "local_steps": [1, 4, 16],
        "gradient_merge": [1, 2],
        "update_by_bucket": [False],
        "fusion": [],
        "target_seeds": 3,
        "lr_scale": [1.0],
    }
    wanted |= {"fuse_grad_size_in_MB": [32.0], "thread_num": [1], "nccl_comm_num": [1]} | tune
    workload = {"model": "digits_mlp", "steps": 400, "lr": 0.1, "target_loss": 0.5}
    experiment = Experiment.from_dict({"name": "far", "workload": workload, "cluster": cluster, "tune": wanted})
    layer = Layer(name="block", gradients=(Gradient(name="weight", numel=10**6, ready=1),), forward=1, backward=1)
    profile = Profile(machine="none", created="never", tables=(LayerTable(key=compute_key(experiment), layers=(layer,)),))
    return name_profile(experiment, profile, tmp_path / "profile.toml")


def by_seed(default: Sequence[float | None], many: Sequence[float | None]) -> Learn:
    """What is planted, but for the default and K = 16, which take other steps with each seed."""

    def learn(one: Experiment, limit_s: float, _at_least: int = 0) -> float | None:
        steps = {DistributedStrategy(): default, MANY: many}.get(one.strategy)
        own = None if steps is None else steps[one.run.seed % len(steps)]
        return planted(one, limit_s) if steps is None else own and own

    return learn


@pytest.mark.slow
def test_simulation_alone_ranks_by_time_to_the_target(tmp_path: Path) -> None:
    """By hand: 100 steps of 4 s, 200 of 1/16 of that, 90 of 1/4 with an outer optimizer at K = 4.

    At half the bandwidth all times are twice as long, and nothing is trained again.
    """
    asked: list[Experiment] = []

    def noting(one: Experiment, limit_s: float, _at_least: int = 0) -> float | None:
        asked.append(one)
        return by_seed((100.0, 110.0, 90.0), (200.0, 198.0, 198.0))(one, limit_s)

    found, _ = tune_simulated(simulated_only(tmp_path), out=tmp_path, learn=noting)
    ratios = [math.log(default / own) for default, own in ((100, 200), (110, 198), (90, 198))]
    assert (found.strategy.local_steps, found.strategy.localsgd_configs.has_outer) == (16, False)
    assert (found.default_s, found.step_s, found.speedup) == pytest.approx((4.0, 0.25, 16.0), rel=1e-4)
    assert sum(found.parts.values()) - found.parts["undelayed_s"] == pytest.approx(found.step_s, rel=1e-3)
    assert found.to_target == pytest.approx(16 * math.exp(statistics.fmean(ratios)), rel=1e-4)
    assert found.spread.updates_low == pytest.approx(2.920 * statistics.stdev(ratios) / math.sqrt(3), rel=1e-3)  # t of 2 at 95 %
    low, high = found.to_target_interval
    assert math.log(found.to_target / low) == pytest.approx(math.hypot(found.spread.model, found.spread.updates_low))
    assert found.line.endswith(
        f": 8.03x [{low:.2f}, {high:.2f}] to loss 0.5 (16.00x [{found.low:.2f}, {found.high:.2f}] a step; 3 seeds of virtual trainers)"
    )
    cases = {case.assumption: case for case in found.cases}
    declared, half = cases["as declared"], cases["bandwidth x 0.5"]
    assert (declared.default_s, declared.recommended_s) == pytest.approx((400.0, 400.0 / found.to_target), rel=1e-4)
    assert (half.default_s, half.recommended_s) == pytest.approx((2 * declared.default_s, 2 * declared.recommended_s), rel=1e-4)
    ways = {name_of(one.strategy) for one in asked}
    assert len(asked) == 6 + 3 * 5  # each way with a seed that chooses, and those that arrive with three more
    assert len(ways) == 6
    assert any("by virtual trainers of seed 3" in note and "synchronous: 100; K = 16: 200;" in note for note in found.notes)
    assert not any("is not simulated" in note for note in found.notes)
    rivals = {name_of(rival.strategy): rival.to_target for rival in found.runners_up}
    assert rivals["K = 4 and an outer optimizer"] == pytest.approx(4 * (100 * 110 * 90) ** (1 / 3) / 90, rel=1e-3)


@pytest.mark.slow
def test_servers_modes_are_priced_to_the_target(tmp_path: Path) -> None:
    """GeoSGD with K = 16 has the fastest step and takes four times K = 4's; asynchronous servers never arrive; nothing trains twice."""
    base = simulated_only(tmp_path, on_a_node=2)
    strategy = DistributedStrategy(mode="ps", fuse_grad_size_in_MB=32.0)
    experiment = base.replace(
        cluster=replace(base.cluster, servers=1), strategy=strategy, workload=replace(base.workload, optimizer="sgd", steps=600)
    )
    steps, asked = {"synchronous servers": 100.0, "GeoSGD with K = 4": 130.0, "GeoSGD with K = 16": 520.0}, list[tuple[str, int]]()

    def learn(one: Experiment, _limit_s: float, _at_least: int = 0) -> float | None:
        asked.append((name_of(one.strategy), one.run.seed))
        taken = steps.get(name_of(one.strategy))
        return taken and taken

    found, _ = tune_simulated(experiment, out=tmp_path, learn=learn)
    rivals = {name_of(rival.strategy): rival for rival in found.runners_up}
    assert name_of(found.strategy) == "GeoSGD with K = 4"
    assert rivals["GeoSGD with K = 16"].step_s < found.step_s
    assert not any("asynchronous" in name for name in rivals)
    assert found.to_target == pytest.approx(found.speedup * 100 / 130, rel=1e-6)
    assert sorted(asked) == sorted(set(asked))
    assert any(note.startswith("steps to the target are those of the declared cluster") for note in found.notes)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("default", "many", "chosen", "says"),
    [
        ((100.0, 100.0, 100.0), (200.0, None, 200.0), "K = 4 and an outer optimizer", "3 seeds of virtual trainers)"),
        ((100.0, None, 100.0), (200.0, 200.0, 200.0), "K = 16", "3 seeds of virtual trainers, 2 of which arrive with both)"),
        ((None, None, None), (200.0, 200.0, 200.0), "K = 16", "0 of which arrive with both)"),
    ],
)
def test_runs_that_never_arrive_are_censored_and_counted(
    tmp_path: Path, default: Sequence[float | None], many: Sequence[float | None], chosen: str, says: str
) -> None:
    """A way that arrives less often than the default is none; one that arrives more often takes at least as many times fewer steps."""
    found, _ = tune_simulated(simulated_only(tmp_path, diloco=True), out=tmp_path, learn=by_seed(default, many))
    assert name_of(found.strategy) == chosen
    assert found.line.endswith(says)
    assert found.to_target is not None
    assert ("at least 32.00x to loss" in found.line) == (default[0] is None)  # 400 steps of 4 s at least, over 200 of 0.25
    if default[1] is None and default[0] is not None:
        assert found.to_target > 16 / 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("reached", ["never", "no time"])
def test_what_is_not_known_to_arrive_is_not_recommended(reached: str, tmp_path: Path) -> None:
    """However fast its steps are, with fewer bits too; the notes say what to raise."""

    def learn(_experiment: Experiment, _limit_s: float, _at_least: int = 0) -> float | None:
        if reached == "no time":
            raise TimeoutError

    found, _ = tune_simulated(simulated_only(tmp_path, wire=["fp32", "bf16"]), out=tmp_path, learn=learn)
    assert (found.strategy.local_steps, found.keeps) == (1, True)
    assert any(note.startswith("no other way of training, and no other wire, is recommended: raise workload.steps") for note in found.notes)
