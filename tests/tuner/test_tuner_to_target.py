"""Updates to the target over seeds: closed forms, a second likelihood, and how often the interval of both factors holds."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from tuner_fakes import FakeRunner, target_experiment

from fleetbench.experiment import Experiment
from fleetbench.result import RunResult
from fleetbench.strategy import DistributedStrategy, LocalSGDConfigs
from fleetbench.target import crossing
from real.leg import Leg
from tuner.real_runs import RealRuns
from tuner.recommendation import Arm, Recommendation
from tuner.sequential import ERROR, judge, looks
from tuner.to_target import SPREAD, SPREAD_FREE, Updates, on_line
from tuner.verify import verify

LOCAL = DistributedStrategy(localsgd=True, localsgd_configs=LocalSGDConfigs(k_steps=4))
TARGET, WINDOW = 0.5, 20


def test_where_all_arrive_the_interval_is_students() -> None:
    """Of the log ratios, as scipy has it; the mean is theirs."""
    default, own = [100.0, 120.0, 90.0, 150.0], [80.0, 110.0, 70.0, 140.0]
    found = Updates.of_runs(default, own, 200)
    ratios = np.log(np.array(default) / own)
    expected = stats.ttest_1samp(ratios, 0).confidence_interval(0.90)
    assert found.mean == pytest.approx(ratios.mean())
    assert (found.mean - found.half(ERROR, -1), found.mean + found.half(ERROR, 1)) == pytest.approx((expected.low, expected.high))


def test_runs_that_do_not_arrive_bound_the_ratio_at_the_end_of_training() -> None:
    """The default's miss says at least, the finalist's at most; one of both says nothing. One seed has no interval, two that miss none."""
    found = Updates.of_runs([None, 100.0, None, 100.0], [50.0, None, None, 80.0], 200)
    assert found == Updates((math.log(4), math.log(0.5), math.log(1.25)), (1, -1, 0))
    assert (found.half(ERROR, -1), Updates((0.1,), (0,)).half(ERROR, -1)) == (math.inf, 0.0)


def test_a_bound_far_off_says_next_to_nothing_and_one_that_is_passed_moves_the_mean() -> None:
    """At least e^-3 of a ratio around 1 leaves mean and interval as they are; at least 1.3 draws the mean up, and its upper end more."""
    known = (0.0, 0.1, 0.05, -0.05)
    plain, far, near = Updates(known, (0,) * 4), Updates((*known, -3.0), (0, 0, 0, 0, 1)), Updates((*known, 0.26), (0, 0, 0, 0, 1))
    assert far.mean == pytest.approx(plain.mean, abs=1e-3)
    assert far.half(ERROR, -1) == pytest.approx(plain.half(ERROR, -1), rel=1e-2)
    assert near.mean > plain.mean + 0.02
    assert near.half(ERROR, 1) > near.half(ERROR, -1)


def test_the_likeliest_mean_is_that_of_scipys_censored_fit() -> None:
    """Six ratios, two of them at least what they are."""
    ratios = (0.1, 0.3, 0.2, 0.05, 0.25, 0.15)
    found = Updates(ratios, (0, 0, 1, 0, 1, 0))
    data = stats.CensoredData(uncensored=[0.1, 0.3, 0.05, 0.15], right=[0.2, 0.25])
    assert found.mean == pytest.approx(stats.norm.fit(data)[0], abs=2e-3)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("known", [(0, 0, 0), (0, 1, 0)])
def test_the_prior_of_few_seeds_is_that_of_its_posterior(known: tuple[int, ...]) -> None:
    """The interval of a mean under a scaled inverse chi-square prior of the variance, by integration on a grid.

    A bound far off changes nothing but by what its seed does not add.
    """
    ratios = (0.3, -3.0 if known[1] else 0.1, 0.0)
    updates = Updates(ratios, known, spread=SPREAD)
    deviations, means = np.geomspace(0.01, 20, 2000), np.linspace(-3, 3, 6001)
    prior = stats.invgamma(SPREAD_FREE / 2, scale=SPREAD_FREE * SPREAD**2 / 2).pdf(deviations**2) * deviations  # of the deviation
    exact = [one for one, how in zip(ratios, known, strict=True) if how == 0]
    likelihood = np.prod([stats.norm.pdf(one, means[:, None], deviations) for one in exact], axis=0)
    posterior = (likelihood * prior * np.gradient(deviations)).sum(axis=1).cumsum()
    low = means[np.searchsorted(posterior, ERROR * posterior[-1])]
    assert updates.mean - updates.half(ERROR, -1) == pytest.approx(low, abs=0.02 if known[1] else 2e-3)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("seeds", "spread", "censored"), [(3, 0.15, 0.0), (5, 0.18, 0.15)])
def test_the_interval_of_both_factors_holds_where_the_pairs_stop(seeds: int, spread: float, censored: float) -> None:
    """Runs differ by 15-18 % between seeds, half of which pairs share, and up to 15 % never arrive; steps have pairs of 0.06, to any look.

    Exactly at the threshold, USE is said no oftener than it may be.
    """
    generator, count = np.random.default_rng(13), 300
    common, own = generator.normal(0, spread * math.sqrt(0.5), (2, count, seeds, 1))[0], spread * math.sqrt(0.5)
    runs = 100 * np.exp(common + generator.normal(0, own, (count, seeds, 2)))
    runs[..., 1] /= 1.02 / 1.3
    steps = math.inf if not censored else float(np.quantile(runs, 1 - censored))
    pairs = generator.normal(math.log(1.3), 0.06, (count, 48))
    covered = used = known = 0
    for (default, finalist), ratios in zip(np.moveaxis(runs, 2, 1).tolist(), pairs.tolist(), strict=True):
        arrived = [[one if one <= steps else None for one in way] for way in (default, finalist)]
        updates = Updates.of_runs(*arrived, steps)
        if updates.num_known < 2:
            continue
        known += 1
        found = next(one for look in looks(48) if (one := judge(ratios[:look], 0.02, 48, updates=updates)) is not None)
        covered += found.speedup.low <= 1.02 <= found.speedup.high
        used += found.verdict == "USE"
    assert known > 0.9 * count
    assert covered / known > 0.87
    assert used / known < 0.05 + 2.5 * math.sqrt(0.05 * 0.95 / known)


def losses_of(steps: int, slower: float, noise: float, generator: np.random.Generator) -> np.ndarray:
    """A batch's losses in so many steps, on a power law that is at the target after 150 steps, or ``slower`` times as many."""
    return 0.2 + 0.3 * (np.arange(1, steps + 1) / (150 * slower)) ** -0.5 + generator.normal(0, noise, steps)


