"""Strategies that change between two steps of a living script: what is trained, and what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import script_legs_rank
import torch
import training_problem as problem
from processes import Arrays, run_ranks
from torch.nn.functional import cross_entropy

from real.job.folder import DriverSide

RANKS = 2
SCRIPT = Path(script_legs_rank.__file__)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Arrays], DriverSide]:
    """One launch: what every rank saw, and the tuning directory."""
    tuning = tmp_path_factory.mktemp("switching") / "tuning"
    script_legs_rank.order_all(tuning)
    return run_ranks(SCRIPT, RANKS, str(tuning)), DriverSide(tuning)


def _written_out() -> np.ndarray:
    """``(ranks, steps, parameters)``: the same training, one process, a network and an optimizer a rank.

    In step: gradients are averaged. In rounds: averages after local steps 1, 4, 7, and after the last; then all have rank 0's momentum.
    """
    networks = [problem.model("float64") for _ in range(RANKS)]
    optimizers = [problem.optimizer_of("momentum")(network) for network in networks]
    histories: list[list[np.ndarray]] = [[] for _ in range(RANKS)]
    for step in range(1, 18):
        for rank, network in enumerate(networks):
            inputs, labels = problem.own_batch(step, rank, RANKS, "float64")
            cross_entropy(network(inputs), labels).backward()
        replicas = list(zip(*(network.parameters() for network in networks), strict=True))
        if not 5 <= step <= 12:
            for parameters in replicas:
                _average([parameter.grad for parameter in parameters if parameter.grad is not None])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step in (5, 8, 11, 12):
            for parameters in replicas:
                _average(parameters)
        if step == 12:
            _spread_momentum(optimizers)
        for network, history in zip(networks, histories, strict=True):
            history.append(problem.flat(network).numpy())
    return np.array(histories)


@torch.no_grad()
def _average(tensors: Sequence[torch.Tensor]) -> None:
    mean = torch.stack(list(tensors)).mean(dim=0)
    for tensor in tensors:
        tensor.copy_(mean)


def _spread_momentum(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for first, *others in zip(*(optimizer.state.values() for optimizer in optimizers), strict=True):
        for other in others:
            other["momentum_buffer"].copy_(first["momentum_buffer"])


@pytest.mark.sample(2)
def test_switched_strategies_train_as_a_loop_that_does_the_same(trained: tuple[list[Arrays], DriverSide]) -> None:
    """After every one of 17 steps, on both ranks, to 12 digits; between averagings the ranks differ."""
    expected = _written_out()
    assert np.abs(expected[0, 5] - expected[1, 5]).max() > 1e-6
    for rank, arrays in enumerate(trained[0]):
        assert len(arrays["history"]) == 17
        np.testing.assert_allclose(arrays["history"], expected[rank], rtol=0, atol=1e-12)


def test_gradients_outlive_a_change(trained: tuple[list[Arrays], DriverSide]) -> None:
    """After every ``optimizer.step()``, whether a leg has ended there or not, the loop finds ``.grad``."""
    for arrays in trained[0]:
        assert arrays["gradients"][:16].all()


def test_every_leg_has_its_part(trained: tuple[list[Arrays], DriverSide]) -> None:
    """Complete, from both ranks, with as many steps as were ordered, the losses that the script reported, and what it is."""
    for number, steps in enumerate((4, 8, 5)):
        parts = trained[1].parts(number)
        assert sorted(parts) == [0, 1]
        for part in parts.values():
            assert (part["complete"], part["num_steps"], len(part["steps"]), part["not_finite"]) == (True, steps, steps, None)
            assert all(0 < entry["record"]["loss"] < 5 for entry in part["steps"])
            assert part["peak_bytes"] > 10**7
    facts = trained[1].parts(0)[0]["facts"]
    assert (facts["trainers"], facts["batch_size"], facts["optimizer"], facts["momentum"]) == (2, problem.BATCH, "SGD", 0.9)
    assert facts["reports_loss"]
    rounds = [entry["record"]["local_steps"] for entry in trained[1].parts(1)[0]["steps"]]
    assert rounds == [1, None, None, 3, None, None, 3, 1]
    buckets = [len(trained[1].parts(number)[0]["plan"]["buckets"]) for number in range(3)]
    assert buckets[0] == 1
    assert buckets[2] == len(list(problem.model("float64").parameters()))
