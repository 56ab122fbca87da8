"""Laws of jitter: the same formulas as scipy's and as the draws', and found again from the draws."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from fleetbench.fitting.distributions import LAWS, Fitted, Law, chance, choose_law, distances, fit_law, goodness
from fleetbench.stragglers import ONE, Jitter, draws, quantile

BASE_S = 0.010

KNOWN: list[tuple[Law, float, float]] = [
    ("exponential", 0.3, 1.0),
    ("gamma", 0.3, 0.5),
    ("gamma", 0.2, 1.6),
    ("lognormal", 0.2, 1.0),
    ("lognormal", 0.1, 2.0),
    ("pareto", 0.2, 1.6),
]


def drawn(law: Law, mean: float, cv: float, steps: int, seed: int = 1) -> np.ndarray:
    """Step times of two ranks, as the executors draw them."""
    x = draws([Jitter(distribution=law, mean=mean, cv=cv)], seed, 2, 2, 1, steps) / ONE
    return BASE_S * (1.0 + x)


def scipys(law: Law, mean: float, cv: float) -> scipy_stats.rv_continuous:
    """The same law in scipy's parameters."""
    if law == "exponential":
        return scipy_stats.expon(scale=mean)
    if law == "gamma":
        return scipy_stats.gamma(1 / cv**2, scale=mean * cv**2)
    if law == "lognormal":
        sigma = np.sqrt(np.log1p(cv**2))
        return scipy_stats.lognorm(sigma, scale=mean * np.exp(-(sigma**2) / 2))
    alpha = 2 * cv**2 / (cv**2 - 1)
    return scipy_stats.lomax(alpha, scale=mean * (alpha - 1))


@pytest.mark.parametrize(("law", "mean", "cv"), KNOWN)
def test_chances_and_quantiles_are_scipys(law: Law, mean: float, cv: float) -> None:
    """From 1e-12 to 1 - 1e-12, with moments that are mean and coefficient of variation."""
    truth = scipys(law, mean, cv)
    u = np.array([1e-12, 1e-6, 0.01, 0.3, 0.5, 0.9, 0.999, 1 - 1e-9])
    x = truth.ppf(u)
    np.testing.assert_allclose(quantile(law, u, mean, cv), x, rtol=1e-9)
    np.testing.assert_allclose(chance(law, x, mean, cv), u, rtol=1e-8)
    np.testing.assert_allclose(chance(law, x, mean, cv, above=True), truth.sf(x), rtol=1e-8)
    assert truth.mean() == pytest.approx(mean)
    assert truth.std() == pytest.approx(mean * cv)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("law", "mean", "cv"), KNOWN)
def test_a_law_is_found_again(law: Law, mean: float, cv: float) -> None:
    """From 2,000 draws: its kind, its mean within 8 %, its coefficient of variation within 10 %, and the base within 0.5 %."""
    found, excess = choose_law(drawn(law, mean, cv, 1000).ravel())
    assert found.law == law
    assert found.mean == pytest.approx(mean, rel=0.08)
    assert found.cv == pytest.approx(cv, rel=0.10)
    assert found.base_s == pytest.approx(BASE_S, rel=0.005)
    assert set(excess) == set(LAWS)
    assert excess[law] == 0.0
    assert min(excess.values()) == 0.0


def test_the_mean_time_survives_a_base_that_cannot_be_seen() -> None:
    """A narrow bell, far from its base, fits several bases: whichever is chosen, mean and spread of the times come back."""
    times = drawn("gamma", 0.05, 0.2, 500).ravel()
    found, _ = choose_law(times)
    assert found.base_s * (1 + found.mean) == pytest.approx(times.mean(), rel=1e-3)
    assert found.base_s * found.mean * found.cv == pytest.approx(times.std(), rel=0.05)


def test_a_short_search_from_the_answer_stays_there() -> None:
    """What the bootstrap does: the same data, started at their own fit, give the same likelihood."""
    times = drawn("lognormal", 0.2, 1.0, 200).ravel()
    whole = fit_law("lognormal", times)
    again = fit_law("lognormal", times, whole)
    assert again.bic == pytest.approx(whole.bic, abs=0.1)


def test_distances_are_scipys() -> None:
    """Kolmogorov and Smirnov's D is scipy's; Anderson and Darling's square is its sum, written out."""
    fitted = Fitted(law="exponential", base_s=1.0, mean=0.5, cv=1.0, bic=0.0)
    times = np.array([1.1, 1.3, 1.35, 1.9, 2.4])
    u = 1 - np.exp(-(np.sort(times) - 1.0) / 0.5)
    largest, squared = distances(times, fitted)
    assert largest == pytest.approx(scipy_stats.kstest(times, lambda t: 1 - np.exp(-(t - 1.0) / 0.5)).statistic)
    by_hand = -5 - sum((2 * i - 1) * (np.log(u[i - 1]) + np.log(1 - u[5 - i])) for i in range(1, 6)) / 5
    assert squared == pytest.approx(by_hand)


def test_a_right_law_goes_with_its_draws_and_a_wrong_one_does_not() -> None:
    """An exponential passes; an exponential forced upon a narrow gamma is as far from it as none of its own draws is."""
    right = drawn("exponential", 0.3, 1.0, 150).ravel()
    passed = goodness(right, fit_law("exponential", right), seed=0)
    assert passed["kolmogorov_smirnov_p"] > 0.05
    assert passed["anderson_darling_p"] > 0.05
    wrong = drawn("gamma", 0.3, 0.25, 150).ravel()
    failed = goodness(wrong, fit_law("exponential", wrong), seed=0)
    assert failed["kolmogorov_smirnov_p"] == failed["anderson_darling_p"] == 0.01


def test_the_bootstrap_follows_its_seed() -> None:
    """Equal seeds give equal figures."""
    times = drawn("exponential", 0.3, 1.0, 30).ravel()
    fitted = fit_law("exponential", times)
    assert goodness(times, fitted, seed=3) == goodness(times, fitted, seed=3)