def crossed(losses: np.ndarray) -> float:
    """Steps to the target by three windows in a row."""
    found = crossing([(WINDOW * (n + 1), float(loss)) for n, loss in enumerate(losses.reshape(-1, WINDOW).mean(1))], TARGET)
    assert found is not None
    return found.smooth


def arrival(losses: np.ndarray) -> tuple[float, float]:
    """Steps to the target by the line, and their deviation."""
    middles = [(WINDOW * n + (WINDOW + 1) / 2, float(loss)) for n, loss in enumerate(losses.reshape(-1, WINDOW).mean(1))]
    return on_line(middles, TARGET, crossed(losses))


@pytest.mark.sample(3)
@pytest.mark.parametrize(("slower", "noise"), [(1.0, 0.1), (1.3, 0.1), (1.3, 0.02)])
def test_one_run_each_has_an_interval_that_holds(slower: float, noise: float) -> None:
    """Of batches with noise, the true ratio of updates lies in the 90 % interval in 90 % of runs, and the crossing alone is farther off."""
    generator, held, off, off_alone = np.random.default_rng(5), 0, list[float](), list[float]()
    for _ in range(count := 400):
        runs = [losses_of(400, ratio, noise, generator) for ratio in (1.0, slower)]
        (default, one), (own, other) = map(arrival, runs)
        updates = replace(Updates.of_runs([default], [own], 400), noise=math.hypot(one, other))
        distance = updates.mean + math.log(slower)
        held += -updates.half(ERROR, 1) <= distance <= updates.half(ERROR, -1)
        off.append(distance)
        off_alone.append(math.log(crossed(runs[0]) / crossed(runs[1])) + math.log(slower))
    assert held / count > 0.85
    assert np.std(off) < np.std(off_alone)
    assert abs(float(np.mean(off))) < 0.03


def script_experiment(**tune: object) -> Experiment:
    """Of a user's script with a target, as many seeds as it has by default."""
    experiment = target_experiment(**{"pairs": 8, "target_seeds": None} | tune)
    return experiment.replace(run=replace(experiment.run, device="cpu", launcher="command", warmup_steps=0))


@dataclass
class Reporting(FakeRunner):
    """A script of 400 steps that reports losses, of which local steps need a tenth more; or ``losses``."""

    deviation: float = 0.0
    losses: np.ndarray | None = None

    def run(self, leg: Leg) -> RunResult:
        """See ``Runner``."""
        result = super().run(replace(leg, steps=400) if leg.evaluate else leg)
        if not leg.evaluate:
            return result
        dice = np.random.default_rng([int(leg.strategy.localsgd), leg.seed or 0])
        losses = losses_of(400, 1.1 if leg.strategy.localsgd else 1.0, self.deviation, dice)
        losses = losses if self.losses is None else self.losses
        return replace(result, steps=result.steps.assign(loss=losses[result.steps["step"].to_numpy() - 1]))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("fused_s", "used"), [(0.008, True), (0.0099, False)])
