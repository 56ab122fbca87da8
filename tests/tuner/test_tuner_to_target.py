"""Updates to the target over seeds: closed forms, a second likelihood, and how often the interval of both factors holds."""

import math

import numpy as np
import pytest
from scipy import stats

from tuner.sequential import ERROR, judge, looks
from tuner.to_target import Updates


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
