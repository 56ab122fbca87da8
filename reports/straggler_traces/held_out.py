"""Held out: does a straggler model say what steps will take that it was not fitted to?

The distance of Kolmogorov and Smirnov between held-out step times and the fitted law has no table:
parameters were fitted to other steps of the same ranks, and what ranks share makes their times alike.
So it is compared with distances of runs that the fitted model itself draws, as many ranks and steps,
each fitted and held out in the same way (the parametric bootstrap, as in ``fleetbench.fitting.distributions``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fleetbench.fitting.distributions import Fitted, choose_law, fit_law
from fleetbench.fitting.shocks import choose_shock, fit_shock, groups_of, split_shared
from fleetbench.fitting.stragglers import rank_factors

Floats = npt.NDArray[np.float64]
Generator = np.random.Generator

_GRID = 400
"""Quantiles of each law behind the law of their product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Times ``factor of the rank x shared (1 + X of the step) x own (1 + X of rank and step)``."""

    factors: tuple[float, ...]
    own: Fitted
    """Where nothing is shared, its base is in seconds; else around 1."""
    shared: Fitted | None

    def draw(self, generator: Generator, steps: int) -> Floats:
        """Times in seconds by rank and step."""
        ranks = len(self.factors)
        times = np.asarray(self.factors)[:, None] * self.own.quantile(generator.uniform(size=(ranks, steps)))
        return times if self.shared is None else times * self.shared.quantile(generator.uniform(size=steps))

    def distance(self, times_s: Floats) -> float:
        """Largest distance between the law of a step time and the share of ``times_s``, ranks' factors taken out, that are below."""
        shares = (np.arange(_GRID) + 0.5) / _GRID
        law = self.own.quantile(shares)
        if self.shared is not None:
            law = np.multiply.outer(law, self.shared.quantile(shares)).ravel()
        law = np.sort(law)
        times = np.sort((times_s / np.asarray(self.factors)[:, None]).ravel())
        below = (np.searchsorted(law, times, "left") + np.searchsorted(law, times, "right")) / (2 * len(law))
        rank = np.arange(1, len(times) + 1)
        return float(max((rank / len(times) - below).max(), (below - (rank - 1) / len(times)).max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """How far held-out times are from the model, and how far its own draws are."""

    model: Model
    distance: float
    threshold: float
    """95th percentile of the draws' distances."""
    p: float
    """Share of draws at least as far."""
    num_fitted: int
    num_held_out: int

    @property
    def predicts(self) -> bool:
        """Whether held-out times are no farther than the model's own draws are in 95 of 100 cases."""
        return self.distance < self.threshold


def hold_out(fitted_s: Floats, held_out_s: Floats, seed: int, *, draws: int = 400, is_shared: bool | None = None) -> HeldOut:
    """Fit a model to times by rank and step, and compare it with others of the same ranks; no episodes are looked for.

    ``is_shared`` says whether ranks share a part of each step; default: as their correlation says.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, 6]))
    model = fit_model(fitted_s, is_shared=is_shared)
    distance = model.distance(held_out_s)
    steps = (fitted_s.shape[1], held_out_s.shape[1])
    drawn = np.empty(draws)
    for index in range(draws):
        times = model.draw(generator, sum(steps))
        drawn[index] = refit(model, times[:, : steps[0]]).distance(times[:, steps[0] :])
    return HeldOut(
        model=model,
        distance=distance,
        threshold=float(np.quantile(drawn, 0.95)),
        p=float((1 + (drawn >= distance).sum()) / (draws + 1)),
        num_fitted=fitted_s.size,
        num_held_out=held_out_s.size,
    )


def fit_model(times_s: Floats, *, is_shared: bool | None = None) -> Model:
    """Persistent factors, then what ranks share, then the law of the rest, each law the likeliest of its kind."""
    factors, level = _level(times_s)
    together = bool(groups_of(level, list(range(len(level))))) if is_shared is None else is_shared
    if not together:
        return Model(factors=factors, own=choose_law(level.ravel())[0], shared=None)
    parts = split_shared(level, [np.arange(len(level))])
    return Model(factors=factors, own=choose_law(parts.own.ravel())[0], shared=choose_shock(parts.common.ravel(), parts.noise)[0])


def refit(model: Model, times_s: Floats) -> Model:
    """A model of the same laws."""
    factors, level = _level(times_s)
    if model.shared is None:
        return Model(factors=factors, own=fit_law(model.own.law, level.ravel(), model.own), shared=None)
    parts = split_shared(level, [np.arange(len(level))])
    return Model(
        factors=factors,
        own=fit_law(model.own.law, parts.own.ravel(), model.own),
        shared=fit_shock(model.shared.law, parts.common.ravel(), parts.noise, always=model.shared.always, start=model.shared),
    )


def _level(times_s: Floats) -> tuple[tuple[float, ...], Floats]:
    factors, _ = rank_factors(times_s)
    return tuple(factors), np.asarray(times_s / np.asarray(factors)[:, None])
