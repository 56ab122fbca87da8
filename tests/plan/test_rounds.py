"""Lengths of rounds over a whole training, against a schedule that is counted update by update."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from fleetbench.plan.combination import Combination
from fleetbench.plan.local_sgd import Cadence
from fleetbench.plan.rounds import Constant, Observed, Varying, in_leg, levels
from fleetbench.strategy import DistributedStrategy


def local(**configs: Any) -> DistributedStrategy:
    """Local SGD."""
    return DistributedStrategy().replace(localsgd=True, localsgd_configs=configs)


def meetings(strategy: DistributedStrategy, updates: int, epoch: int | None = None) -> list[int]:
    """After which updates trainers meet."""
    cadence, found, last = Cadence.of(strategy), list[int](), 0
    for update in range(1, updates + 1):
        if cadence.synchronises(update, last, 1, 0 if epoch is None else (update - 1) // epoch):
            found.append(update)
            last = update
    return found


def drawn(random: np.random.Generator) -> tuple[DistributedStrategy, int, int]:
    """A schedule, a number of updates, and of those in an epoch."""
    k, updates, epoch = random.choice([2, 3, 4, 8, 16, 24]).item(), int(random.integers(400, 3000)), int(random.integers(40, 400))
    kind = random.choice(["fleet", "document", "fragments"]).item()
    if kind == "document":
        warmup = random.choice(["exp", "linear", "const"]).item()
        return local(k_steps=k, schedule="document", warmup_epochs=int(random.integers(0, 4)), warmup=warmup), updates, epoch
    parts = {"fragments": 2} if kind == "fragments" and k % 2 == 0 else {}
    return local(k_steps=k, begin_step=int(random.integers(1, updates)), **parts), updates, epoch


@pytest.mark.parametrize("seed", range(60))
def test_levels_meet_as_often_as_the_schedule(seed: int) -> None:
    """Of random schedules: the mean rate of the levels is that of all updates, but for a round at each change of K."""
    strategy, updates, epoch = drawn(np.random.default_rng(seed))
    found = levels(strategy, updates, epoch)
    assert sum(share for _, share in found) == pytest.approx(1)
    rate = sum(share * len(meetings(one, 7200)) / 7200 for one, share in found)
    changes = updates / epoch if strategy.localsgd_configs.schedule == "document" else 1
    assert rate * updates == pytest.approx(len(meetings(strategy, updates, epoch)), abs=1 + changes)


@pytest.mark.parametrize("seed", range(60))
def test_a_leg_meets_as_often_as_the_training(seed: int) -> None:
    """In legs of 120 updates: within 2 % of the training's meetings per update, or a 2 % of the updates, in whole rounds."""
    strategy, updates, epoch = drawn(np.random.default_rng(1000 + seed))
    found = levels(strategy, updates, epoch)
    leg = in_leg(found, 118)
    whole = Combination.of(leg).whole_rounds(120)
    assert whole is not None
    counted = sum(whole[0] < update <= whole[1] for update in meetings(leg, 120)) / (whole[1] - whole[0])
    rate = sum(share * len(meetings(one, 7200)) / 7200 for one, share in found)
    assert counted == pytest.approx(rate, rel=0.02, abs=0.02)


def test_rounds_of_each_schedule() -> None:
    """Fixed ones, and what differs."""
    rounds = [Combination.of(one).rounds for one in (DistributedStrategy(), local(k_steps=4), local(k_steps=4, schedule="torch"))]
    assert rounds == [Constant(1), Constant(4), Constant(4)]
    assert isinstance(Combination.of(local(k_steps=4, begin_step=9)).rounds, Varying)
    adaptive = DistributedStrategy().replace(adaptive_localsgd=True)
    assert isinstance(Combination.of(adaptive).rounds, Observed)
    lengths = Counter(Varying(Cadence.of(local(k_steps=16, schedule="document", warmup_epochs=3))).shares(1800, 200))
    assert {k: round(9 * share) for k, share in lengths.items()} == {1: 4, 2: 1, 4: 1, 8: 1, 16: 2}  # 1 1 1 1 2 4 8 16 16


def test_whole_rounds_of_a_late_beginning() -> None:
    """The steps before the first round of K count, and whole rounds after them."""
    assert Combination.of(local(k_steps=16, begin_step=1000)).whole_rounds(2000) == (1, 1000 + 62 * 16 - 0)
    assert Combination.of(local(k_steps=16, begin_step=1000)).whole_rounds(1000) is None
