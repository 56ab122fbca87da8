"""What making batches takes, told apart from the loop's own work."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from typing import Any, cast

import profile_steps
import pytest
import torch
from torch import nn

from fleetbench.plan.layers import StepHead
from fleetbench.strategy import DistributedStrategy
from fleetbench.workloads.data.reader import BatchTime, ReadsAhead
from real.communication.communicators import Communicators, collective_errors
from real.layer_times import ProfileLeg, table_of
from real.leg import Leg

MS = 1_000_000
OWN_MS = 5
"""What the loop of ``measured`` sleeps in every step: on a busy machine it is more, never less."""


class AheadOfTime:
    """Batches whose times are made up."""

    def __init__(self, loaders: int, times: list[BatchTime]) -> None:
        self.loaders = loaders
        self.times = deque(times)


class Alone:
    """A world of one on the CPU."""

    device = torch.device("cpu")
    trainers, rank = 1, 0
    errors = staticmethod(collective_errors)


def measured(reads_ahead: ReadsAhead | None) -> dict[str, Any]:
    """What a profile leg of a tiny model has, on this machine's clock. The loop itself takes ``OWN_MS`` before each forward."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def next_loss() -> torch.Tensor:
        time.sleep(OWN_MS / 1000)
        loss: torch.Tensor = model(torch.ones(2, 4)).sum()
        return loss

    leg = ProfileLeg(model, optimizer, cast("Communicators", Alone()), reads_ahead=reads_ahead)
    wanted = Leg(strategy=DistributedStrategy(), steps=6, warmup_steps=4, start="initial", profile=True)
    return dataclasses.asdict(profile_steps.run(leg, optimizer, next_loss, wanted))


def test_a_reader_ahead_gives_load_and_loaders() -> None:
    """Batches of an hour by two processes, for which the loop waited, are in the table; the wait is not in ``read``."""
    hour = 3_600_000 * MS
    part = measured(cast("ReadsAhead", AheadOfTime(2, [BatchTime(hour, hour)] * 100)))
    assert set(part["load"]) == {hour}
    assert part["loaders"] == 2
    assert max(part["read"][:-1]) == 0  # all of these steps' rest is shorter than the wait that is taken from it
    table = table_of("key", [part])
    assert (table.load, table.loaders, table.prefetch) == (hour, 2, 2)
    assert StepHead(table, 1, 0).forward_begins(0) == hour + table.read


@pytest.mark.parametrize("reads_ahead", [None, AheadOfTime(0, [BatchTime(30 * MS, MS)] * 100), AheadOfTime(2, [])])
def test_a_loop_that_makes_its_batches_has_all_in_read(reads_ahead: Any) -> None:
    """No process makes them, or the model takes none of them: as before."""
    part = measured(reads_ahead)
    assert (part["load"], part["loaders"]) == ([], 0)
    assert statistics.median(part["read"][:-1]) > OWN_MS * MS / 2
    assert (table_of("key", [part]).load, table_of("key", [part]).loaders) == (0, 0)
