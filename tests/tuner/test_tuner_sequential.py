"""Verdicts that stop when they know: known critical values, errors by simulation, intervals, and what is left at the end."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from tuner.sequential import ERROR, Judgement, critical_values, gone, judge, looks, outlook, planned, spent
from tuner.to_target import SPREAD, Updates

GAIN = math.log(1.02)


def judged(ratios: Sequence[float], limit: int = 48, error: float = ERROR) -> Judgement:
    """The verdict on pairs that come one by one."""
    for count in range(1, limit + 1):
        found = judge(ratios[:count], 0.02, limit, error=error)
        if found is not None:
            return found
    raise AssertionError("the limit is a look")


def drawn(truth: float, deviation: float, count: int, seed: int, limit: int = 48) -> npt.NDArray[np.float64]:
    """Normal log ratios, shape ``(count, limit)``."""
    return np.random.default_rng(seed).normal(truth, deviation, (count, limit))


def test_the_looks_are_those_of_the_documents() -> None:
    """4, 6, 8, 12, 16, 24, 32, 48; a lower limit cuts them, a higher one goes on; fewer than four pairs have one look."""
    assert looks(48) == (4, 6, 8, 12, 16, 24, 32, 48)
    assert [looks(limit) for limit in (2, 3, 4, 10)] == [(2,), (3,), (4,), (4, 6, 8, 10)]
    assert looks(130)[-4:] == (64, 96, 128, 130)


@pytest.mark.parametrize("limit", [2, 3, 4])
def test_one_look_is_students_t(limit: int) -> None:
    """With one look the interval is the two-sided 90 % one of a fixed number of pairs, as scipy has it."""
    ratios = [0.11, 0.02, 0.05, 0.09][:limit]
    expected = stats.ttest_1samp(ratios, 0).confidence_interval(0.90)
    found = judged(ratios, limit)
    assert (math.log(found.speedup.low), math.log(found.speedup.high)) == pytest.approx((expected.low, expected.high))


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(("lag_1", "most"), [(0.0, 0.05), (0.2, 0.06), (0.4, 0.08)])
def test_pairs_that_resemble_their_neighbours_are_not_taken_for_independent(lag_1: float, most: float) -> None:
    """Exactly at ``min_gain``, with the error of a first finalist: a USE is as rare as asked for; without a word on it 10 and 17 % are."""
    ratios = drawn(0.0, 1.0, 2000, seed=8)
    for pair in range(1, 48):
        ratios[:, pair] = lag_1 * ratios[:, pair - 1] + math.sqrt(1 - lag_1**2) * ratios[:, pair]
    used = np.mean([judged(row, error=0.85 * ERROR).verdict == "USE" for row in (GAIN + 0.06 * ratios).tolist()])
    assert used < most + 2 * math.sqrt(most * (1 - most) / 2000)
    assert used > most / 4, "nor is it a verdict that never comes"


def test_the_error_of_all_looks_is_the_one_that_was_asked_for() -> None:
    """Twenty thousand sequences of fresh normal ratios: each end is crossed in 5 %, and up to a look in what it may spend."""
    at, ratios = looks(48), drawn(0.0, 1.0, 20_000, seed=5)
    values = critical_values(at, tuple(spent(look, 48) for look in at), ERROR)
    t = np.array([stats.ttest_1samp(ratios[:, :look], 0, axis=1).statistic for look in at])
    crossed = np.maximum.accumulate(t > np.array(values)[:, None], axis=0).mean(axis=1)
    below = (t < -np.array(values)[:, None]).any(axis=0).mean()
    allowed = ERROR * np.array([spent(look, 48) for look in at])
    assert crossed == pytest.approx(allowed, abs=4 * math.sqrt(ERROR / 20_000))
    assert below == pytest.approx(ERROR, abs=4 * math.sqrt(ERROR / 20_000))
    assert spent(3, 48) < spent(4, 48) < spent(32, 48) < spent(48, 48) == 1.0


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("gain", "deviation", "verdict", "least", "most"),
    [
        (0.98, 0.12, "USE", 0.0, 0.02),
        (1.00, 0.06, "USE", 0.0, 0.03),
        (1.02, 0.06, "USE", 0.02, 0.08),
        (1.02, 0.06, "NO GAIN", 0.02, 0.08),
        (1.05, 0.03, "USE", 0.95, 1.0),
        (1.05, 0.12, "NO GAIN", 0.0, 0.05),
        (0.90, 0.06, "NO GAIN", 0.99, 1.0),
    ],
)
def test_verdicts_are_as_often_wrong_as_they_may_be(gain: float, deviation: float, verdict: str, least: float, most: float) -> None:
    """Four hundred truths each; ``reports/tuner`` has thousands, with the noise of real runs."""
    found = [judged(row.tolist()) for row in drawn(math.log(gain), deviation, 400, seed=7)]
    assert least <= np.mean([one.verdict == verdict for one in found]) <= most


def test_intervals_hold_where_the_pairs_stop() -> None:
    """At whichever look that is, nine in ten have the truth between their ends, which lie around their mean."""
    found = [judged(row.tolist()) for row in drawn(math.log(1.05), 0.06, 600, seed=11)]
    assert len({one.pairs for one in found}) > 4
    assert np.mean([one.speedup.low <= 1.05 <= one.speedup.high for one in found]) >= 0.88
    assert all(one.speedup.low < one.speedup.mean < one.speedup.high for one in found)


def test_an_early_end_takes_half_of_the_error_that_is_left() -> None:
    """Five pairs of 48 are no look, and a budget that ends there makes it one: a wider interval than if no other could follow."""
    ratios = [0.07, 0.05, 0.06, 0.05, 0.08]
    assert judge(ratios, 0.02, 48) is None
    ended = judge(ratios, 0.02, 48, final=True)
    assert ended is not None
    assert (ended.verdict, ended.pairs) == ("USE", 5)
    fixed = stats.ttest_1samp(ratios, 0).confidence_interval(0.90)
    assert math.log(ended.speedup.low) < fixed.low, "the looks before cost something, and those that may follow"
    assert judge(ratios[:1], 0.02, 48, final=True) is None, "one pair has no interval"
    shares = planned(48, (5,))
    assert shares[5] == pytest.approx((1 + planned(48)[4] + spent(5, 48) - spent(4, 48)) / 2)
    assert (shares[48], gone(7, 48, (5,)), gone(3, 48), gone(4, 48)) == (1.0, shares[6], 0.0, spent(4, 48))
    assert [*shares.values()] == sorted(shares.values())


@pytest.mark.parametrize("ended", [(6, 12, 24), pytest.param(tuple(range(3, 48, 3)), marks=pytest.mark.slow)])
def test_tunings_that_go_on_from_each_other_err_no_more_than_one(ended: tuple[int, ...]) -> None:
    """A budget is raised again and again, at the threshold: USE in 5 % of 20,000, by scipy's t; in over 10 % if each tuning forgot."""
    ratios = drawn(0.0, 1.0, 20_000, seed=17)
    t = {look: stats.ttest_1samp(ratios[:, :look], 0, axis=1).statistic for look in sorted({*looks(48), *ended})}
    used, forgetting = (np.zeros(len(ratios), dtype=bool) for _ in range(2))
    for number, end in enumerate((*ended, 48)):
        for seen, shares in ((used, planned(48, ended[: number + 1])), (forgetting, {**planned(48), end: 1.0})):
            at = {look: shares[look] for look in sorted(shares) if look <= end}
            values = critical_values((*at,), (*at.values(),), ERROR)
            seen[:] |= np.any([t[look] > value for look, value in zip(at, values, strict=True)], axis=0)
    error = 3 * math.sqrt(ERROR / len(ratios))
    assert used.mean() < ERROR + error
    assert forgetting.mean() > 2 * ERROR


