"""Held-out steps: a true model predicts them, a wrong one does not, and the threshold is right as often as it says."""

from __future__ import annotations

import numpy as np
import pytest

from fleetbench.fitting.distributions import Fitted
from held_out import Model, fit_model, hold_out

OWN = Fitted(law="gamma", base_s=1.0, mean=0.05, cv=0.8, bic=0.0)
ALONE = Fitted(law="gamma", base_s=0.02, mean=0.2, cv=0.8, bic=0.0)
SHARED = Fitted(law="gamma", base_s=0.02, rate=1.0, mean=0.2, cv=0.8, bic=0.0)
AT_TIMES = Fitted(law="constant", base_s=0.02, rate=0.7, mean=0.2, cv=0.0, bic=0.0)
FACTORS = (1.0, 2.0, 1.0)


def drawn(model: Model, steps: int, seed: int) -> np.ndarray:
    """Times by rank and step."""
    return model.draw(np.random.default_rng(seed), steps)


def test_the_law_of_the_model_is_that_of_its_draws() -> None:
    """With and without a shared part: 30,000 draws, one rank's or all, are as near as chance has them."""
    for model in (
        Model(factors=FACTORS, own=ALONE, shared=None),
        Model(factors=(1.0,), own=OWN, shared=SHARED),
        Model(factors=(1.0,), own=OWN, shared=AT_TIMES),
    ):
        assert model.distance(drawn(model, 30_000 // len(model.factors), 0)) < 1.63 / np.sqrt(30_000) + 0.003  # 99 %, and the grid


def test_factors_are_taken_out() -> None:
    """A model that does not know the slow rank is a third of the times off."""
    times = drawn(Model(factors=FACTORS, own=ALONE, shared=None), 1000, 1)
    wrong = Model(factors=(1.0, 1.0, 1.0), own=ALONE, shared=None)
    assert wrong.distance(times) > 0.25


@pytest.mark.sample(2)
@pytest.mark.parametrize("shared", [pytest.param(None, marks=pytest.mark.slow), pytest.param(SHARED, marks=pytest.mark.slow), AT_TIMES])
def test_steps_of_the_same_law_are_predicted(shared: Fitted | None) -> None:
    """Three runs: the persistent factor is found, whether ranks share a part is seen, and at least two are predicted at 95 %."""
    model = Model(factors=FACTORS, own=ALONE if shared is None else OWN, shared=shared)
    judged = []
    for seed in range(3):
        times = drawn(model, 60, seed)
        found = hold_out(times[:, ::2], times[:, 1::2], seed, draws=30)
        assert found.model.factors[1] == pytest.approx(2.0, rel=0.1)
        assert (found.model.shared is None) == (shared is None)
        assert (found.num_fitted, found.num_held_out) == (90, 90)
        assert found.predicts == (found.distance < found.threshold)
        judged.append(found.predicts)
    assert sum(judged) >= 2


def test_steps_of_another_law_are_not_predicted() -> None:
    """A tenth longer, with a spread of a tenth: far beyond the threshold."""
    model = Model(factors=FACTORS, own=ALONE, shared=None)
    fitted, other = drawn(model, 40, 0), 1.1 * drawn(model, 40, 1)
    found = hold_out(fitted, other, 0, draws=30)
    assert not found.predicts
    assert found.p < 0.05


def test_ignoring_what_is_shared_makes_the_threshold_too_small() -> None:
    """Few steps that ranks share: as if all times were independent, a distance that chance has often would be called wrong."""
    times = drawn(Model(factors=FACTORS, own=OWN, shared=SHARED), 40, 2)
    alone = hold_out(times[:, ::2], times[:, 1::2], 0, draws=30, is_shared=False)
    together = hold_out(times[:, ::2], times[:, 1::2], 0, draws=30)
    assert together.model.shared is not None
    assert alone.threshold < together.threshold


def test_the_model_of_few_steps_has_no_factors() -> None:
    """Fewer than ten steps tell no slow rank, and the fit says nothing of one."""
    times = drawn(Model(factors=FACTORS, own=ALONE, shared=None), 5, 3)
    assert fit_model(times, is_shared=False).factors == (1.0, 1.0, 1.0)


def test_the_threshold_knows_that_parameters_were_fitted_to_few_steps() -> None:
    """Ten steps of three ranks fitted, a hundred held out: far more than the 1.36 / sqrt(300) of a law that is known."""
    times = drawn(Model(factors=(1.0, 1.0, 1.0), own=ALONE, shared=None), 110, 4)
    found = hold_out(times[:, :10], times[:, 10:], 0, draws=60, is_shared=False)
    assert found.threshold > 1.5 * 1.36 / np.sqrt(300)
