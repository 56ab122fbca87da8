"""Other libraries' Local SGD: the same parameters where the algorithm is the same, and what differs where it is not.

torch's ``PostLocalSGDOptimizer`` with its ``PeriodicModelAverager``, and torchft's ``LocalSGD`` with a
manager that always commits. On three ranks, because a mean over a power of two rounds nothing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import training_problem as problem
from processes import Arrays, run_ranks
from rivals_cases import POST_LOCAL, POST_LOCAL_IN_DDP, RIVALS, TORCHFT, Rival
from torch.nn.functional import cross_entropy

pytestmark = pytest.mark.slow

RANK = Path(__file__).with_name("rivals_rank.py")
RANKS = 3
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def results() -> list[Arrays]:
    """What every rank saved, all cases from one launch."""
    return run_ranks(RANK, RANKS)


def _rivals(results: list[Arrays], case: Rival, name: str = "history") -> list[tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]]:
    """Ours and theirs, on every rank."""
    if case.kind == "torchft" and "torchft/missing" in results[0]:
        pytest.skip(f"SKIPPED: {results[0]['torchft/missing']} (pip install --no-deps torchft)")
    return [(rank[f"{case.name}/ours/{name}"], rank[f"{case.name}/theirs/{name}"]) for rank in results]


@pytest.mark.parametrize("case", [case for case in RIVALS if case.same], ids=lambda case: case.name)
def test_the_same_algorithm_gives_the_same_parameters(results: list[Arrays], case: Rival) -> None:
    """After every step every rank holds the parameters that it holds with the other library, its own within a round."""
    histories = _rivals(results, case)
    for own, other in histories:
        np.testing.assert_allclose(own, other, rtol=0, atol=TOLERANCE)
    apart = np.abs(histories[0][1] - histories[1][1]).max(axis=1)
    assert (apart > 1e-6).any() == (case.k_steps > 1)


def test_a_schedule_that_is_another_one_gives_other_parameters(results: list[Arrays]) -> None:
    """The comparison can fail: torch's averager starts with the first update, torchft with the K-th."""
    one, other = POST_LOCAL[2], TORCHFT[2]
    assert (one.k_steps, one.optimizer) == (other.k_steps, other.optimizer) == (4, "sgd")
    first, later = (results[0][f"{case.name}/ours/history"] for case in (one, other))
    assert np.abs(first - later).max() > 1e-4


def test_averaged_gradients_and_averaged_models_leave_different_momentum(results: list[Arrays]) -> None:
    """Post-local SGD's warm-up in DDP averages gradients, so ranks leave it with one momentum; ours average models and keep their own."""
    (case,) = (case for case in POST_LOCAL_IN_DDP if not case.same)
    for own, other in _rivals(results, case):
        np.testing.assert_allclose(own[: case.warmup + 1], other[: case.warmup + 1], rtol=0, atol=TOLERANCE)
        assert np.abs(own[case.warmup + 1] - other[case.warmup + 1]).max() > 1e-6


@pytest.mark.parametrize("case", [POST_LOCAL[2], TORCHFT[2]], ids=["torch", "torchft"])
def test_training_that_ends_within_a_round_leaves_their_ranks_apart(results: list[Arrays], case: Rival) -> None:
    """After the end ours hold the mean of what theirs still hold apart."""
    ends = _rivals(results, case, "end")
    mean = np.mean([other for _, other in ends], axis=0)
    for own, other in ends:
        np.testing.assert_array_equal(own, ends[0][0])
        np.testing.assert_allclose(own, mean, rtol=0, atol=TOLERANCE)
        assert np.abs(other - mean).max() > 1e-6


def test_an_averaging_is_a_bucket_an_all_reduce_where_torchft_has_a_parameter(results: list[Arrays]) -> None:
    """Both carry the whole model after steps 4, 8, ...: torchft parameter by parameter, we bucket by bucket."""
    case = TORCHFT[2]
    ((own, other), *_) = _rivals(results, case, "sizes")
    buckets, averagings = int(results[0][f"{case.name}/ours/buckets"]), problem.STEPS // case.k_steps
    num_parameters = len(list(problem.model("float64").parameters()))
    assert 1 < buckets < num_parameters
    assert (len(own), len(other)) == (averagings * buckets, averagings * num_parameters)
    assert own.sum() == other.sum() == averagings * problem.flat(problem.model("float64")).numel()


def test_torchs_averager_moves_parameters_away_from_their_storage(results: list[Arrays]) -> None:
    """It rebinds ``p.data``, and whoever else knows that memory keeps old values; ours copies in place."""
    for rank in results:
        assert rank["alias/ours"].all()
        assert not rank["alias/theirs"].any()


def test_torchs_averager_adds_up_whatever_has_a_gradient(results: list[Arrays]) -> None:
    """Ranks that reach two branches of one size send vectors of one size, made of different parameters; of other sizes they would hang."""
    assert {int(rank["gated/sent"][0]) for rank in results} == {int(results[0]["gated/sent"][0])}
    assert int(results[0]["gated/sent"][0]) < int(results[0]["gated/all"])
    reached = [[parameter.grad is not None for parameter in _gated(rank)] for rank in range(2)]
    assert reached[0] != reached[1]


def test_ours_averages_what_only_some_ranks_have_reached(results: list[Arrays]) -> None:
    """The same model trains: as a loop in one process that averages every parameter."""
    networks = [problem.model("float64", "gated") for _ in range(RANKS)]
    optimizers = [problem.optimizer_of("momentum")(network) for network in networks]
    for step in range(1, problem.STEPS + 1):
        for rank, (network, optimizer) in enumerate(zip(networks, optimizers, strict=True)):
            network.rank = rank  # type: ignore[assignment]  # an int of the test's model
            problem.decay(optimizer, step)
            inputs, labels = problem.own_batch(step, rank, RANKS, "float64")
            cross_entropy(network(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % 4 == 1:
            problem._average_into([list(network.parameters()) for network in networks])
        for rank, network in enumerate(networks):
            np.testing.assert_allclose(results[rank]["gated/ours"][step - 1], problem.flat(network).numpy(), rtol=0, atol=TOLERANCE)


def test_torchs_averager_leaves_statistics_apart(results: list[Arrays]) -> None:
    """Batch-norm statistics of every rank are its own; ours are one where ``buffers`` says so."""
    for rank in results[1:]:
        np.testing.assert_array_equal(rank["statistics/ours"], results[0]["statistics/ours"])
        assert np.abs(rank["statistics/theirs"] - results[0]["statistics/theirs"]).max() > 1e-3


def _gated(rank: int) -> list[problem.nn.Parameter]:
    network = problem.model("float64", "gated")
    assert isinstance(network, problem.Gated)
    network.rank = rank
    inputs, labels = problem.own_batch(1, rank, RANKS, "float64")
    cross_entropy(network(inputs), labels).backward()
    return list(network.parameters())
