"""The cost of an all-reduce that an engine measures at its start, where the time of one is known."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from real.engine.planning import measured_cost

TAKES_S = 0.02


class Known:
    """Communicators whose all-reduces sleep, in another thread or in the caller's."""

    device = torch.device("cpu")

    def __init__(self, *, is_beside: bool) -> None:
        self._pool = ThreadPoolExecutor(1) if is_beside else None

    def lane(self, _number: int) -> Known:
        """Return the one lane."""
        return self

    def submit(self, operation: Callable[[], None], _after: object) -> Any:
        """Run it in the pool, or at once."""
        if self._pool is not None:
            future = self._pool.submit(operation)
            future.wait = future.result  # type: ignore[attr-defined]  # as a ticket is waited for
            return future
        done: Future[None] = Future()
        operation()
        done.set_result(None)
        done.wait = done.result  # type: ignore[attr-defined]  # as above
        return done

    def all_reduce(self, _tensor: torch.Tensor, _operator: str) -> None:
        """Take the same time for every size."""
        time.sleep(TAKES_S)

    def barrier(self) -> None:
        """Nobody else is there."""

    def broadcast(self, _tensor: torch.Tensor) -> None:
        """As above."""


@pytest.mark.alone
def test_what_runs_in_turns_is_slowed_and_what_runs_beside_compute_is_not() -> None:
    """An all-reduce of 20 ms, whatever its size: all of it is latency. Compute of 20 ms beside it takes no longer, or twice as long."""
    beside, in_turns = (measured_cost(Known(is_beside=one), slows=True) for one in (True, False))  # type: ignore[arg-type]  # a fake
    for cost in (beside, in_turns):
        assert 1e9 * TAKES_S <= cost.latency_ns < 2e9 * TAKES_S
        assert cost.ns_per_byte < 1.0
    assert beside.own_slowdown == beside.compute_slowdown < 0.5 < in_turns.own_slowdown == in_turns.compute_slowdown
    assert measured_cost(Known(is_beside=False), slows=False).own_slowdown == 0.0  # type: ignore[arg-type]  # a fake
