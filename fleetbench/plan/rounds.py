"""Rounds: how many updates lie between two meetings of the trainers, over a whole training, and what stands for it in a few steps.

A step of a training is priced in a window that is much shorter than the training. Where all rounds are alike, a few whole ones are
enough. Where they differ, a simulated step is the mean of those of every length, each by its share of the updates; and a leg of real
steps has as many meetings per update as the whole training.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from fleetbench.plan.local_sgd import Cadence
from fleetbench.strategy import DistributedStrategy

EVERY_UPDATE = 1 << 40
"""As ``begin_step``: trainers meet after every update, whatever K is."""
_LONGEST = 1000
"""Updates of the round that stands for trainers who train alone at first."""


@dataclass(frozen=True, slots=True)
class Constant:
    """All rounds have so many updates; 1 where trainers meet after each."""

    k: int


@dataclass(frozen=True, slots=True)
class Varying:
    """Rounds that a schedule makes shorter or longer, known before the training."""

    cadence: Cadence

    def shares(self, updates: int, epoch_updates: int | None) -> dict[int, float]:
        """The share of a training's updates that lies in rounds of each length. Without ``epoch_updates`` the training is one epoch."""
        cadence, counts = self.cadence, Counter[int]()
        assert cadence.k_steps is not None
        if cadence.schedule == "document":
            length = epoch_updates or updates
            for epoch in range(math.ceil(updates / length)):
                counts[cadence.k_of(epoch)] += min(length, updates - epoch * length)
        else:
            before = min(cadence.begin_step - 1, updates)
            counts[1 if cadence.schedule == "fleet" else max(1, min(before, _LONGEST))] += before
            counts[cadence.k_steps] += updates - before
        return {k: count / updates for k, count in sorted(counts.items()) if count}


@dataclass(frozen=True, slots=True)
class Observed:
    """The length of a round follows from what trainers observe in training."""


Rounds = Constant | Varying | Observed
Levels = tuple[tuple[DistributedStrategy, float], ...]
"""Strategies with constant rounds, each with its share of the updates; the shares add up to 1."""


def rounds_of(cadence: Cadence | None) -> Rounds:
    """The lengths of rounds as they are known before the training. Without a cadence trainers update together."""
    if cadence is None or cadence.begin_step >= EVERY_UPDATE:
        return Constant(1)
    if cadence.k_steps is None:
        return Observed()
    is_whole = cadence.begin_step <= 1 if cadence.schedule != "document" else cadence.warmup == "const" and not cadence.warmup_epochs
    return Constant(cadence.k_steps) if is_whole else Varying(cadence)


def held(strategy: DistributedStrategy, k: int) -> DistributedStrategy:
    """The strategy, which has local steps, with rounds of ``k`` updates throughout; its outer optimizer and wire stay."""
    configs = {"schedule": "fleet", "warmup_epochs": 0, "warmup": "exp", "begin_step": 1, "k_steps": k}
    if k == 1:
        configs |= {"begin_step": EVERY_UPDATE, "k_steps": max(2, strategy.local_steps)}
    if strategy.adaptive_localsgd:
        configs |= strategy.averaging.shared()
        strategy = strategy.without("adaptive_localsgd")
    return strategy.replace(localsgd=True, localsgd_configs=configs)


def levels(strategy: DistributedStrategy, steps: int, steps_per_epoch: int | None = None) -> Levels:
    """The kinds of rounds that a training of so many steps has; the strategy itself where all are alike, or their length is not known."""
    if not strategy.is_local:
        return ((strategy, 1.0),)
    rounds, merged = rounds_of(Cadence.of(strategy)), strategy.gradient_merge_configs.k_steps
    if not isinstance(rounds, Varying):
        return ((strategy, 1.0),)
    epoch = None if steps_per_epoch is None else max(1, steps_per_epoch // merged)
    shares = rounds.shares(max(1, steps // merged), epoch)
    return tuple((held(strategy, k), share) for k, share in shares.items())


def at_pace(strategy: DistributedStrategy, pace: float) -> Levels:
    """Rounds of ``pace`` updates in the mean: those of the whole numbers around it, of which fragments take their multiples."""
    parts = strategy.localsgd_configs.fragments if strategy.localsgd else 1
    low = max(parts, math.floor(pace / parts) * parts)
    high = low + parts
    share = (1 / max(pace, low) - 1 / high) / (1 / low - 1 / high)
    return tuple((held(strategy, k), one) for k, one in ((low, share), (high, 1 - share)) if one > 1e-9)


def in_leg(found: Levels, updates: int) -> DistributedStrategy:
    """The strategy of a leg of so many updates whose trainers meet as often as in ``found``: first after each update, then every K-th.

    Within 1 % the largest K that there is, in whole rounds; with fragments or overlap K stays, beside which an exchange goes on.
    """
    if len(found) == 1:
        return found[0][0]
    lengths = [_length(strategy) for strategy, _ in found]
    rate = sum(share / k for k, (_, share) in zip(lengths, found, strict=True))
    tried, longest = [(abs(1 / rate - 1), 1, 0)], max(lengths)
    for k in (longest,) if found[-1][0].localsgd_configs.has_fragments else range(longest, 1, -1):
        for before in range(updates - k + 1):
            rounds = (updates - before) // k
            tried.append((abs((before + rounds) / (before + rounds * k) / rate - 1), k, before))
    _, k, before = min(tried, key=lambda one: (math.floor(100 * one[0]), -one[1], one[0]))
    whole = held(found[-1][0], k)
    return whole if k == 1 else whole.replace(localsgd_configs={"begin_step": before + 1})


def _length(strategy: DistributedStrategy) -> int:
    rounds = rounds_of(Cadence.of(strategy))
    assert isinstance(rounds, Constant)
    return rounds.k
