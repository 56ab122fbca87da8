from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from fleetbench.plan.local_sgd import Cadence

UNUSED_K = 10**6
"""What a schedule with a K of its own must not look at."""


def document(k: int, warmup_epochs: int = 0, warmup: Any = "exp") -> Cadence:
    """The older document's schedule."""
    return Cadence(schedule="document", k_steps=k, warmup_epochs=warmup_epochs, warmup=warmup)


def torchs(k: int, begin_step: int = 1) -> Cadence:
    """Torch's schedule."""
    return Cadence(schedule="torch", k_steps=k, begin_step=begin_step)


def met(cadence: Cadence, updates: Iterable[int], k: int = UNUSED_K, epoch: int = 0) -> list[int]:
    """Updates after which trainers meet, from the first of ``updates`` on."""
    last_sync, found = None, []
    for update in updates:
        if cadence.synchronises(update, last_sync, k, epoch):
            found.append(update)
            last_sync = update
    return found


@pytest.mark.parametrize(
    ("k", "warmup", "published"),
    [
        (16, "exp", [1, 1, 1, 1, 2, 4, 8, 16, 16]),
        (6, "exp", [1, 1, 1, 1, 2, 4, 6, 6, 6]),
        (16, "linear", [1, 1, 1, 1, 2, 4, 6, 8, 10]),
        (6, "linear", [1, 1, 1, 1, 2, 4, 6, 6, 6]),
        (5, "linear", [1, 1, 1, 1, 2, 4, 5, 5, 5]),
        (16, "const", [1, 1, 1, 16, 16, 16, 16, 16, 16]),
        (1, "exp", [1] * 9),
        (1, "linear", [1] * 9),
    ],
)
def test_the_documents_k_of_each_epoch(k: int, warmup: Any, published: list[int]) -> None:
    """Three epochs of warm-up with K = 1, then K grows by powers of two, by twos, or at once."""
    assert [document(k, warmup_epochs=3, warmup=warmup).k_of(epoch) for epoch in range(9)] == published
    assert document(k, warmup_epochs=3, warmup=warmup).k_of(10**9) == k


@pytest.mark.parametrize(("period", "warmup_steps", "listed"), [(4, 0, [1, 5, 9, 13]), (4, 5, [6, 10, 14]), (3, 2, [3, 6, 9, 12])])
def test_torchs_schedule_is_its_averagers(monkeypatch: pytest.MonkeyPatch, period: int, warmup_steps: int, listed: list[int]) -> None:
    """The updates after which torch's own PeriodicModelAverager averages are those of the ``torch`` schedule."""
    from torch.distributed.algorithms.model_averaging import averagers, utils

    averaged: list[int] = []
    averager = averagers.PeriodicModelAverager(period, warmup_steps, process_group=object())  # type: ignore[arg-type]  # no group is reached
    monkeypatch.setattr(utils, "average_parameters_or_parameter_groups", lambda *_: averaged.append(averager.step + 1))
    for _ in range(14):
        averager.average_parameters([])
    assert averaged == listed
    assert met(torchs(period, begin_step=warmup_steps + 1), range(1, 15)) == averaged