def test_an_undecided_verdict_says_what_its_error_may_still_prove() -> None:
    """Of a budget's end: the gain that 48 pairs of this spread show, whatever their mean; at the limit nothing is left to say."""
    noise = np.tile([0.06, -0.06], 24)
    near, nearer = (judge((GAIN + distance + noise)[:10].tolist(), 0.02, 48, final=True) for distance in (0.012, 0.006))
    assert near is not None
    assert nearer is not None
    assert near.provable == pytest.approx(nearer.provable)
    half = math.log(near.provable or 0.0) - GAIN
    deviation = float(np.std(noise[:10], ddof=1))
    assert 1.68 < half / (deviation / math.sqrt(48)) < 2.5, "more than Student's t for one look, and less than for a tenth of its error"
    assert outlook(near, 48) == "--from goes on with the error that is left, up to 48 pairs, which would prove a gain above 4.1 %"
    ended = judged((GAIN + 0.012 + noise).tolist())
    assert (ended.verdict, ended.provable, outlook(ended, 48)) == ("UNDECIDED", None, None)


def test_too_few_seeds_prove_nothing() -> None:
    """Twice as soon at the target, however sure: UNDECIDED, after few pairs. Half as soon is no gain all the same."""
    pairs = [0.7, 0.69, 0.71, 0.7, 0.69, 0.71, 0.7, 0.7]
    soon, late = (Updates((mean, mean), (0, 0), spread=SPREAD) for mean in (0.0, -1.4))
    found = [judge(pairs[:4], 0.02, 48, updates=soon, enough=enough) for enough in (True, False)]
    assert [one and one.verdict for one in found] == ["USE", "UNDECIDED"]
    assert (found[1] and found[1].provable) is None
    none = judge(pairs[:4], 0.02, 48, updates=late, enough=False)
    assert (none and none.verdict) == "NO GAIN"
    wide = [judge([0.1, -0.1, 0.2, 0.0, 0.1, -0.1, 0.2, 0.0][:count], 0.02, 48, enough=False) for count in (4, 6, 8)]
    assert [one and one.pairs for one in wide] == [None, None, 8]
