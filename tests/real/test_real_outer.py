"""Outer optimizers and fragments on processes: torchft's golden numbers, written-out loops with AdamW inside, and NCCL's semantics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_problem as problem
from outer_cases import CASES, STEPS, WORKERS
from processes import Arrays, run_ranks
from torch.nn.functional import cross_entropy
from torchft_fragments import golden

RANK = Path(__file__).with_name("outer_rank.py")
LAYERS = ({0, 1}, {2, 3, 4, 5, 6, 7})
"""Parameters of the two fragments of the problem's model by hand: layers of 520, 287, 264 and 170 numbers; 520 and 721 is the best cut."""


@pytest.fixture(scope="module")
def ranks() -> Callable[[int, str], list[Arrays]]:
    """What so many ranks found on a backend."""
    return functools.cache(lambda number, backend: run_ranks(RANK, number, backend))


def leave_gradients(networks: list[torch.nn.Module], step: int, together: int) -> None:
    """Of each rank's batch, and of so many ranks together their mean."""
    for rank, network in enumerate(networks):
        inputs, labels = problem.own_batch(step, rank, len(networks), "float64")
        cross_entropy(network(inputs), labels).backward()
    for first in range(0, len(networks), together):
        for same in zip(*(network.parameters() for network in networks[first : first + together]), strict=True):
            mean = torch.stack([own.grad for own in same if own.grad is not None]).mean(dim=0)
            for own in same:
                own.grad = mean.clone()


def written_out(number: int, changes: dict[str, Any]) -> tuple[np.ndarray[Any, Any], set[int]]:
    """Parameters ``(ranks, steps, parameters)`` of DiLoCo as the papers write it, and the steps after which a merge comes.

    The outer optimizer is torch's own, over copies of the parameters that have the averaged difference as their gradient. Ranks of a worker
    step on the mean of their gradients.
    """
    networks = [problem.model("float64") for _ in range(number)]
    inner = [torch.optim.AdamW(network.parameters(), lr=0.01) for network in networks]
    theta = [parameter.detach().clone().requires_grad_() for parameter in networks[0].parameters()]
    parts = LAYERS if changes.get("fragments") == 2 else (set(range(len(theta))),)
    momentum, nesterov = changes.get("outer_momentum", 0.0), changes.get("outer_nesterov", True)
    outer = [
        torch.optim.SGD([theta[i] for i in sorted(part)], changes.get("outer_lr", 1.0), momentum, nesterov=nesterov and momentum > 0)
        for part in parts
    ]
    period, overlap, share = changes["k_steps"] // len(parts), changes.get("overlap_steps", 0), changes.get("mixing", 0.0)
    history, merges, waiting = [], set(), {}
    for step in range(1, STEPS + 1):
        leave_gradients(networks, step, changes.get("worker_trainers", 1))
        for optimizer in inner:
            optimizer.step()
            optimizer.zero_grad()
        locals_ = [list(network.parameters()) for network in networks]
        turn = (step - 1) // period % len(parts)
        with torch.no_grad():
            if (step - 1) % period + 1 == period - overlap:
                waiting = {i: torch.stack([theta[i] - own[i] for own in locals_]).mean(dim=0) for i in parts[turn]}
            if step % period == 0:
                for i, difference in waiting.items():
                    theta[i].grad = difference
                outer[turn].step()
                for own in locals_:
                    for i in parts[turn]:
                        own[i].copy_((1 - share) * theta[i] + share * own[i])
                merges.add(step)
        history.append([problem.flat(network).numpy().copy() for network in networks])
    return np.array(history).swapaxes(0, 1), merges


