import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from scipy import stats
from tuner_fakes import FakeRunner, StepS, layers_experiment, target_experiment

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.result import RunResult
from fleetbench.strategy import DistributedStrategy
from real.leg import Leg
from real.processes.diagnosis import LegFailed
from tuner.budget import leg_steps_of
from tuner.ledger import FIRST_SHARE
from tuner.real_runs import RealRuns
from tuner.recommendation import Arm, Recommendation
from tuner.sequential import ERROR
from tuner.verify import verify

DEFAULT = DistributedStrategy()
FUSED = DistributedStrategy(fuse_grad_size_in_MB=1.0)


def local(k_steps: int) -> DistributedStrategy:
    """Local SGD with K local steps."""
    return DistributedStrategy().replace(localsgd=True, localsgd_configs={"k_steps": k_steps})


def arms(**strategies: DistributedStrategy) -> list[Arm]:
    """The default and others, by name."""
    return [Arm(name=name, strategy=strategy, simulated_s=0.01) for name, strategy in {"default": DEFAULT, **strategies}.items()]


def legs_of(runner: FakeRunner, folder: Path) -> RealRuns:
    """Legs through a fake runner."""
    return RealRuns(experiment=runner.experiment, runner=runner, folder=folder, step_s=0.01)


def verified(
    experiment: Experiment,
    tried: list[Arm],
    folder: Path,
    step_s: StepS,
    time_to_target_s: Callable[[DistributedStrategy], float | None] | None = None,
    noise: Callable[[int], float] = lambda _: 1.0,
) -> tuple[Recommendation, FakeRunner]:
    """A verification over a fake runner."""
    runner = FakeRunner(experiment, step_s, time_to_target_s, noise)
    return verify(experiment, tried, legs_of(runner, folder)), runner


def by_fusion(strategy: DistributedStrategy) -> float:
    """Small buckets take 10 ms a step, large ones 12."""
    return 0.010 if strategy.fuse_grad_size_in_MB <= 1 else 0.012


def by_local_steps(strategy: DistributedStrategy) -> float:
    """More local steps are faster: 16 take half of the default's time, 2 take nine tenths."""
    return {1: 0.012, 2: 0.0108, 16: 0.006}[strategy.local_steps] * (0.95 if strategy.fuse_grad_size_in_MB <= 1 else 1)


def test_the_choosing_round_runs_forward_then_backward(tmp_path: Path) -> None:
    """Three arms run in the order A B C C B A, all from where training is, for the experiment's leg length."""
    two = DistributedStrategy(fuse_grad_size_in_MB=2.0)
    _, runner = verified(layers_experiment(), arms(one=FUSED, two=two), tmp_path, by_fusion)
    first = runner.legs[:6]
    assert [leg.strategy for leg in first] == [DEFAULT, FUSED, two, two, FUSED, DEFAULT]
    assert {(leg.start, leg.steps, leg.evaluate) for leg in first} == {("continue", 5, False)}


def test_void_runs_leave_the_verdict_and_are_counted(tmp_path: Path) -> None:
    """Two of the ten legs ran while the testbed's machine was busy, one of them ten times as slow in the second pair."""
    experiment = layers_experiment(pairs=3)
    runner = FakeRunner(experiment, by_fusion, void=lambda number: number in (1, 6), noise=lambda number: 10.0 if number == 6 else 1.0)
    found = verify(experiment, arms(one=FUSED), legs_of(runner, tmp_path))
    assert str(found.noise) == "2 runs beside other programs did not count"
    assert (found.verdict, len(found.pairs)) == ("USE", 2)
    assert [arm.legs for arm in found.arms] == ["5", "5, 2 void"]
    assert found.speedup is not None
    assert found.speedup == pytest.approx(1.2)
    never = verify(experiment, arms(one=FUSED), legs_of(FakeRunner(experiment, by_fusion, void=lambda number: number > 5), tmp_path))
    assert (never.verdict, never.undecided, len(never.pairs)) == ("KEEP DEFAULT", True, 1)
    assert "one has 1 pair, and an interval needs 2" in never.reason
    quiet = verify(experiment, arms(one=FUSED), legs_of(FakeRunner(experiment, by_fusion), tmp_path))
    assert quiet.noise is not None
    assert quiet.noise.num_void == 0


