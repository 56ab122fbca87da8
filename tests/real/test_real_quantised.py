"""Means in INT8 on 2, 3 and 4 ranks of gloo: against numpy, within their bound, NaN and infinity kept, bytes counted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from processes import Arrays, run_ranks
from quantised_rank import BAD, BAD_SIZE, OUTER, ROUNDS, SIZES, TRAINED, UPDATES, bad, numbers

from fleetbench.cluster import Cluster, Link
from fleetbench.experiment import Experiment
from fleetbench.plan.exchange import int8_nbytes
from fleetbench.plan.operations import Operation, wire_bytes
from fleetbench.profile import Communication
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.strategy import DistributedStrategy, LocalSGDConfigs
from fleetbench.workload import LayerSpec, Workload
from sim.network.routes import Routes
from sim.run import simulate
from sim.scenario import Scenario

RANK = Path(__file__).with_name("quantised_rank.py")
_LINK = Link(bandwidth=BitsPerSecond(10**9), latency=Nanoseconds(1000))
Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module", params=[2, 3, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> list[Arrays]:
    """What every rank saved."""
    return run_ranks(RANK, request.param)


def _quantised(brought: Floats) -> tuple[Floats, Floats]:
    """Written out in numpy, block by block: the numbers that arrive, and the scale of each."""
    arrived, scales = np.empty_like(brought), np.empty_like(brought)
    for start in range(0, len(brought), 256):
        block = brought[start : start + 256]
        scale = max(np.float32(np.abs(block).max() / np.float32(127)), np.finfo(np.float32).tiny)
        whole = np.rint(block / scale)
        assert np.abs(whole).max() <= 127
        arrived[start : start + 256] = whole * scale
        scales[start : start + 256] = scale
    return arrived, scales


def _mean(brought: list[Floats]) -> tuple[Floats, Floats]:
    """The mean that arrives, and its largest error."""
    total, off = np.zeros_like(brought[0]), np.zeros_like(brought[0])
    for own in brought:
        arrived, scales = _quantised(own)
        total = total + arrived
        off = off + scales / 2
    mean, scales = _quantised(total / np.float32(len(brought)))
    return mean, off / np.float32(len(brought)) + scales / 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", SIZES)
def test_a_mean_is_numpys_to_the_bit_on_all_ranks(ranks: list[Arrays], size: int) -> None:
    """Sizes that fill no block, one block, and do not divide by ranks."""
    expected, _ = _mean([numbers(rank, size) for rank in range(len(ranks))])
    for saved in ranks:
        np.testing.assert_array_equal(saved[f"{size} torch.float32"], expected)
        np.testing.assert_array_equal(saved[f"{size} torch.float64"], expected)


@pytest.mark.parametrize("size", SIZES)
def test_a_mean_is_off_by_half_a_step_a_quantisation(ranks: list[Arrays], size: int) -> None:
    """From the exact mean in float64; FP32 rounds the steps themselves."""
    brought = [numbers(rank, size) for rank in range(len(ranks))]
    exact = np.mean([own.astype(np.float64) for own in brought], axis=0)
    _, bound = _mean(brought)
    for saved in ranks:
        assert np.all(np.abs(saved[f"{size} torch.float32"] - exact) <= bound * (1 + 1e-5))
    if size == SIZES[-1]:
        assert np.abs(ranks[0][f"{size} torch.float32"] - exact).max() > 0


def test_small_types_are_quantised_from_their_own_numbers(ranks: list[Arrays]) -> None:
    """BF16 numbers are averaged in FP32 and rounded to BF16 at the end."""
    brought = [torch.from_numpy(numbers(rank, 20_000)).bfloat16().float().numpy() for rank in range(len(ranks))]
    expected = torch.from_numpy(_mean(brought)[0]).bfloat16().double().numpy()
    for saved in ranks:
        np.testing.assert_array_equal(saved["20000 torch.bfloat16"], expected)


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_finite_on_one_rank_is_nan_on_all(ranks: list[Arrays], name: str) -> None:
    """All of its block, and nothing beside it."""
    place, _ = BAD[name]
    block = slice(place // 256 * 256, place // 256 * 256 + 256)
    clean = [bad(rank, len(ranks), name) for rank in range(len(ranks))]
    clean[-1][place] = 0.0
    expected, _ = _mean(clean)
    expected[block] = np.nan
    assert len(expected) == BAD_SIZE
    for saved in ranks:
        np.testing.assert_array_equal(saved[name], expected)


def test_error_feedback_brings_every_number_in_the_end(ranks: list[Arrays]) -> None:
    """Over rounds of the same numbers, the means of what ranks sent are off by the last residual alone, not by a step a round."""
    brought = [numbers(rank, 20_000) for rank in range(len(ranks))]
    exact = np.mean([own.astype(np.float64) for own in brought], axis=0)
    left = np.mean([saved["residual"].astype(np.float64) for saved in ranks], axis=0)
    _, bound = _mean(brought)
    in_all = ranks[0]["feedback"].astype(np.float64).sum(axis=0)
    second = np.abs(ranks[0]["feedback"]).reshape(ROUNDS, -1)
    steps = np.stack([_quantised(mean)[1] for mean in second]).astype(np.float64)
    assert np.all(np.abs(in_all + left - ROUNDS * exact) <= steps.sum(axis=0) / 2 * (1 + 1e-4) + 1e-30)
    assert np.all(np.abs(left) <= 2 * bound)


@pytest.mark.parametrize("size", SIZES)
def test_the_wire_carries_a_quarter_and_the_scales(ranks: list[Arrays], size: int) -> None:
    """What the plan counts is what collectives are given; of many numbers it is a quarter of FP32 and a 64th of that."""
    trainers = len(ranks)
    operation = Operation(id=0, kind="all_reduce", payload="delta", nbytes=int8_nbytes(size, trainers), wire_dtype="int8")
    for saved in ranks:
        assert int(saved[f"{size} bytes"]) == wire_bytes(operation, trainers)
    whole = 256 * trainers
    assert int8_nbytes(1000 * whole, trainers) == 1000 * whole * (1 + 4 / 256)


def test_the_scheme_waits_where_nccl_needs_it(ranks: list[Arrays]) -> None:
    """On the process group with NCCL's semantics nothing is read before it arrived, and the mean is gloo's."""
    for saved in ranks:
        np.testing.assert_array_equal(saved["deferred"], ranks[0]["20000 torch.float32"])


@pytest.mark.parametrize("feeds_back", [False, True])
def test_training_steps_on_the_quantised_mean(ranks: list[Arrays], feeds_back: bool) -> None:
    """DiLoCo written out: differences of two updates and what the last left, their quantised mean, Nesterov's step."""
    name = "trained, fed back" if feeds_back else "trained"
    left = [np.zeros(TRAINED, np.float32) for _ in ranks]
    eta, mu = OUTER["outer_lr"], OUTER["outer_momentum"]
    theta, velocity = np.zeros(TRAINED, np.float32), np.zeros(TRAINED, np.float32)
    for place, update in enumerate(range(0, UPDATES, 2)):
        gone = [sum(numbers(rank + 10 * later, TRAINED) for later in (update, update + 1)) for rank in range(len(ranks))]
        brought = [np.asarray(own, np.float32) + rest for own, rest in zip(gone, left, strict=True)]
        if feeds_back:
            left = [own - _quantised(own)[0] for own in brought]
        mean, bound = _mean(brought)
        velocity = mu * velocity + mean
        theta = theta - eta * (mean + mu * velocity)
        for saved in ranks:
            np.testing.assert_array_equal(saved[name], ranks[0][name])
            np.testing.assert_allclose(saved[name][place], theta, rtol=1e-4, atol=float(bound.max()) * 1e-2)