@pytest.mark.slow
def test_an_undecided_way_of_training_does_not_hide_a_sure_gain(tmp_path: Path, fused_s: float, used: bool) -> None:
    """Local steps promise most and stay undecided; smaller buckets, whose updates are the default's, take 0.8 of its time, or 0.99.

    Where they gain nothing, the verdict speaks of the undecided finalist, and others that train like it are not compared.
    """
    experiment = script_experiment()
    fused = DistributedStrategy(fuse_grad_size_in_MB=1.0)
    tried = {"default": DistributedStrategy(), "local": LOCAL, "like": LOCAL.replace(fuse_grad_size_in_MB=1.0), "fused": fused}
    times = {LOCAL: 0.0077, tried["like"]: 0.0078, fused: fused_s}
    runner = Reporting(experiment, lambda s: times.get(s, 0.01), updates=lambda _: 150.0, deviation=0.25)
    arms = [Arm(name=name, strategy=one, simulated_s=0.01) for name, one in tried.items()]
    found = verify(experiment, arms, RealRuns(experiment=experiment, runner=runner, folder=tmp_path, step_s=0.01))
    assert (found.verdict, found.undecided) == (("USE", False) if used else ("KEEP DEFAULT", True)), found.line
    assert found.finalist == ("fused" if used else "local")
    assert any("local measured" in note and note.endswith(": undecided") for note in found.notes)
    assert [arm.name for arm in found.arms if arm.target is not None and arm.target.from_arm is None] == ["default", "local"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("deviation", "verdict"), [(0.02, "USE"), (0.25, "KEEP DEFAULT")])
def test_a_scripts_verdict_knows_how_noisy_its_losses_are(tmp_path: Path, deviation: float, verdict: str) -> None:
    """1.3 times as fast a step, a tenth more updates: used where five seeds tell that, and else undecided, however alike the pairs are."""
    experiment = script_experiment()
    runner = Reporting(experiment, lambda s: 0.01 / (1.3 if s.localsgd else 1.0), updates=lambda _: 150.0, deviation=deviation)
    arms = [Arm(name=name, strategy=one, simulated_s=0.01) for name, one in (("default", DistributedStrategy()), ("local", LOCAL))]
    found: Recommendation = verify(experiment, arms, RealRuns(experiment=experiment, runner=runner, folder=tmp_path, step_s=0.01))
    assert (found.verdict, found.undecided) == (verdict, verdict != "USE"), found.line
    assert found.to_target is not None
    assert found.to_target_low is not None
    assert found.to_target_low < found.to_target
    assert [leg.seed for leg in runner.legs if leg.evaluate] == [seed for seed in range(5) for _ in range(2)]
    if verdict == "USE":
        assert found.to_target == pytest.approx(1.3 / 1.1, rel=0.02)
        assert ", n = 5 seeds (1.30x" in found.line
    else:
        assert "too uncertain (tune.target_seeds, workload.eval_every)" in found.reason


@pytest.mark.parametrize("seeds", [1, None])
def test_a_script_that_ignores_its_seed_proves_nothing(tmp_path: Path, seeds: int | None) -> None:
    """Twice as soon at the target in its one run: undecided. The verdict says what to change, and its interval is wider than a line's."""
    experiment, losses = script_experiment(target_seeds=seeds), losses_of(400, 1.0, 0.02, np.random.default_rng(3))
    runner = Reporting(experiment, lambda s: 0.01 / (2 if s.localsgd else 1), updates=lambda _: 150.0, losses=losses, by_seed=0.0)
    arms = [Arm(name=name, strategy=one, simulated_s=0.01) for name, one in (("default", DistributedStrategy()), ("local", LOCAL))]
    found = verify(experiment, arms, RealRuns(experiment=experiment, runner=runner, folder=tmp_path, step_s=0.01))
    assert (found.verdict, found.undecided, found.to_target) == ("KEEP DEFAULT", True, pytest.approx(2.0))
    change = "set tune.target_seeds = 5" if seeds else "the script ignores FLEETBENCH_SEED, from which it should take its seed"
    assert f"USE to a target takes runs of 5 seeds, and 1 was run: {change}" in found.line
    assert found.to_target_low is not None
    assert 1.2 < found.to_target_low < 1.5
