"""Shocks: laws of what ranks share, seen through the noise that their own jitter leaves."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fleetbench.fitting.distributions import Fitted
from fleetbench.fitting.shocks import LAWS, choose_shock, fit_shock

NOISE = 0.01


def seen(law: Fitted, steps: int, seed: int, noise: float = NOISE) -> np.ndarray:
    """Logarithms of drawn steps, with noise."""
    generator = np.random.default_rng(seed)
    return np.log(law.quantile(generator.uniform(size=steps))) + generator.normal(0.0, noise, steps)


def shock(law: str, rate: float, mean: float, cv: float) -> Fitted:
    """A law over a base of 20 ms."""
    return Fitted(law=law, base_s=0.02, rate=rate, mean=mean, cv=cv, bic=0.0)  # type: ignore[arg-type]  # one of LAWS


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "truth",
    [
        shock("gamma", 1.0, 0.3, 0.5),
        shock("lognormal", 1.0, 0.2, 1.5),
        pytest.param(shock("exponential", 1.0, 0.1, 1.0), marks=pytest.mark.slow),
        shock("constant", 0.8, 0.06, 0.0),
        pytest.param(shock("constant", 0.1, 0.5, 0.0), marks=pytest.mark.slow),
        pytest.param(shock("gamma", 0.5, 0.4, 0.3), marks=pytest.mark.slow),
        pytest.param(shock("lognormal", 0.3, 0.5, 0.5), marks=pytest.mark.slow),
    ],
    ids=lambda law: f"{law.law} {law.rate}",
)
def test_what_was_drawn_is_found(truth: Fitted) -> None:
    """1,500 steps: base within 2 %, the share within 4 standard errors, the mean of all within 10 %; no law is far better."""
    found, excess = choose_shock(seen(truth, 1500, 3), NOISE)
    name = truth.law if truth.always else f"{truth.law}, at times"
    assert excess[name] < 12
    own = fit_shock(truth.law, seen(truth, 1500, 3), NOISE, always=truth.always)
    assert own.base_s == pytest.approx(truth.base_s, rel=0.02)
    assert abs(own.rate - truth.rate) <= 4 * math.sqrt(truth.rate * (1 - truth.rate) / 1500) + 0.02 * (not truth.always)
    assert own.rate * own.mean == pytest.approx(truth.rate * truth.mean, rel=0.1)
    assert found.bic <= own.bic


def test_a_law_that_hits_at_times_is_not_taken_for_one_that_always_does() -> None:
    """22 steps, of which four are 3 % shorter than the rest: only a share of hits explains that."""
    generator = np.random.default_rng(1)
    common = np.log(20.0) + np.r_[np.zeros(4), np.full(18, np.log(1.03))] + generator.normal(0.0, 0.003, 22)
    found, excess = choose_shock(common, 0.003)
    assert (found.law, found.rate) == ("constant", pytest.approx(18 / 22, abs=0.05))
    assert found.mean == pytest.approx(0.03, abs=0.005)
    assert min(value for name, value in excess.items() if "at times" not in name) > 10


def test_noise_is_not_taken_for_a_shock() -> None:
    """Steps of one length, seen through noise: what is found adds less than the noise does."""
    found, _ = choose_shock(np.log(0.02) + np.random.default_rng(0).normal(0.0, NOISE, 400), NOISE)
    assert found.base_s * (1 + found.rate * found.mean) == pytest.approx(0.02, rel=0.003)
    assert found.rate * found.mean < NOISE


def test_a_quantile_has_the_share_that_is_not_hit() -> None:
    """With a rate of 0.3, seven of ten are the base; the rest are the law's own quantiles, and their mean the law's."""
    law = shock("exponential", 0.3, 0.5, 1.0)
    u = (np.arange(100_000) + 0.5) / 100_000
    x = law.quantile(u) / law.base_s - 1.0
    assert (x == 0).mean() == pytest.approx(0.7, abs=1e-5)
    assert x.mean() == pytest.approx(0.3 * 0.5, rel=1e-3)
    assert x[85_000] == pytest.approx(-0.5 * math.log(0.5), rel=1e-3)


def test_a_shorter_search_ends_near_the_long_one() -> None:
    """As the bootstrap's is: from the parameters that drew."""
    truth = shock("gamma", 0.6, 0.3, 0.4)
    common = seen(truth, 300, 5)
    long, short = fit_shock("gamma", common, NOISE, always=False), fit_shock("gamma", common, NOISE, always=False, start=truth)
    assert short.bic == pytest.approx(long.bic, abs=1.0)
    assert (short.rate, short.mean) == (pytest.approx(long.rate, rel=0.05), pytest.approx(long.mean, rel=0.05))


def test_every_law_has_a_criterion() -> None:
    """All but a constant that always hits, which is no law."""
    _, excess = choose_shock(seen(shock("gamma", 1.0, 0.3, 0.5), 50, 1), NOISE)
    assert set(excess) == {*(name for name in LAWS if name != "constant"), *(f"{name}, at times" for name in LAWS)}
    assert min(excess.values()) == 0.0
