"""The cost of an all-reduce that an engine measures at its start, where the time of one is known."""

from __future__ import annotations

import time

import pytest
import torch

from real.engine.planning import measured_cost

TAKES_S = 0.02


class Known:
    """Communicators whose all-reduces sleep."""

    device = torch.device("cpu")

    def all_reduce(self, _tensor: torch.Tensor, _operator: str) -> None:
        """Take the same time for every size."""
        time.sleep(TAKES_S)

    def barrier(self) -> None:
        """Return: there is no other trainer."""

    def broadcast(self, _tensor: torch.Tensor) -> None:
        """As above."""


@pytest.mark.alone
def test_the_cost_of_an_all_reduce_is_measured() -> None:
    """An all-reduce of 20 ms, whatever its size: all of it is latency."""
    cost = measured_cost(Known())  # type: ignore[arg-type]  # a fake
    assert 1e9 * TAKES_S <= cost.latency_ns < 2e9 * TAKES_S
    assert cost.ns_per_byte < 1.0
