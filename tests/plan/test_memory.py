"""What one trainer keeps, worked out on paper."""

from __future__ import annotations

from typing import Any

import pytest

from fleetbench.measurements import Memory
from fleetbench.plan.build import Setting, build_plan
from fleetbench.plan.combination import Combination
from fleetbench.plan.layers import Gradient
from fleetbench.plan.memory import trainer_bytes
from fleetbench.quantities import Bytes, Nanoseconds
from fleetbench.strategy import DistributedStrategy

MEMORY = Memory(parameters=Bytes(4000), gradients=Bytes(4000), optimizer_state=Bytes(8000), activations=Bytes(500), peak=Bytes(16_700))
"""Of a model whose rest and three blocks have 1000 bytes each."""
NUMBERS = {"head.weight": 250, "h.0.weight": 250, "h.1.weight": 250, "h.2.weight": 250}


def kept(trainers: int = 4, **fields: Any) -> dict[str, int]:
    """By what it holds."""
    strategy = DistributedStrategy().replace(**fields)
    gradients = [
        Gradient(name=name, numel=numel, ready=Nanoseconds(100 * number)) for number, (name, numel) in enumerate(reversed(NUMBERS.items()))
    ]
    plan = build_plan(strategy, gradients, Setting(trainers=trainers, order=tuple(NUMBERS)))
    return trainer_bytes(MEMORY, plan, Combination.of(strategy))


def test_without_sharding_it_is_the_peak() -> None:
    """What was measured beside the parts stays; local steps keep copies."""
    assert sum(kept().values()) == MEMORY.peak
    assert kept()["other"] == 200
    diloco = {"localsgd": True, "localsgd_configs": {"k_steps": 4, "outer_lr": 0.7, "outer_momentum": 0.9}}
    assert kept(**diloco)["copies of local steps"] == 3 * 4000  # what was agreed on, the momentum, the differences


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        ({"stage": 1}, {"parameters": 1000, "gathered": 4000, "gradients": 1000 + 2000, "optimizer state": 2000}),
        ({"stage": 2}, {"parameters": 1000, "gathered": 4000, "gradients": 1000 + 2000, "optimizer state": 2000}),
        # The rest and the last block stay, and the two others are freed and gathered again: both at once, while one is on its way.
        ({"stage": 3}, {"parameters": 1000, "gathered": 4000, "gradients": 3000, "optimizer state": 2000}),
        ({"stage": 3, "sharding_degree": 2}, {"parameters": 2000, "gathered": 4000, "gradients": 4000, "optimizer state": 4000}),
        ({"stage": 1, "sharding_degree": 1}, {"parameters": 4000, "gradients": 4000, "optimizer state": 8000}),
    ],
)
def test_a_shard_group_divides_what_its_stage_says(configs: dict[str, Any], expected: dict[str, int]) -> None:
    """Activations stay as they are."""
    found = kept(sharding=True, sharding_configs=configs)
    assert found == expected | {"activations": 500, "other": 200}
