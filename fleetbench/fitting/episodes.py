"""Episodes: stretches of steps in which a rank is slow, told apart from single slow steps.

A hidden Markov model of two states, healthy and ill, over the logarithm of a rank's step times
(Baum and Petrie 1966; Rabiner 1989, sections III.A to III.C) is compared with a mixture of the same
two states without memory. Skewed times alone favour both alike; only slow steps that come together
favour memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_ROUNDS = 100
_GUESSES = (0.7, 0.85, 0.95)
"""Shares of healthy steps to start from."""
_SMALLEST_SPREAD = 1e-4
_NEEDED = 13.82
"""Of twice the log-likelihood that memory adds: chi^2 at 0.1 %, of the two degrees of freedom that turns and start have over one share."""
LEAST_FACTOR = 1.1
"""Slower than this is an episode."""
_LEAST_LENGTH = 2.0
_LEAST_EPISODES = 2
LEAST_STEPS = 60
"""Fewer steps of a rank tell nothing of episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """A Markov fail-slow, as ``fleetbench.stragglers.Episode`` draws it; ``factor`` is none where there is none."""

    statement: str
    rate: float = 0.0
    """Chance that a healthy rank's next step is ill."""
    length: float = 0.0
    """Mean length of an episode in steps."""
    factor: float | None = None
    evidence: float = 0.0
    """Twice the log-likelihood that memory adds."""
    ill: npt.NDArray[np.bool_] | None = None
    """By rank and step."""


@dataclass(slots=True)
class _Model:
    start: Floats
    turn: Floats
    """Chances from state to state."""
    middle: Floats
    spread: Floats

    def densities(self, y: Floats) -> Floats:
        """Of every step in both states, ``(ranks, steps, 2)``."""
        z = (y[..., None] - self.middle) / self.spread
        return np.exp(-0.5 * z**2) / (self.spread * math.sqrt(2 * math.pi)) + 1e-300


def find_episodes(times_s: Floats) -> Episodes:
    """Look for episodes in step times ``(ranks, steps)``, whose persistent rank factors are taken out."""
    times = np.asarray(times_s, dtype=float)
    if times.shape[1] < LEAST_STEPS:
        return Episodes(statement=f"{times.shape[1]} steps a rank are too few to tell episodes: {LEAST_STEPS} are needed")
    y = np.log(times / np.median(times))
    if np.ptp(y) < 1e-9:
        return Episodes(statement="no episodes: steps are constant")
    best: tuple[float, _Model, Floats] | None = None
    for share in _GUESSES:
        found = _fit(y, _guess(y, share), memory=True)
        if best is None or found[0] > best[0]:
            best = found
    assert best is not None
    likelihood, model, posterior = best
    without = max(_fit(y, _guess(y, share), memory=False)[0] for share in _GUESSES)
    return _judged(y, model, posterior, 2 * (likelihood - without))


def _judged(y: Floats, model: _Model, posterior: Floats, evidence: float) -> Episodes:
    ill_state = int(np.argmax(model.middle))
    ill = posterior[..., ill_state] > 0.5
    rate, recovery = float(model.turn[1 - ill_state, ill_state]), float(model.turn[ill_state, 1 - ill_state])
    starts = int((ill[:, 1:] & ~ill[:, :-1]).sum() + ill[:, 0].sum())
    length = 1.0 / recovery if recovery > 0 else math.inf
    if not ill.any() or ill.all() or evidence < _NEEDED:
        return Episodes(statement="no episodes: slow steps come one by one", evidence=evidence)
    factor = math.exp(float(np.median(y[ill]) - np.median(y[~ill])))
    told = f"factor {factor:.2f}, {length:.1f} steps long, {starts} of them"
    if factor < LEAST_FACTOR or length < _LEAST_LENGTH or starts < _LEAST_EPISODES or ill.mean() > 0.5:
        return Episodes(statement=f"no episodes: neighbouring steps are alike, but that is no fail-slow ({told})", evidence=evidence)
    return Episodes(
        statement=f"episodes: {told}, at {rate:.3g} a step", rate=rate, length=length, factor=factor, evidence=evidence, ill=ill
    )


def _guess(y: Floats, share: float) -> _Model:
    cut = float(np.quantile(y, share))
    low, high = y[y <= cut], y[y > cut]
    if len(high) == 0:
        high = y[y >= cut]
    spreads = [max(float(part.std()), _SMALLEST_SPREAD) for part in (low, high)]
    return _Model(
        start=np.array([share, 1 - share]),
        turn=np.array([[0.95, 0.05], [0.2, 0.8]]),
        middle=np.array([float(low.mean()), float(high.mean())]),
        spread=np.array(spreads),
    )


def _fit(y: Floats, model: _Model, *, memory: bool) -> tuple[float, _Model, Floats]:
    """Expectation and maximisation until the likelihood stands still: that, the model, and each step's chances of both states."""
    likelihood = -math.inf
    posterior = np.zeros((*y.shape, 2))
    for _ in range(_ROUNDS):
        before = likelihood
        likelihood, posterior, turned = (_expect if memory else _expect_alone)(model, model.densities(y))
        if likelihood - before < 1e-3:  # far below what decides
            break
        weight = posterior.sum(axis=(0, 1)) + 1e-12
        middle = (posterior * y[..., None]).sum(axis=(0, 1)) / weight
        variance = (posterior * (y[..., None] - middle) ** 2).sum(axis=(0, 1)) / weight
        spread = np.maximum(np.sqrt(variance), _SMALLEST_SPREAD)
        if memory:
            start = posterior[:, 0].mean(axis=0)
            turn = turned / np.maximum(turned.sum(axis=1, keepdims=True), 1e-12)
        else:
            start = weight / weight.sum()
            turn = np.tile(start, (2, 1))
        model = _Model(start=start, turn=turn, middle=middle, spread=spread)
    return likelihood, model, posterior


def _expect_alone(model: _Model, densities: Floats) -> tuple[float, Floats, Floats]:
    """The same where every step is for itself; nothing turns."""
    joint = densities * model.start
    whole = joint.sum(axis=2, keepdims=True)
    return float(np.log(whole).sum()), joint / whole, np.zeros((2, 2))


def _expect(model: _Model, densities: Floats) -> tuple[float, Floats, Floats]:
    """Forward and backward, scaled at every step: log-likelihood, each step's chances, and the expected turns."""
    ranks, steps, _ = densities.shape
    forward, scale = np.zeros((ranks, steps, 2)), np.zeros((ranks, steps))
    now = model.start * densities[:, 0]
    for step in range(steps):
        if step:
            now = (forward[:, step - 1] @ model.turn) * densities[:, step]
        scale[:, step] = now.sum(axis=1)
        forward[:, step] = now / scale[:, step, None]
    backward = np.ones((ranks, steps, 2))
    for step in range(steps - 2, -1, -1):
        ahead = densities[:, step + 1] * backward[:, step + 1]
        backward[:, step] = (ahead @ model.turn.T) / scale[:, step + 1, None]
    posterior = forward * backward
    ahead = densities[:, 1:] * backward[:, 1:] / scale[:, 1:, None]
    turned = np.einsum("rsi,ij,rsj->ij", forward[:, :-1], model.turn, ahead)
    return float(np.log(scale).sum()), posterior, turned
