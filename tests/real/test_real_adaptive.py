"""Adaptive Local SGD among trainers that differ: all choose the same K, or all are told that they are at different places."""

from __future__ import annotations

import math
from contextlib import closing
from typing import Any

import pytest
import torch
from zero_trainer import ZeroTrainer, six_layers

from fleetbench.errors import ConfigError
from fleetbench.strategy import DistributedStrategy
from real.engine.engine import Engine

K0, LR, ALPHA = 4, 0.01, 0.01
STEPS = 40


class Different(ZeroTrainer):
    """Another trainer that tells another learning rate, loss or place; ``comes_first``: it is rank 0."""

    def __init__(self, *, power: float = 1.0, loss: float = 1.0, place: int = 0, comes_first: bool = False) -> None:
        """``power``: of this trainer's decay, which gives the other's."""
        super().__init__()
        self._power, self._loss, self._place, self._comes_first = power, loss, place, comes_first

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, group: str, communicator: int) -> None:  # see ZeroTrainer
        """What both tell: place, learning rate, loss; of the model and the strategy, the same."""
        if own.numel() != 3 or not own.is_floating_point():
            super().all_gather(whole, own, group, communicator)
            return
        place, lr, loss = own.tolist()
        other = own.new_tensor([place + self._place, LR * (lr / LR) ** self._power, loss * self._loss])
        whole.copy_(torch.cat([other, own] if self._comes_first else [own, other]))


def _train(others: ZeroTrainer, decay: float, loss: float, **configs: Any) -> list[int]:
    """The updates after which a trainer averages whose learning rate decays so, and whose loss falls from this."""
    model = six_layers()
    fields = {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": K0, **configs}}
    engine = Engine(model, DistributedStrategy.from_dict(fields), others)  # type: ignore[arg-type]  # the fake has the methods that the engine calls
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    engine.attach_optimizer(optimizer)
    met = []
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = LR * decay**step
        model(torch.ones(2, 8)).sum().backward()
        engine.report(loss * 0.95**step)
        optimizer.step()
        optimizer.zero_grad()
        if engine._decider.state.last_sync == step:
            met.append(step)
    engine.close()
    return met


def _by_hand(variant: str) -> list[int]:
    """The same by Fleet's rule, or the quadratic one, for the means of two trainers' rates and losses."""
    lrs = [LR * (0.9**step + 0.81**step) / 2 for step in range(STEPS + 1)]
    met, last, k = [], 0, K0
    for step in range(1, STEPS + 1):
        if step == 1 or step - last >= k:
            met.append(step)
            last = step
            if variant == "qsr":
                k = max(K0, math.floor((ALPHA / lrs[step]) ** 2))
            elif step > 1:
                k = min(max(math.ceil(math.sqrt(0.95 ** (step - 1) * lrs[1] / lrs[step] * K0)), 1), 16)
    return met


@pytest.mark.parametrize("variant", ["fleet", "qsr"])
def test_trainers_of_different_rates_choose_one_k(variant: str) -> None:
    """One trainer's learning rate decays twice as fast, and its loss is larger: both average after the updates that the means give."""
    with closing(Different(power=2, loss=3)) as others:
        slow = _train(others, 0.9, 1.0, variant=variant, alpha=ALPHA)
    with closing(Different(power=1 / 2, loss=1 / 3, comes_first=True)) as others:
        fast = _train(others, 0.81, 3.0, variant=variant, alpha=ALPHA)
    assert slow == fast == _by_hand(variant)
    assert len(slow) > 3


@pytest.mark.parametrize("variant", ["fleet", "qsr", "document"])
def test_trainers_at_different_places_are_refused(variant: str) -> None:
    """The averaging that would mix up two updates says so, and names where each trainer is."""
    what = r"average after different steps.*operations \d+, \d+ of ranks 0 to 1"
    with closing(Different(place=3)) as others, pytest.raises(ConfigError, match=what):
        _train(others, 0.9, 1.0, variant=variant)