def test_fresh_pairs_alternate(tmp_path: Path) -> None:
    """After the choosing round the pairs run A B, B A, A B, ..., and the verdict counts only them."""
    found, runner = verified(layers_experiment(pairs=3), arms(one=FUSED), tmp_path, by_fusion)
    assert [leg.strategy for leg in runner.legs[4:]] == [DEFAULT, FUSED, FUSED, DEFAULT, DEFAULT, FUSED]
    assert [pair.default_first for pair in found.pairs] == [True, False, True]
    assert all((pair.default_s, pair.finalist_s) == pytest.approx((0.012, 0.010)) for pair in found.pairs)


def test_a_planted_gain_is_used(tmp_path: Path) -> None:
    """10 against 12 ms with 1 % of noise is a speed-up of 1.2, and known after four pairs of at most 48."""
    found, runner = verified(
        layers_experiment(pairs=48), arms(one=FUSED), tmp_path, by_fusion, noise=lambda number: 1 + 0.01 * (-1) ** (number // 3)
    )
    assert found.verdict == "USE"
    assert found.finalist == "one"
    assert found.low is not None
    assert found.high is not None
    assert found.low <= 1.2 <= found.high
    assert (len(found.pairs), len(runner.legs)) == (4, 2 * 2 + 2 * 4)
    assert str(found.noise).startswith("the default's own legs differ by 1.")


@pytest.mark.slow
def test_a_proved_gain_is_measured_until_it_is_known_how_large_it_is(tmp_path: Path) -> None:
    """Half of the time with 12 % of noise is known to be faster after four pairs, by how much is not: more are run, if there is room."""
    half = lambda strategy: 0.005 if strategy == FUSED else 0.010  # noqa: E731  # one line
    noise = lambda number: 1 + 0.12 * (-1) ** (number // 3)  # noqa: E731  # one line
    wide, _ = verified(layers_experiment(pairs=4), arms(one=FUSED), tmp_path / "four", half, noise=noise)
    found, _ = verified(layers_experiment(pairs=48), arms(one=FUSED), tmp_path / "many", half, noise=noise)
    assert (wide.verdict, found.verdict) == ("USE", "USE")
    assert None not in (wide.low, wide.high, found.low, found.high)
    assert wide.high / wide.low > 1.15**2  # type: ignore[operator]  # both are known
    assert found.high / found.low <= 1.15**2  # type: ignore[operator]  # both are known
    assert len(found.pairs) > len(wide.pairs)
    runner = FakeRunner(layers_experiment(pairs=48, budget_minutes=14 / 6), half, noise=noise)
    now = iter(10.0 * ((number + 1) // 2) for number in range(100))
    legs = RealRuns(experiment=runner.experiment, runner=runner, folder=tmp_path / "short", step_s=1.0, clock=lambda: next(now))
    short = verify(runner.experiment, arms(one=FUSED), legs)
    assert (short.verdict, short.undecided, len(short.pairs), len(runner.legs)) == ("USE", False, 4, 14)


def test_lucky_choosing_runs_do_not_count(tmp_path: Path) -> None:
    """An arm that was fast by luck while it was chosen and is not in fresh pairs is not recommended."""
    found, _ = verified(
        layers_experiment(),
        arms(one=FUSED),
        tmp_path,
        lambda _: 0.012,
        noise=lambda number: 0.7 if number in (1, 2) else 1 + 0.01 * (number % 3),
    )
    assert found.verdict == "KEEP DEFAULT"
    assert found.finalist == "one"
    assert found.speedup is not None
    assert f"{found.speedup:.3f}x [{found.low:.3f}, {found.high:.3f}]" in found.reason
    assert "4 pairs" in found.reason


def test_nothing_to_gain_keeps_the_default(tmp_path: Path) -> None:
    """Where the default was the fastest, pairs with the fastest of the others prove it; what was slower still is not compared."""
    slower = DistributedStrategy(fuse_grad_size_in_MB=0.5)
    found, runner = verified(layers_experiment(pairs=48), arms(one=FUSED, two=slower), tmp_path, lambda s: 0.022 - by_fusion(s))
    assert (found.verdict, found.undecided, found.finalist, len(found.pairs)) == ("KEEP DEFAULT", False, "one", 4)
    assert len(runner.legs) == 6 + 8
    assert found.line == "KEEP DEFAULT: no gain above 2 %: one measured 0.833x [0.833, 0.833] in 4 pairs; one is fuse_grad_size_in_MB = 1.0"


@dataclass
class Dying(FakeRunner):
    """Where one strategy runs out of memory in its fourth leg."""

    def run(self, leg: Leg) -> RunResult:
        """See ``Runner``."""
        if leg.strategy == FUSED and sum(before.strategy == FUSED for before in self.legs) == 3:
            raise LegFailed("out of memory", "rank 1")
        return FakeRunner.run(self, leg)


@pytest.mark.slow
def test_a_finalist_that_fails_in_the_comparison_makes_room_for_the_next(tmp_path: Path) -> None:
    """Its pairs are gone with it; where no other is left, the reason says of what it failed."""
    two = DistributedStrategy(fuse_grad_size_in_MB=0.5)
    step_s = lambda strategy: {FUSED: 0.008, two: 0.010}.get(strategy, 0.012)  # noqa: E731  # one line, used twice
    runner = Dying(layers_experiment(), step_s)
    found = verify(runner.experiment, arms(one=FUSED, two=two), legs_of(runner, tmp_path / "two"))
    assert (found.verdict, found.finalist, len(found.pairs)) == ("USE", "two", 4)
    assert found.arms[1].rejected == "in the comparison failed on rank 1: out of memory"
    runner = Dying(layers_experiment(), step_s)
    alone = verify(runner.experiment, arms(one=FUSED), legs_of(runner, tmp_path / "alone"))
    assert (alone.verdict, alone.finalist, alone.pairs) == ("KEEP DEFAULT", None, ())
    assert alone.reason == "what is faster was rejected: one in the comparison failed on rank 1: out of memory"


@pytest.mark.parametrize(("minutes", "used"), [(None, "candidate 1"), (20 / 60, "default")])
@pytest.mark.slow
def test_what_the_legs_teach_of_the_simulator_names_another_arm(tmp_path: Path, minutes: float | None, used: str) -> None:
    """16-bit wires are simulated a third too fast: what ran tells so, and the best of the rest runs and wins; not on a small budget."""
    experiment = layers_experiment(pairs=48, budget_minutes=minutes, finalists=1)
    best, wide = DistributedStrategy(nccl_comm_num=2, sync_nccl_allreduce=False), DistributedStrategy(bf16_allreduce=True)
    rounded = DistributedStrategy(fp16_allreduce=True)
    tried = [Arm(name="default", strategy=DEFAULT, simulated_s=0.012), Arm(name="one", strategy=rounded, simulated_s=0.009)]
    runner = FakeRunner(experiment, lambda strategy: 0.010 if strategy == best else 0.0121)
    legs = RealRuns(experiment=experiment, runner=runner, folder=tmp_path, step_s=0.01, clock=lambda: len(runner.legs))
    prepared: list[str] = []

    def prepare(arm: Arm) -> Arm:
        prepared.append(arm.name)
        return arm

    found = verify(experiment, tried, legs, others={rounded: 0.009 / 0.012, wide: 0.0091 / 0.012, best: 0.0095 / 0.012}, prepare=prepare)
    assert (found.finalist if found.verdict == "USE" else "default") == used
    assert prepared == ([used] if minutes is None else [])
    if minutes is None:
        assert [leg.strategy for leg in runner.legs[4:8]] == [DEFAULT, best, best, DEFAULT]


def test_a_candidate_that_misses_the_target_is_rejected_however_fast(tmp_path: Path) -> None:
    """K = 16 takes half of the time and misses the target: the next fastest is taken."""
    found, _ = verified(
        target_experiment(),
        arms(fast=local(16), fused=FUSED),
        tmp_path,
        by_local_steps,
        lambda strategy: None if strategy.local_steps == 16 else 1.0,
    )
    fast = found.arms[1]
    assert found.verdict == "USE"
    assert found.finalist == "fused"
    assert fast.rejected is not None
    assert "does not reach the target" in fast.rejected
    assert fast.target is not None
    assert (fast.target.reached, fast.target.final_loss) == (False, 0.9)


def test_a_candidate_that_is_later_at_the_target_is_rejected(tmp_path: Path) -> None:
    """Faster steps, more of them: K = 2 reaches the target later than the default and is not recommended."""
    late = {1: 1.0, 2: 1.1}
    found, _ = verified(target_experiment(), arms(late=local(2)), tmp_path, by_local_steps, lambda s: late[s.local_steps])
    assert found.verdict == "KEEP DEFAULT"
    assert found.finalist is None
    assert found.arms[1].rejected is not None
    assert "later than the default" in found.arms[1].rejected
    assert "late" in found.reason
    assert found.pairs == ()


@pytest.mark.slow
def test_one_run_to_the_target_stands_for_all_that_train_alike(tmp_path: Path) -> None:
    """The default's for what differs in buckets alone; one of DiLoCo for another, whose time to it is less by that of its steps."""
    two = DistributedStrategy().replace(localsgd=True, localsgd_configs={"k_steps": 2, "outer_lr": 0.7, "outer_momentum": 0.9})
    tight = two.replace(fuse_grad_size_in_MB=1.0)
    time_s = {DEFAULT: 1.0, tight: 1.1, two: 0.1}
    found, runner = verified(target_experiment(), arms(two=two, tight=tight, fused=FUSED), tmp_path, by_step, lambda s: time_s[s])
    assert [leg.strategy for leg in runner.legs if leg.evaluate] == [DEFAULT, tight]
    targets = [arm.target.time_s for arm in found.arms if arm.target is not None]
    assert targets == pytest.approx([1.0, 1.1 * 0.0108 / 0.0100, 1.1, 1.0 * 0.0110 / 0.0120])
    assert [arm.rejected is not None for arm in found.arms] == [False, True, True, False]
    assert (found.verdict, found.finalist) == ("USE", "fused")
    assert "x [1.09, 1.09] to loss 0.5 and a step, n = 4 pairs" in found.line


def by_step(strategy: DistributedStrategy) -> float:
    """Two local steps take 10.8 ms, 10 with small buckets; one takes 12, or 11."""
    return {2: (0.0108, 0.0100), 1: (0.012, 0.011)}[strategy.local_steps][strategy.fuse_grad_size_in_MB <= 1]


def test_a_target_that_nobody_reaches_rules_everything_out(tmp_path: Path) -> None:
    """What does not reach the target is not recommended, however fast; where the default misses it too, a note says so."""
    found, _ = verified(target_experiment(), arms(fast=local(16), fused=FUSED), tmp_path, by_local_steps, lambda _: None)
    assert found.finalist is None
    assert found.verdict == "KEEP DEFAULT"
    assert found.reason.startswith("no strategy that was tried reached loss 0.5 in 40 steps")
    assert all(arm.rejected is not None for arm in found.arms[1:])
    assert any("default does not reach the target" in note for note in found.notes)


def test_local_steps_that_reach_what_the_default_misses_are_used(tmp_path: Path) -> None:
    """The default misses the target and K = 16 reaches it: it may be recommended."""
    found, _ = verified(target_experiment(), arms(fast=local(16)), tmp_path, by_local_steps, lambda s: 2.0 if s.localsgd else None)
    assert (found.verdict, found.finalist) == ("USE", "fast")


def seeded(
    updates: Callable[[int, bool], float | None], folder: Path, by_seed: float = 0.001, **tune: object
) -> tuple[Recommendation, FakeRunner]:
    """K = 16, in half of a step's time, against the default, on trainers whose updates to the target depend on the seed and on K."""
    experiment = target_experiment(**tune)
    experiment = experiment.replace(run=replace(experiment.run, device="cpu"))
    runner = FakeRunner(experiment, by_local_steps, updates=lambda leg: updates(leg.seed or 0, leg.strategy.localsgd), by_seed=by_seed)
    return verify(experiment, arms(fast=local(16)), legs_of(runner, folder)), runner


@pytest.mark.sample(3)
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_fewer_than_five_seeds_prove_no_gain_to_a_target(number: int, tmp_path: Path) -> None:
    """Half of a step's time for equal updates: twice as soon with each of a few seeds, and undecided, with an interval of a prior spread.

    By hand, of one seed: Student's t with 4 degrees of freedom times 0.2. What is half as soon has no gain all the same.
    """
    found, runner = seeded(lambda seed, _: 80.0 + seed, tmp_path / "soon", target_seeds=number)
    assert (found.verdict, found.undecided, found.seeds, len(found.pairs)) == ("KEEP DEFAULT", True, number, 4)
    runs = f"{number} {'was' if number == 1 else 'were'} run"
    assert f"USE to a target takes runs of 5 seeds, and {runs}: set tune.target_seeds = 5" in found.line
    assert found.to_target_low is not None
    half = stats.t.isf(0.9 * FIRST_SHARE * ERROR, 3 + number) * 0.2 * math.sqrt(4 / (3 + number) / number)
    assert math.log(2 / found.to_target_low) == pytest.approx(half, rel=1e-3)
    assert sum(leg.evaluate for leg in runner.legs) == 2 * number
    both = [(leg.seed, leg.strategy.localsgd) for leg in runner.legs if leg.evaluate]
    assert len({*both}) == len(both)


def test_a_budget_has_fewer_seeds(tmp_path: Path) -> None:
    """Half a second a step, warm-up too: 65 s until the first seed has run; a further one and eight legs take 80, and are run for 45."""
    experiment = target_experiment(target_seeds=5, budget_minutes=160 / 60, local_steps=(1,))
    experiment = experiment.replace(run=replace(experiment.run, device="cpu"))
    runner = FakeRunner(experiment, by_local_steps, updates=lambda leg: 80.0 + (leg.seed or 0) * (2 if leg.strategy.localsgd else 1))

    def clock() -> float:
        return sum(one.steps + one.warmup_steps for one in runner.legs) / 2

    legs = RealRuns(experiment=experiment, runner=runner, folder=tmp_path, step_s=0.5, clock=clock)
    found = verify(experiment, arms(fast=local(16)), legs)
    assert (found.verdict, found.undecided, found.seeds) == ("KEEP DEFAULT", True, 2)
    assert any(note.startswith("more than 2 seeds of fast's runs to the target are left out: the budget") for note in found.notes)
    minutes = float(found.line.split("--from with tune.budget_minutes = ")[1].split()[0])
    left_s = 6 * (40 + 5) / 2 + 20 * (leg_steps_of(experiment) + 5) / 2
    assert left_s / 60 < minutes < 2 * left_s / 60


@pytest.mark.slow
def test_a_metric_that_falls_at_the_target_rejects_a_finalist(tmp_path: Path) -> None:
    """In the mean of five seeds by 0.02, where 0.01 is allowed; where 0.03 is, the verdict says both. What no run reports is an error."""
    accuracy = {False: (0.95, 0.96, 0.94, 0.95, 0.95), True: (0.92, 0.95, 0.92, 0.93, 0.93)}

    def found(folder: str, drop: float, metric: str = "accuracy") -> Recommendation:
        experiment = target_experiment(metric=metric, metric_drop=drop)
        experiment = experiment.replace(run=replace(experiment.run, device="cpu"))
        runner = FakeRunner(
            experiment,
            by_local_steps,
            updates=lambda leg: 80.0 + (leg.seed or 0),
            metrics=lambda leg: {"accuracy": accuracy[leg.strategy.localsgd][leg.seed or 0]},
        )
        return verify(experiment, arms(fast=local(16)), legs_of(runner, tmp_path / folder))

    fallen = found("fallen", 0.01)
    assert fallen.verdict == "KEEP DEFAULT"
    assert fallen.arms[1].rejected == "accuracy is 0.93 at the target, and the default's 0.95: it may fall by tune.metric_drop = 0.01"
    allowed = found("allowed", 0.03)
    assert allowed.verdict == "USE"
    assert allowed.line.endswith("n = 4 pairs); accuracy 0.93, the default's 0.95")
    with pytest.raises(ConfigError, match="is nothing that a run reports") as caught:
        found("unknown", 0.01, "auc")
    assert (caught.value.where, "known here: accuracy;" in (caught.value.hint or "")) == ("tune.metric", True)


def test_runs_to_the_target_are_paired_over_seeds(tmp_path: Path) -> None:
    """Five seeds of both, a tenth more updates of K = 16 in half of a step's time: the interval is Student's of the five log ratios.

    Its ends have nine tenths of the error: looks at the sum of two factors err more often than at one.
    """
    more = (1.0, 1.1, 1.21, 1.1, 1.1)
    found, runner = seeded(lambda seed, is_local: 80.0 * (1 + seed) * (more[seed] if is_local else 1.0), tmp_path)
    seeds = [(leg.strategy.localsgd, leg.seed) for leg in runner.legs if leg.evaluate]
    assert seeds == [(way, seed) for seed in range(5) for way in (False, True)]
    assert (found.verdict, found.seeds) == ("USE", 5)
    ratios = [math.log(2 / one) for one in more]
    mean, half = stats.tmean(ratios), [float(stats.t.isf(0.9 * error, 4) * stats.sem(ratios)) for error in (FIRST_SHARE * ERROR, ERROR)]
    ends = math.exp(mean - half[0]), math.exp(mean + half[1])
    assert (found.to_target, found.to_target_low, found.to_target_high) == pytest.approx((2 / 1.1, *ends), rel=1e-3)
    assert (found.speedup, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
    assert found.line.endswith(f": 1.82x [{ends[0]:.2f}, {ends[1]:.2f}] to loss 0.5, n = 5 seeds (2.00x [2.00, 2.00] a step, n = 4 pairs)")


@pytest.mark.slow
def test_runs_that_never_arrive_are_counted(tmp_path: Path) -> None:
    """Where the finalist misses a seed of the default's, it is rejected, and no further seed is run; the default's misses are bounds."""
    missed, runner = seeded(lambda seed, is_local: None if is_local and seed == 1 else 80.0 + seed, tmp_path / "missed")
    assert missed.arms[1].rejected == "reaches the target loss 0.5 in 1 of 2 runs, the default in 2"
    assert [leg.seed for leg in runner.legs if leg.evaluate] == [0, 0, 1, 1]
    misses = lambda seed, is_local: None if seed == 1 and not is_local else (30.0 if is_local else 36.0) + seed  # noqa: E731  # one line
    wide, _ = seeded(misses, tmp_path / "wide", target_seeds=5)
    assert (wide.verdict, wide.seeds) == ("USE", 5)
    assert "n = 5 seeds (4 arrived)" in wide.line
    assert str(wide.arms[0].target) == "reached in 4 of 5 runs after 0.468 s"
