"""Episodes: stretches of steps in which a rank is slow, told apart from single slow steps.

A hidden Markov model of two states, healthy and ill, over the logarithm of a rank's step times
(Baum and Petrie 1966; Rabiner 1989, sections III.A to III.C) is compared with a mixture of the same
two states without memory. Skewed times alone favour both alike; only slow steps that come together
favour memory.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fleetbench.stragglers import Floats

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
    ill: npt.NDArray[np.bool_] | None = None
    """By rank and step."""


@dataclass(slots=True)
class _Models:
    """Several models at once: every array's first axis."""

    start: Floats
    turn: Floats
    """Chances from state to state."""
    middle: Floats
    spread: Floats

    def densities(self, y: Floats) -> Floats:
        """Of every step in both states, ``(models, ranks, steps, 2)``."""
        middle, spread = self.middle[:, None, None], self.spread[:, None, None]
        return np.exp(-0.5 * ((y[None, ..., None] - middle) / spread) ** 2) / (spread * math.sqrt(2 * math.pi)) + 1e-300


def find_episodes(times_s: Floats) -> Episodes:
    """Look for episodes in step times ``(ranks, steps)``, whose persistent rank factors are taken out."""
    times = np.asarray(times_s, dtype=float)
    if times.shape[1] < LEAST_STEPS:
        return Episodes(statement=f"too few steps to tell episodes: {times.shape[1]} a rank, and {LEAST_STEPS} are needed")
    y = np.log(times / np.median(times))
    if np.ptp(y) < 1e-9:
        return Episodes(statement="no episodes: steps are constant")
    likelihoods, models, posteriors = _fit(y)
    num = len(_GUESSES)
    best = int(np.argmax(likelihoods[:num]))
    added = 2 * float(likelihoods[best] - likelihoods[num:].max())
    ill_state = int(np.argmax(models.middle[best]))
    ill = posteriors[best][..., ill_state] > 0.5
    rate, recovery = float(models.turn[best, 1 - ill_state, ill_state]), float(models.turn[best, ill_state, 1 - ill_state])
    starts = int((ill[:, 1:] & ~ill[:, :-1]).sum() + ill[:, 0].sum())
    length = 1.0 / recovery if recovery > 0 else math.inf
    if not ill.any() or ill.all() or added < _NEEDED:
        return Episodes(statement="no episodes: slow steps come one by one")
    factor = math.exp(float(np.median(y[ill]) - np.median(y[~ill])))
    told = f"factor {factor:.2f}, {length:.1f} steps long, {starts} of them"
    if factor < LEAST_FACTOR or length < _LEAST_LENGTH or starts < _LEAST_EPISODES or ill.mean() > 0.5:
        return Episodes(statement=f"no episodes: neighbouring steps are alike, but that is no fail-slow ({told})")
    return Episodes(statement=f"episodes: {told}, at {rate:.3g} a step", rate=rate, length=length, factor=factor, ill=ill)


def _fit(y: Floats) -> tuple[Floats, _Models, Floats]:
    """Expectation and maximisation from each guess, with memory and then without, until no likelihood rises any more.

    The likelihoods, the models, and each step's chances of both states. Without memory a step's state does not depend on the one before.
    """
    models = _guesses(y)
    memory = np.arange(len(models.start)) < len(_GUESSES)
    likelihoods = np.full(len(memory), -math.inf)
    for _ in range(_ROUNDS):
        before = likelihoods
        likelihoods, posteriors, turned = _expect(models, models.densities(y))
        if (likelihoods - before < 1e-3).all():  # far below what decides
            break
        weight = posteriors.sum(axis=(1, 2)) + 1e-12
        middle = (posteriors * y[..., None]).sum(axis=(1, 2)) / weight
        variance = (posteriors * (y[..., None] - middle[:, None, None]) ** 2).sum(axis=(1, 2)) / weight
        start = np.where(memory[:, None], posteriors[:, :, 0].mean(axis=1), weight / weight.sum(axis=1, keepdims=True))
        turn = np.where(memory[:, None, None], turned / np.maximum(turned.sum(axis=2, keepdims=True), 1e-12), start[:, None])
        models = _Models(start=start, turn=turn, middle=middle, spread=np.maximum(np.sqrt(variance), _SMALLEST_SPREAD))
    return likelihoods, models, posteriors


def _guesses(y: Floats) -> _Models:
    """Where to start from: with memory, then without."""
    starts = np.array([[share, 1 - share] for share in _GUESSES])
    cuts = np.quantile(y, _GUESSES)
    parts = [(y[y <= cut], y[y > cut] if (y > cut).any() else y[y >= cut]) for cut in cuts]
    middle = np.array([[part.mean() for part in pair] for pair in parts])
    spread = np.array([[max(float(part.std()), _SMALLEST_SPREAD) for part in pair] for pair in parts])
    turns = np.array([[[0.95, 0.05], [0.2, 0.8]]] * len(_GUESSES) + [[start, start] for start in starts.tolist()])
    return _Models(start=np.tile(starts, (2, 1)), turn=turns, middle=np.tile(middle, (2, 1)), spread=np.tile(spread, (2, 1)))


def _expect(models: _Models, densities: Floats) -> tuple[Floats, Floats, Floats]:
    """Forward and backward, scaled at every step: log-likelihoods, each step's chances, and the expected turns."""
    at = np.moveaxis(densities, 2, 0)  # by step
    forward, scale, backward = np.empty_like(at), np.empty((*at.shape[:-1], 1)), np.ones_like(at)
    now = models.start[:, None] * at[0]
    for step in range(len(at)):
        if step:
            now = (forward[step - 1] @ models.turn) * at[step]
        scale[step] = now.sum(axis=-1, keepdims=True)
        forward[step] = now / scale[step]
    at = at / scale
    back = np.swapaxes(models.turn, 1, 2)
    for step in range(len(at) - 1, 0, -1):
        backward[step - 1] = (at[step] * backward[step]) @ back
    turned = np.einsum("smri,mij,smrj->mij", forward[:-1], models.turn, at[1:] * backward[1:], optimize=True)
    return np.log(scale).sum(axis=(0, 2, 3)), np.moveaxis(forward * backward, 0, 2), turned
