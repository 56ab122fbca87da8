"""Users' loops: accumulation, several backwards, schedulers, clipping and evaluations train as DDP or one process does.

The truth is the same loop, a network a trainer in one process, with the gradients or the parameters
averaged by hand.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import loop_cases
import numpy as np
import numpy.typing as npt
import pytest
import torch
import training_loops as loops
import training_problem as problem
from loop_cases import Case, Truth, cases, sample
from processes import Arrays, run_ranks, values_of
from training_loops import Script

RANKS = 2
SAMPLE = sample()


ALWAYS = ("several buckets: ", "K = 3: ", "ddp: ")
"""Strategies whose loops `make test` trains all; of the sample's others, one in eight."""


def _of_type(dtype: str) -> pytest.MarkDecorator:
    """The cases of a type; those outside of the sample are of the whole campaign."""
    found = [case for case in cases() if case.truth.dtype == dtype]
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=_marks(case)) for case in found])


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    if case not in SAMPLE:
        return [pytest.mark.whole]
    return [pytest.mark.slow] * (not case.name.startswith(ALWAYS) and SAMPLE.index(case) % 8 != 0)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> list[Arrays]:
    """What every rank has found in the cases that the tests look at."""
    names = {case.name for case in values_of(request, "case")}
    names |= {f"{family}: {loop.__name__}" for family in values_of(request, "family") for loop in loop_cases.COUNTED}
    return run_ranks(Path(__file__).with_name("loops_rank.py"), RANKS, json.dumps(sorted(names)))


@functools.cache
def _truth(case: Truth) -> npt.NDArray[np.float64]:
    """``(ranks, steps, parameters)``: every trainer's parameters after each ``optimizer.step()``."""
    scripts = [_script(case, rank) for rank in range(RANKS)]
    networks = [script.model for script in scripts]
    histories: list[list[npt.NDArray[np.float64]]] = [[] for _ in scripts]
    sums = _no_sums(networks)
    merged = updates = 0
    due = 1
    for steps in zip(*(case.loop(script) for script in scripts), strict=True):
        assert len(set(steps)) == 1
        if steps[0] is None and updates > due - case.meets:
            _average(networks)
            due = updates + case.meets
        if steps[0]:
            merged = 1 if case.merge == 1 else merged + 1  # where the gradients may be thrown away, and come again
            sums = [_take(network, total) for network, total in zip(networks, sums, strict=True)]
            if merged == case.merge:
                _share(networks, sums, case)
                sums = _no_sums(networks)
            continue
        if steps[0] is False and merged == case.merge:
            merged, updates = 0, updates + 1
            if case.meets and updates == due:
                _average(networks)
                due += case.meets
        for network, history in zip(networks, histories, strict=True):
            history.append(problem.flat(network).numpy().copy())
    return np.array(histories)


def _script(case: Truth, rank: int) -> Script:
    network = problem.model(case.dtype, case.model)
    if isinstance(network, problem.Gated):
        network.rank = rank
    optimizer = problem.optimizer_of("sgd" if case.model == "looked" else "momentum")(network)
    return Script(network, optimizer, rank, RANKS, dtype=case.dtype)


def _no_sums(networks: list[torch.nn.Module]) -> list[list[torch.Tensor | None]]:
    return [[None for _ in network.parameters()] for network in networks]


def _take(network: torch.nn.Module, total: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The sums with the gradients, which are gone then."""
    taken = [_sum([before, parameter.grad]) for before, parameter in zip(total, network.parameters(), strict=True)]
    for parameter in network.parameters():
        parameter.grad = None
    return taken


def _share(networks: list[torch.nn.Module], sums: list[list[torch.Tensor | None]], case: Truth) -> None:
    """Make what was summed up the gradient: the trainers' mean, or each one's own where trainers update alone."""
    for network, own in zip(networks, sums, strict=True):
        for index, parameter in enumerate(network.parameters()):
            total = own[index] if case.meets else _sum([other[index] for other in sums])
            parameter.grad = None if total is None else total / (case.merge * (1 if case.meets else len(sums)))


def _sum(tensors: list[torch.Tensor | None]) -> torch.Tensor | None:
    found = [tensor for tensor in tensors if tensor is not None]
    return functools.reduce(torch.add, found) if found else None


@torch.no_grad()
def _average(networks: list[torch.nn.Module]) -> None:
    for tensors in zip(*(network.parameters() for network in networks), strict=True):
        mean = torch.stack([tensor.detach() for tensor in tensors]).mean(dim=0)
        for tensor in tensors:
            tensor.copy_(mean)


@pytest.mark.sample(3)
@_of_type("float64")
def test_a_loop_trains_as_it_says(results: list[Arrays], case: Case) -> None:
    """After every ``optimizer.step()`` each trainer holds the parameters of the written-out loop; DDP's are among the cases."""
    expected = _truth(case.truth)
    for rank in range(RANKS):
        np.testing.assert_allclose(results[rank][f"{case.name}/history"], expected[rank], rtol=0, atol=1e-12)
    assert np.abs(expected[0, -1] - expected[0, 0]).max() > 1e-3


@_of_type("float32")
def test_a_loop_trains_so_under_mixed_precision(results: list[Arrays], case: Case) -> None:
    """Gradients that wait in ``.grad`` stay scaled, and all are unscaled once: training stays FP32's within half precision's resolution."""
    expected = _truth(case.truth)
    start = problem.flat(problem.model(case.truth.dtype)).numpy()
    for rank in range(RANKS):
        history = results[rank][f"{case.name}/history"]
        assert np.abs(history - expected[rank]).max() < 0.05 * np.abs(expected[rank] - start).max()


FAMILIES = pytest.mark.parametrize("family", loop_cases.SYNCHRONOUS)


@pytest.mark.sample(3)
@FAMILIES
def test_only_backwards_outside_of_no_sync_are_exchanged(results: list[Arrays], family: str) -> None:
    """A backward inside costs no collective; one more outside costs another exchange of all buckets."""
    saved = results[0]
    buckets = int(saved[f"{family}: usual/buckets"])
    for loop, exchanges in ((loops.usual, 1), (loops.in_no_sync, 1), (loops.two_forwards, 1), (loops.plain, 2), (loops.two_losses, 2)):
        counts = saved[f"{family}: {loop.__name__}/collectives"].tolist()
        assert counts == [exchanges * buckets] * loops.UPDATES, loop.__name__


@pytest.mark.sample(3)
@FAMILIES
def test_what_a_penalty_computes_is_no_backward(results: list[Arrays], family: str) -> None:
    """``torch.autograd.grad`` within a step leaves nothing in ``.grad``, and nothing is exchanged for it."""
    assert results[0][f"{family}: penalty/collectives"].tolist() == results[0][f"{family}: usual/collectives"].tolist()
