"""What an averaging does to the state of each kind of optimizer; the truth is a loop in one process over torch's own optimizers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_problem as problem
from processes import Arrays, run_ranks
from states_cases import OPTIMIZERS, STEPS, K, cases, network_of, optimizer_of
from torch.nn.functional import cross_entropy
from zero_trainer import ZeroTrainer, engine_of

from fleetbench.errors import ConfigError

RANKS = 2


@functools.cache
def _ranks() -> list[Arrays]:
    return run_ranks(Path(__file__).with_name("states_rank.py"), RANKS)


@torch.no_grad()
def _average(replicas: list[list[torch.Tensor]]) -> None:
    for tensors in zip(*replicas, strict=True):
        mean = torch.stack([*tensors]).mean(dim=0)
        for tensor in tensors:
            tensor.copy_(mean)


def _written_out(name: str, rule: str) -> np.ndarray[Any, Any]:
    """Parameters ``(ranks, steps, parameters)``: averaged after updates 1, 5, 9, ..., and state as the rule says."""
    networks = [network_of() for _ in range(RANKS)]
    optimizers = [optimizer_of(name, network) for network in networks]
    history = []
    for step in range(1, STEPS + 1):
        for rank, (network, optimizer) in enumerate(zip(networks, optimizers, strict=True)):
            inputs, labels = problem.own_batch(step, rank, RANKS, "float64")
            cross_entropy(network(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        if (step - 1) % K == 0:
            _average([list(network.parameters()) for network in networks])
            whole = rule == "all state"
            states = [
                [
                    value
                    for state in own.state.values()
                    for key, value in state.items()
                    if key in OPTIMIZERS[name][2] or (whole and key != "step")
                ]
                for own in optimizers
            ]
            if rule in ("average", "all state"):
                _average(states)
            elif rule == "reset":
                for value in (value for own in states for value in own):
                    value.zero_()
        history.append([problem.flat(network).numpy().copy() for network in networks])
    return np.array(history).swapaxes(0, 1)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "rule"), cases())
def test_state_is_treated_as_the_rule_says(name: str, rule: str) -> None:
    """``reset`` and ``average`` are of momentum alone: second moments and counts of steps stay each trainer's own."""
    expected = _written_out(name, rule)
    for rank, own in zip(_ranks(), expected, strict=True):
        np.testing.assert_allclose(rank[f"{name}, {rule}"], own, rtol=0, atol=1e-12)
    plain = _written_out(name, "local")
    acts = rule != "local" and (bool(OPTIMIZERS[name][2]) or rule == "all state")
    assert (np.abs(plain - expected).max() > 1e-6) == acts


@pytest.mark.parametrize("rule", ["reset", "average"])
def test_an_unknown_optimizers_momentum_is_not_guessed(others: ZeroTrainer, rule: str) -> None:
    """State of which nobody knows whether it is momentum is refused; all of it may be averaged."""

    class Stranger(torch.optim.Optimizer):
        """Keeps a mean of gradients under a name of its own."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        def step(self) -> None:  # type: ignore[override]  # torch's takes a closure
            """Follow the mean."""
            for parameter in self.param_groups[0]["params"]:
                mean = self.state[parameter].setdefault("drift", torch.zeros_like(parameter))
                mean.mul_(0.9).add_(parameter.grad)
                parameter.data.add_(mean, alpha=-0.1)

    network = torch.nn.Linear(2, 2)
    engine, _ = engine_of(network, others, localsgd=True, localsgd_configs={"k_steps": 2, "momentum": rule})
    with pytest.raises(ConfigError, match=r"Stranger keeps drift[\s\S]*optimizer_state"):
        engine.attach_optimizer(Stranger(network.parameters()))
    engine.close()
