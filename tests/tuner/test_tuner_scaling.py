"""Forecasts of more GPUs from measured steps on a few."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from tuner.calibrate.cells import Cell
from tuner.calibrate.larger import known_of, larger, verdict
from tuner.calibrate.scaling import Known, Scaling, Size, mean_of_largest, shape

BASE = Experiment.from_dict({"cluster": {"nodes": 1, "trainers_per_node": 4}})


def size(nodes: int, gpus_per_node: int = 4, local_batch: float = 32) -> Size:
    """Nodes of four GPUs with 32 samples each."""
    return Size(nodes=nodes, gpus_per_node=gpus_per_node, local_batch=local_batch)


def cell(where: str = "runs.csv, line 2", seconds: float = 0.5, **settings: str) -> Cell:
    """A row; ``__`` stands for a dot of a key."""
    return Cell(where=where, seconds=seconds, settings={key.replace("__", "."): value for key, value in settings.items()})


@pytest.mark.parametrize(("count", "mean"), [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (10, 1.5388), (100, 2.5076), (1000, 3.2414)])
def test_the_largest_of_normal_variates_has_its_tabulated_mean(count: int, mean: float) -> None:
    """Harter (1961), table 1; Blom's approximation is within 5 %."""
    assert mean_of_largest(count) == pytest.approx(mean, rel=0.05)


def test_a_step_is_the_sum_of_its_parts_by_hand() -> None:
    """Two nodes of four: 3 s of ring inside, 7 s between and 4 buckets x 3 doublings x 0.1 s, of which 7/12 s are hidden."""
    values = {"fixed": 0.25, "share": 0.5, "overlap": 0.5, "late": 0.1, "growth": 0.3, "latency": 0.1, "rank_jitter": 0.02}
    values |= {"node_jitter": 0.05, "input": 0.01, "bytes": 1e8, "inside": 1e8, "between": 5e7}
    draws = {name: np.array([value]) for name, value in values.items()}
    took = shape(draws, size(2, local_batch=64), (1.0, 32.0))
    work, transfer = 0.25 + 0.75 * 2, 3.0 + 7.0 + 4 * 3 * 0.1
    jitter = 0.02 * mean_of_largest(8) + 0.05 * mean_of_largest(2)
    assert took[0] == pytest.approx(work * (1.02 + jitter) + transfer - 0.5 * work * 2 / 3)
    draws["overlap"] = np.array([100.0])
    assert shape(draws, size(2, local_batch=64), (1.0, 32.0))[0] == pytest.approx(work * (1.02 + jitter) + 0.1 * transfer)


def test_a_ring_without_overlap_is_carried_to_more_nodes() -> None:
    """0.3 s of compute and 1 GB over a link of 1 GB/s that is all exposed: 32 nodes take 0.3 + 2 x 127/128 s."""
    truth = {nodes: 0.3 + 2 * (4 * nodes - 1) / (4 * nodes) for nodes in (2, 4, 8, 32)}
    random = np.random.default_rng(1)
    measured = {size(nodes): truth[nodes] * np.exp(0.01 * random.standard_normal(4)) for nodes in (2, 4, 8)}
    known = Known(gradient_bytes=1e9, inside=1e12, between=1e9)
    found = Scaling.of(measured, known).forecast(size(32))
    assert found.step_s[0] < truth[32] < found.step_s[2]
    assert found.step_s[1] == pytest.approx(truth[32], rel=0.05)
    assert found.faster > 0.99


def test_mlperf_runs_of_more_gpus_lie_in_the_interval() -> None:
    """ResNet-50 on A100-PCIe of Fujitsu (MLPerf Training v3.1, Apache-2.0): 8 and 10 GPUs from 2 and 4."""
    measured = {size(1, 2, 408): [0.1217], size(1, 4, 408): [0.1237]}
    posterior = Scaling.of(measured, Known(gradient_bytes=51e6, inside=31.5e9))
    for gpus, batch, seconds in ((8, 400, 0.1257), (10, 320, 0.1034)):
        found = posterior.forecast(size(1, gpus, batch))
        assert found.step_s[0] < seconds < found.step_s[2]
        assert found.step_s[1] == pytest.approx(seconds, rel=0.04)


