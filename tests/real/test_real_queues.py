"""Buckets that queue on a communicator of gloo: results bit for bit, order, and how many are under way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from processes import Arrays, run_ranks
from queues_rank import SIZES, STEPS, STRATEGIES, gradient

from fleetbench.plan.groups import queue_depth

RANKS = 2
Spans = npt.NDArray[np.int64]


@pytest.fixture(scope="module")
def results() -> list[Arrays]:
    """What every rank saved, all strategies from one launch."""
    return run_ranks(Path(__file__).with_name("queues_rank.py"), RANKS)


def means(step: int) -> npt.NDArray[np.generic]:
    """Of all parameters, the mean of the ranks' gradients: of two numbers it is rounded once."""
    own = [torch.cat([gradient(rank, step, position) for position in range(len(SIZES))]) for rank in range(RANKS)]
    return ((own[0] + own[1]) / 2).numpy()


def spans_of(result: Arrays, name: str) -> list[Spans]:
    """Of every step, rows of bucket, communicator, begin and end, by begin."""
    rows: Any = result[f"{name}/spans"]
    by_step = [rows[rows[:, 0] == step][:, 1:].tolist() for step in sorted(set(rows[:, 0]))]
    return [np.array(sorted(own, key=lambda row: (row[2], row[0]))) for own in by_step]


def most_at_once(spans: Spans) -> int:
    """Collectives under way together."""
    return max(int(((spans[:, 2] <= begin) & (begin < spans[:, 3])).sum()) for begin in spans[:, 2])


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", ["free", "in step", "in step on two", "free on two"])
def test_gradients_are_the_mean_bit_for_bit(results: list[Arrays], name: str) -> None:
    """On both ranks, in every step, however many are under way."""
    for result in results:
        for step in range(STEPS):
            assert np.array_equal(result[f"{name}/gradients {step}"], means(step))


def test_parameters_and_momentum_are_averaged_bit_for_bit(results: list[Arrays]) -> None:
    """Local SGD at K = 1, whose parameters and momentum both go free: the ranks agree, and are where the mean gradients lead."""
    value, velocity = np.zeros(sum(SIZES)), np.zeros(sum(SIZES))
    for step in range(STEPS):
        velocity = 0.9 * velocity + means(step)
        value = value - 0.5 * velocity
    assert np.array_equal(results[0]["local/parameters"], results[1]["local/parameters"])
    np.testing.assert_allclose(results[0]["local/parameters"], value, atol=1e-5)


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_more_are_under_way_than_there_is_room_for(results: list[Arrays], name: str) -> None:
    """Two of a communicator where they go free, and two there are; one in all where they do not."""
    seen = []
    for result in results:
        for spans in spans_of(result, name):
            by_communicator = [spans[spans[:, 1] == communicator] for communicator in sorted(set(spans[:, 1].tolist()))]
            seen.append(max(map(most_at_once, by_communicator)))
            if name.startswith("in step"):
                assert most_at_once(spans) == 1
    assert max(seen) == (2 if name in ("free", "free on two", "local") else 1)


@pytest.mark.parametrize("name", ["free", "in step", "free on two"])
def test_buckets_begin_in_the_plans_order(results: list[Arrays], name: str) -> None:
    """On each communicator, on both ranks."""
    for result in results:
        for spans in spans_of(result, name):
            assert len(spans) == len(SIZES)
            for communicator in set(spans[:, 1].tolist()):
                own = spans[spans[:, 1] == communicator][:, 0].tolist()
                assert own == sorted(own)


def test_gloo_has_as_many_threads_as_a_plan_believes(results: list[Arrays]) -> None:
    """Each carries one collective of the group; where all follow one another there is one."""
    assert [int(result["threads"]) for result in results] == [queue_depth("gloo")] * RANKS
    assert [int(result["threads in turn"]) for result in results] == [1] * RANKS