def test_the_simulator_counts_its_bytes_and_what_it_computes() -> None:
    """A ring of so many bytes by hand, then the profile's time for quantising them; both engines."""
    layer = LayerSpec(name="block", params=1_000_000, forward=Nanoseconds(10**6), backward=Nanoseconds(10**6))
    cluster = Cluster(nodes=4, inter=Link(bandwidth=BitsPerSecond(10**9), latency=Nanoseconds(1000), payload=True))
    workload = Workload(model="layers", layers=(layer,), steps=2)
    strategy = DistributedStrategy(localsgd=True, localsgd_configs=LocalSGDConfigs(**OUTER))
    experiment = Experiment(name="int8", workload=workload, cluster=cluster, strategy=strategy)
    nbytes = int8_nbytes(1_000_000, 4)
    for engine in ("reference", "vector"):
        summary = simulate(experiment, engine=engine).summary  # type: ignore[arg-type]  # one of its names
        assert summary.bytes_sent_per_trainer == 2 * 3 * nbytes // 4
        assert summary.wall_s == pytest.approx(4e-3 + 6 * 1e-6 + 2 * 3 / 4 * nbytes * 8e-9, abs=1e-8)
    scenario = Scenario.of(experiment)
    slow = dataclasses.replace(
        scenario.links, measured=Communication(backend="gloo", trainers=4, link=_LINK, quantise=Nanoseconds(20 * 10**6))
    )
    (operation,) = scenario.plan.exchange
    costs = [Routes(links).of(operation, (0, 1, 2, 3)).cost for links in (scenario.links, slow)]
    assert costs[1].latency_ns - costs[0].latency_ns == round(20 * nbytes)
    assert costs[1].transfer_ns == costs[0].transfer_ns
