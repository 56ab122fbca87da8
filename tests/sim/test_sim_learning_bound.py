"""A bound on virtual trainers: what a training takes at least, by published operations; and that it ends when its time is over."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fleetbench.experiment import Experiment
from fleetbench.workload import Workload
from real.estimate.step import estimated
from sim.learning.prepared import step_flops
from sim.learning.virtual_training import train
from tuner.learning import by_virtual_trainers

WORKLOADS: dict[str, dict[str, Any]] = {
    "mlp": {"model": "mlp", "data": "synthetic", "model_options": {"hidden": 4096, "depth": 3}},
    "wide_deep": {"model": "wide_deep", "data": "synthetic", "batch_size": 512},
}

FARTHEST_S = 3.0
"""Seconds of compute between two looks, at most: those of a trainer's batch, or of making the model."""


def of(workload: dict[str, Any], **parts: Any) -> Experiment:
    """Four trainers for more steps than there is time for."""
    inter = {"bandwidth": "10 Gbit/s", "latency": "20 us"}
    cluster = {"nodes": 4, "inter": inter, **parts.pop("cluster", {})}
    return Experiment.from_dict({"workload": {"steps": 10_000, **workload}, "cluster": cluster, **parts})


@pytest.mark.slow
def test_operations_are_the_published_ones() -> None:
    """ResNet-50 multiplies 4.09e9 times a sample forward (arXiv 1512.03385 and torchvision), three times that with its backward.

    A perceptron by hand: 6 operations a weight, 4 of the first layer, whose input needs no gradient.
    """
    first_convolution = 2 * 7 * 7 * 3 * 64 * 112 * 112
    resnet50 = 3 * 2 * 4.09e9 - first_convolution
    assert step_flops(Workload(model="resnet50", data="synthetic", batch_size=4)) == pytest.approx(4 * resnet50, rel=0.005)
    mlp = Workload(model="mlp", data="synthetic", batch_size=8, model_options={"features": 16, "hidden": 32, "depth": 1})
    assert step_flops(mlp) == 8 * (4 * 16 * 32 + 6 * 32 * 10)
    for model in ("wide_deep", "word2vec"):  # rows are looked up
        assert step_flops(Workload(model=model, data="synthetic", batch_size=8)) < 1e9


def looks(experiment: Experiment, seconds: float) -> list[float]:
    """When a training looked at the time, until so many seconds of compute were over."""
    times = [time.process_time()]

    def look() -> None:
        times.append(time.process_time())
        if times[-1] - times[0] > seconds:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        train(experiment, look=look)
    return times


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [True, False])
def test_servers_trainers_look_at_the_time_too(is_async: bool, tmp_path: Path) -> None:
    """While rows are looked up, the order is simulated, and gradients are computed."""
    servers: dict[str, Any] = {"cluster": {"servers": 2}, "strategy": {"mode": "ps", "a_sync": is_async}}
    mlp = of({**WORKLOADS["mlp"], "steps": 20}, **servers, run={"device": "cuda"})
    for experiment in (of(WORKLOADS["wide_deep"], **servers), estimated(mlp, "A100", tmp_path)):
        times = looks(experiment, 3.0)
        assert max(later - sooner for sooner, later in pairwise(times)) < FARTHEST_S


def test_a_limit_ends_a_training_in_the_middle_of_its_first_step() -> None:
    """One second, of which the batches of 32 trainers take several."""
    begin = time.process_time()
    with pytest.raises(TimeoutError):
        by_virtual_trainers(of({**WORKLOADS["mlp"], "target_loss": 1e-9}, cluster={"nodes": 32}), 1.0)
    assert time.process_time() - begin < 1.0 + FARTHEST_S