def test_intervals_grow_with_the_distance_and_shrink_with_measurements() -> None:
    """Of log seconds: 2 to 64 nodes beyond one size, then with three sizes."""

    def width(given: tuple[int, ...], nodes: int) -> float:
        found = Scaling.of({size(each): [1.0, 1.01] for each in given}, Known()).forecast(size(nodes)).step_s
        return math.log(found[2] / found[0])

    assert width((1,), 2) < width((1,), 8) < width((1,), 64)
    assert 2 * width((1, 2, 4), 4) < width((1, 2, 4), 64)
    assert width((1, 2, 4), 8) < 0.5 * width((1,), 8)


def test_a_wire_that_holds_everything_up_makes_more_gpus_slower_and_dearer() -> None:
    """One node computes 0.1 s; 4 GB over 1 GB/s take about 7 s between two: not faster, and the price counts all GPUs."""
    priced = Experiment.from_dict({"cluster": {"trainers_per_node": 4}, "tune": {"price_per_trainer_hour": 2.0, "samples": 3.2e6}})
    cells = [cell(seconds=0.1, gpus="4", workload__batch_size="32")] * 2
    found = larger(priced, cells, [8], Known(gradient_bytes=4e9, inside=1e12, between=1e9))
    one, two = found.forecasts
    assert two.faster < 0.05
    assert verdict(two).startswith("no")
    assert found.cost(one) == pytest.approx([2.0 * 4 * seconds / 3600 for seconds in found.seconds(one)])
    assert found.seconds(one)[1] == pytest.approx(3.2e6 / (4 * 32) * 0.1, rel=0.02)


def test_a_global_batch_is_shared_among_more_gpus() -> None:
    """128 samples on 4 GPUs are 8 on each of 16; by default each keeps its 32."""
    cells = [cell(gpus="4", global_batch="128")]
    batches = [larger(BASE, cells, [16], Known(), global_batch=wanted).forecasts[-1].size.local_batch for wanted in (128, None)]
    assert batches == [8, 32]


def test_known_figures_come_from_the_cluster_the_catalogue_and_the_layers() -> None:
    """25 GB/s of two interfaces, an A100's NVLink, 1,000 parameters of four bytes and 30 ms of work for 10 samples."""
    data = {
        "workload": {
            "model": "layers",
            "batch_size": 10,
            "layers": [{"name": "only", "params": 1000, "forward": "10 ms", "backward": "20 ms"}],
        },
        "cluster": {
            "gpu": "A100",
            "nodes": 2,
            "trainers_per_node": 2,
            "nics_per_node": 2,
            "inter": {"bandwidth": "100 Gbit/s", "payload": True},
        },
    }
    found = known_of(Experiment.from_dict(data), Path(), None, None, has_model=True)
    assert (found.gradient_bytes, found.inside, found.between) == (4000, 300e9, 25e9)
    assert found.work_s == pytest.approx(3e-3)
    flops = known_of(Experiment.from_dict(data), Path(), 5.0, 312e12 * 0.35, has_model=True)
    assert (flops.gradient_bytes, flops.work_s) == (20, pytest.approx(1.0))


@pytest.mark.parametrize(
    ("settings", "gpus", "batch", "message"),
    [
        ({"gpus": "4"}, 8, None, "does not say how many samples"),
        ({"gpus": "6"}, 8, 32, "must be the GPUs of all nodes together"),
        ({"gpus": "4"}, 6, 32, "must be whole nodes"),
        ({"gpus": "4", "strategy__fuse_grad_size_in_MB": "1"}, 8, 32, "a size has no such column"),
        ({"cluster__nodes": "0"}, 8, 32, "must hold whole numbers from 1"),
    ],
)
def test_a_row_that_is_no_size_is_refused(settings: dict[str, str], gpus: int, batch: int | None, message: str) -> None:
    """With its line, and a hint."""
    with pytest.raises(ConfigError, match=message) as refused:
        larger(BASE, [cell(**settings)], [gpus], Known(), batch=batch)
    assert refused.value.hint


def test_gpus_without_their_nodes_are_refused() -> None:
    """Eight GPUs may be one node or eight: nothing declares it."""
    with pytest.raises(ConfigError, match="how many GPUs a node has"):
        larger(Experiment(), [cell(gpus="8")], [16], Known(), batch=32)