@pytest.mark.parametrize("backend", ["gloo", pytest.param("deferred", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("overlap", "mixing"), golden())
def test_golden_numbers_of_torchft(ranks: Callable[[int, str], list[Arrays]], backend: str, overlap: int, mixing: float) -> None:
    """Every value that torchft recorded of two replicas and two fragments, on the engine."""
    found = [rank[f"torchft {overlap} {mixing}"] for rank in ranks(2, backend)]
    for row in golden()[overlap, mixing]:
        own = found[row.replica][row.step]
        assert tuple(own[:2]) == row.local
        if row.agreed is not None:
            assert tuple(own[2:]) == row.agreed


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("number", "backend"), [(2, "gloo"), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((3, "gloo"), (2, "deferred")))]
)
def test_it_is_the_written_out_loop(ranks: Callable[[int, str], list[Arrays]], number: int, backend: str, name: str) -> None:
    """At every step every rank holds what AdamW inside and torch's SGD on the averaged difference give it."""
    expected, merges = written_out(number, CASES[name][0])
    tolerance = 2e-3 if "BF16" in name else 1e-12
    for rank, own in zip(ranks(number, backend), expected, strict=True):
        np.testing.assert_allclose(rank[f"{name}/history"], own, rtol=0, atol=tolerance)
    assert len(merges) >= 6


@pytest.mark.parametrize("name", WORKERS)
@pytest.mark.parametrize("backend", ["gloo", pytest.param("deferred", marks=pytest.mark.slow)])
def test_workers_of_two_are_the_written_out_loop(ranks: Callable[[int, str], list[Arrays]], backend: str, name: str) -> None:
    """Ranks of a worker hold the same bits after every step, and all ranks at the end; every rank is the loop's."""
    expected, _ = written_out(4, WORKERS[name][0])
    found = ranks(4, backend)
    for rank, own in zip(found, expected, strict=True):
        off = np.abs(rank[f"{name}/history"] - own)
        assert (np.quantile(off, 0.95) < 2e-3) if "BF16" in name else (off.max() < 1e-12)  # Adam steps by signs, which rounding may turn
        np.testing.assert_array_equal(rank[f"{name}/end"], found[0][f"{name}/end"])
    for first, second in ((0, 1), (2, 3)):
        np.testing.assert_array_equal(found[first][f"{name}/history"], found[second][f"{name}/history"])
    assert not np.array_equal(found[0][f"{name}/history"][0], found[2][f"{name}/history"][0])
    alone, _ = written_out(4, WORKERS[name][0] | {"worker_trainers": 1})
    assert np.abs(alone - expected).max() > 1e-3


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("number", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_are_equal_bit_by_bit(ranks: Callable[[int, str], list[Arrays]], number: int, name: str) -> None:
    """After each merge in what it merged, unless a share of their own stays, and in all of the model at the end of training."""
    first, *others = ranks(number, "gloo")
    changes = CASES[name][0]
    sizes = [parameter.numel() for parameter in problem.model("float64").parameters()]
    places = np.repeat(np.arange(len(sizes)), sizes)
    parts = LAYERS if changes.get("fragments") == 2 else (set(range(len(sizes))),)
    period = changes["k_steps"] // len(parts)
    for other in others:
        np.testing.assert_array_equal(other[f"{name}/end"], first[f"{name}/end"])
        assert not np.array_equal(other[f"{name}/history"][0], first[f"{name}/history"][0])
        for step in range(period, STEPS + 1, period) if not changes.get("mixing") else ():
            merged = np.isin(places, list(parts[(step - 1) // period % len(parts)]))
            one, two = (rank[f"{name}/history"][step - 1][merged] for rank in (first, other))
            np.testing.assert_array_equal(one, two)


@pytest.mark.slow
def test_a_trainer_alone_steps_outside_too(ranks: Callable[[int, str], list[Arrays]]) -> None:
    """With one trainer the outer optimizer acts on its own differences: not the plain loop. Averaging alone is the plain loop."""
    (found,) = ranks(1, "gloo")
    plain, _ = written_out(1, {"k_steps": 3})
    for name in ("outer", "two fragments beside two steps"):
        expected, _ = written_out(1, CASES[name][0])
        np.testing.assert_allclose(found[f"{name}/history"], expected[0], rtol=0, atol=1e-12)
        assert np.abs(plain[0] - expected[0]).max() > 1e-3
