"""Rounds: updates between synchronisations over a training run, and a short run that represents it.

A step is timed in a window that is much shorter than the training. If all rounds are alike, a few whole
rounds are enough. If they differ, a simulated step is the mean over all lengths, weighted by their shares of
the updates; and a leg of real steps has as many synchronisations per update as the whole training.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from fleetbench.plan.local_sgd import Cadence
from fleetbench.strategy import DistributedStrategy

EVERY_UPDATE = 1 << 40
"""Value of ``begin_step`` with which trainers synchronise after every update, whatever K is."""
_LONGEST = 1000
"""Largest number of updates in the round that represents trainers training alone before ``begin_step``."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Rounds of ``k`` updates each; ``k`` is 1 if trainers synchronise after every update."""

    k: int


@dataclass(frozen=True, slots=True)
class Varying:
    """Rounds of varying lengths, known before the training."""

    cadence: Cadence

    def shares(self, updates: int, epoch_updates: int | None) -> dict[int, float]:
        """Return the share of a training's updates in rounds of each length, by length.

        If ``epoch_updates`` is None, the training is one epoch.
        """
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
    """Rounds whose length depends on what trainers observe in training."""


Rounds = Constant | Varying | Observed
Levels = tuple[tuple[DistributedStrategy, float], ...]
"""Strategies with constant rounds, each with its share of the updates; the shares add up to 1."""


def rounds_of(cadence: Cadence | None) -> Rounds:
    """Return the lengths of rounds, as far as known before the training; without a cadence, rounds of one update."""
    if cadence is None or cadence.begin_step >= EVERY_UPDATE:
        return Constant(1)
    if cadence.k_steps is None:
        return Observed()
    is_whole = cadence.begin_step <= 1 if cadence.schedule != "document" else cadence.warmup == "const" and not cadence.warmup_epochs
    return Constant(cadence.k_steps) if is_whole else Varying(cadence)


def held(strategy: DistributedStrategy, k: int) -> DistributedStrategy:
    """Return ``strategy``, which has local steps, with its rounds changed to ``k`` updates each.

    Its outer optimizer and wire type stay.
    """
    configs = {"schedule": "fleet", "warmup_epochs": 0, "warmup": "exp", "begin_step": 1, "k_steps": k}
    if k == 1:
        configs |= {"begin_step": EVERY_UPDATE, "k_steps": max(2, strategy.local_steps)}
    if strategy.adaptive_localsgd:
        configs |= strategy.averaging.shared()
        strategy = strategy.without("adaptive_localsgd")
    return strategy.replace(localsgd=True, localsgd_configs=configs)


def levels(strategy: DistributedStrategy, steps: int, steps_per_epoch: int | None = None) -> Levels:
    """Return a strategy for each length of round in a training of ``steps`` steps, with its share of the updates.

    The only entry is ``strategy`` itself if all rounds are alike, or if their lengths are not known.
    """
    if not strategy.is_local:
        return ((strategy, 1.0),)
    rounds, merged = rounds_of(Cadence.of(strategy)), strategy.gradient_merge_configs.k_steps
    if not isinstance(rounds, Varying):
        return ((strategy, 1.0),)
    epoch = None if steps_per_epoch is None else max(1, steps_per_epoch // merged)
    shares = rounds.shares(max(1, steps // merged), epoch)
    return tuple((held(strategy, k), share) for k, share in shares.items())


def in_leg(found: Levels, updates: int) -> DistributedStrategy:
    """Return the strategy of a leg of ``updates`` updates that synchronises as often as ``found``.

    It synchronises after each of the first updates, then after every K-th. K is the largest with which whole
    rounds come within 1 % of that rate. With fragments or overlap K is unchanged, because an exchange
    overlaps it.
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
