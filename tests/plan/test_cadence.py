from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from fleetbench.plan.local_sgd import Cadence
from fleetbench.strategy import DistributedStrategy

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
    ("k", "begin_step", "published"),
    [(4, 1, [1, 5, 9, 13]), (4, 6, [1, 2, 3, 4, 5, 6, 10, 14]), (1, 1, list(range(1, 15))), (3, 2, [1, 2, 5, 8, 11, 14])],
)
def test_fleets_schedule(k: int, begin_step: int, published: list[int]) -> None:
    """Every update up to begin_step, then K after the last averaging; the adaptive one counts with the K it is given."""
    assert met(Cadence(k_steps=k, begin_step=begin_step), range(1, 15)) == published
    assert met(Cadence(begin_step=begin_step), range(1, 15), k=k) == published


def test_fleets_round_starts_anew_at_an_averaging_on_request() -> None:
    """K counts from the last averaging, wherever that was; the other two schedules have fixed places."""
    for cadence, expected in (
        (Cadence(k_steps=4), 11),
        (document(4), 9),
        (torchs(4), 9),
    ):
        assert next(update for update in range(8, 20) if cadence.synchronises(update, 7, UNUSED_K, 5)) == expected


def test_an_adaptive_round_ends_with_the_k_of_today() -> None:
    """A K that shrinks below what has passed ends the round with the next update."""
    schedule = Cadence()
    assert not schedule.synchronises(5, 1, 8, 0)
    assert schedule.synchronises(5, 1, 3, 0)


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


def test_the_documents_schedule() -> None:
    """An update counts from 0 and meets where the K of its epoch divides it, in whichever epoch that is."""
    assert met(document(4), range(1, 15), epoch=2) == [1, 5, 9, 13]
    schedule = document(4, warmup_epochs=1)
    epochs = {update: (update - 1) // 6 for update in range(1, 31)}  # six updates an epoch: K is 1, 1, 2, 4, 4
    found = [update for update, epoch in epochs.items() if schedule.synchronises(update, None, UNUSED_K, epoch)]
    assert found == [*range(1, 13), 13, 15, 17, 21, 25, 29]


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


@pytest.mark.parametrize("cadence", [Cadence(k_steps=4), Cadence(), document(4), torchs(4, begin_step=8)])
def test_warm_up_before_training_synchronises(cadence: Cadence) -> None:
    """Updates numbered 0 and below all average, whichever the schedule."""
    assert met(cadence, range(-6, 1), k=4, epoch=9) == list(range(-6, 1))


@pytest.mark.parametrize(
    ("fields", "cadence"),
    [
        ({"localsgd": True, "localsgd_configs": {"k_steps": 4, "begin_step": 6}}, Cadence(k_steps=4, begin_step=6)),
        ({"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 4, "begin_step": 6}}, Cadence(begin_step=6)),
        (
            {"localsgd": True, "localsgd_configs": {"schedule": "document", "k_steps": 4, "warmup_epochs": 3, "warmup": "linear"}},
            document(4, warmup_epochs=3, warmup="linear"),
        ),
        (
            {"use_local_sgd": True, "local_sgd_steps": 4, "local_sgd_is_warm_steps": 3},
            document(4, warmup_epochs=3, warmup="exp"),
        ),
        (
            {"localsgd": True, "localsgd_configs": {"schedule": "torch", "k_steps": 4, "begin_step": 6}},
            torchs(4, begin_step=6),
        ),
        ({"localsgd": True, "localsgd_configs": {"schedule": "torch", "k_steps": 4}}, torchs(4)),
        ({"localsgd": True, "localsgd_configs": {"schedule": "torch", "k_steps": 4, "outer_lr": 0.7}}, torchs(4)),
        ({"localsgd": True, "localsgd_configs": {"k_steps": 4, "outer_lr": 0.7}}, Cadence(k_steps=4, begin_step=0)),
    ],
)
def test_the_cadence_of_a_strategy(fields: dict[str, Any], cadence: Cadence) -> None:
    """Each schedule by its name; torch's warm-up, counted from 0, ends before ``begin_step``, counted from 1."""
    assert Cadence.of(DistributedStrategy().replace(**fields)) == cadence
