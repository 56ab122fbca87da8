"""Calibration against closed forms: steps and all-reduces of known constants, written here and not simulated."""

from __future__ import annotations

import dataclasses
import gzip
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from benchmark_outputs import nccl_tests

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.profile import Profile, compute_key
from fleetbench.quantities import Nanoseconds
from tuner.calibrate.cells import read_cells
from tuner.calibrate.fit import Calibration, calibrate

DECLARED = """\
[workload]
model = "layers"
batch_size = 8
steps = 10
layers = [{ name = "only", params = 5_000_000, forward = "30 ms", backward = "60 ms" }]

[cluster]
nodes = 4
inter = { bandwidth = "10 Gbit/s", latency = "40 us", payload = true }
"""
"""One layer, so that nothing overlaps: a step is compute and one all-reduce of 20 MB."""
BANDWIDTH, LATENCY, COMPUTE = "cluster.inter.bandwidth", "cluster.inter.latency", "compute"
ALPHA_S, BYTES_S, COMPUTE_S = 150e-6, 0.6e9, 0.117
"""The truth: 4.8 Gbit/s, and compute 1.3 times as long as declared."""
NODES, PARAMS = (2, 3, 4, 6, 8), (10_000, 1_000_000, 5_000_000)


def ring_s(ranks: int, nbytes: float) -> float:
    """2 (P - 1) (alpha + S / (P B))."""
    return 2 * (ranks - 1) * (ALPHA_S + nbytes / (ranks * BYTES_S))


@pytest.fixture
def declared(tmp_path: Path) -> Experiment:
    """``DECLARED``."""
    path = tmp_path / "declared.toml"
    path.write_text(DECLARED, encoding="utf-8")
    return Experiment.load(path)


def fitted(declared: Experiment, folder: Path, rows: Sequence[str], *keys: str) -> Calibration:
    """What a CSV file of ``rows`` gives."""
    path = folder / "cells.csv"
    path.write_text("\n".join(rows), encoding="utf-8")
    return calibrate(declared, read_cells(path), keys)


def steps(noise: float = 0.0, seed: int = 0) -> list[str]:
    """A table of measured steps: numbers of nodes, and sizes of the one gradient."""
    random = np.random.default_rng(seed)
    rows = ["cluster.nodes,workload.layers,seconds"]
    for nodes in NODES:
        for params in PARAMS:
            layer = f'[{{ name = ""only"", params = {params}, forward = ""30 ms"", backward = ""60 ms"" }}]'
            took_s = (COMPUTE_S + ring_s(nodes, 4 * params)) * math.exp(random.normal(0.0, noise))
            rows.append(f'{nodes},"{layer}",{took_s}')
    return rows


def test_the_constants_of_a_closed_form_are_found(declared: Experiment, tmp_path: Path) -> None:
    """Bandwidth, latency and compute of exact steps come out within 1 %, cells left out within 0.5 %, and the experiment has them."""
    found = fitted(declared, tmp_path, steps(), BANDWIDTH, LATENCY, COMPUTE)
    values = {parameter.key: parameter.value for parameter in found.parameters}
    assert values[BANDWIDTH] == pytest.approx(8 * BYTES_S, rel=0.01)
    assert values[LATENCY] == pytest.approx(ALPHA_S * 1e9, rel=0.03)
    assert values[COMPUTE] == pytest.approx(1.3, rel=0.005)
    assert max(map(abs, found.errors_left_out)) < 0.005
    assert not any(parameter.held for parameter in found.parameters)
    found.save(tmp_path / "calibrated.toml")
    again = Experiment.load(tmp_path / "calibrated.toml")
    assert again.cluster.inter is not None
    assert again.cluster.inter.bandwidth == values[BANDWIDTH]
    assert again.workload.layers[0].backward == pytest.approx(1.3 * 60e6, rel=0.005)


def test_what_the_cells_do_not_identify_is_held(declared: Experiment, tmp_path: Path) -> None:
    """All-reduces of 200 MB say nothing of a latency of 40 us, which keeps its declared value; the bandwidth is found."""
    rows = ["all_reduce_bytes,seconds", *(f"{nbytes},{2 * 3 * nbytes / (4 * BYTES_S)}" for nbytes in (2e8, 3e8, 4e8, 5e8))]
    bandwidth, latency = fitted(declared, tmp_path, rows, BANDWIDTH, LATENCY).parameters
    assert latency.held
    assert latency.value == latency.declared == 40_000
    assert not bandwidth.held
    assert bandwidth.value == pytest.approx(8 * BYTES_S, rel=0.01)


def test_a_declared_value_that_the_cells_exclude_is_not_kept(declared: Experiment, tmp_path: Path) -> None:
    """Small all-reduces that are faster than the declared latency allows bound it from above, although nothing bounds it from below."""
    took_s = {nbytes: 6 * nbytes / (4 * BYTES_S) for nbytes in (4e4, 1e5, 1e6, 1e8)}
    found = fitted(declared, tmp_path, ["all_reduce_bytes,seconds", *(f"{n},{s}" for n, s in took_s.items())], BANDWIDTH, LATENCY)
    latency = found.parameters[1]
    assert not latency.held
    assert latency.value < 1_000
    assert latency.high is not None
    assert latency.high < 10_000


def test_compute_that_hides_an_all_reduce_says_nothing_of_it(declared: Experiment, tmp_path: Path) -> None:
    """Where the first of two layers' all-reduces is hidden and the other is tiny, steps identify compute and not the bandwidth."""
    layers = '[{ name = ""tiny"", params = 1, forward = ""1 ms"", backward = ""300 ms"" }, '
    layers += '{ name = ""big"", params = 100000, forward = ""1 ms"", backward = ""1 ms"" }]'
    rows = ["workload.layers,cluster.nodes,strategy.fuse_all_reduce_ops,seconds"]
    rows += [f'"{layers}",{nodes},false,{0.303 * 1.2 + 2 * (nodes - 1) * 40e-6}' for nodes in (2, 3, 4)]
    bandwidth, compute = fitted(declared, tmp_path, rows, BANDWIDTH, COMPUTE).parameters
    assert bandwidth.held
    assert compute.value == pytest.approx(1.2, rel=0.005)


@pytest.mark.slow
def test_intervals_cover(declared: Experiment, tmp_path: Path) -> None:
    """Of 20 noisy tables, 95 % intervals hold the truth in at least 16 (chance of fewer, at 95 %: 0.3 %), and are not wide."""
    truth = {BANDWIDTH: 8 * BYTES_S, LATENCY: ALPHA_S * 1e9, COMPUTE: 1.3}
    covered = dict.fromkeys(truth, 0)
    for seed in range(20):
        for parameter in fitted(declared, tmp_path, steps(0.01, seed), *truth).parameters:
            low, high = parameter.low or 0.0, parameter.high or math.inf
            covered[parameter.key] += low <= truth[parameter.key] <= high
            if parameter.key != LATENCY:
                assert high / low < 1.2
    assert min(covered.values()) >= 16


def test_deviations_count(declared: Experiment, tmp_path: Path) -> None:
    """A cell that is off by a factor of two hardly counts with a large standard deviation."""
    good = [f"{int(n)},{ring_s(4, n)},{0.001 * ring_s(4, n)}" for n in (1e6, 1e7, 1e8, 2e8)]
    rows = ["all_reduce_bytes,seconds,sd", *good, f"300000000,{2 * ring_s(4, 3e8)},50.0"]
    bandwidth = fitted(declared, tmp_path, rows, BANDWIDTH, LATENCY).parameters[0]
    assert bandwidth.value == pytest.approx(8 * BYTES_S, rel=0.02)


def test_compute_of_a_profile_is_scaled(tmp_path: Path) -> None:
    """Of a measured model the profile's times are scaled, update and readiness with them, and the experiment names the new profile."""
    plain = Experiment.from_dict({"workload": {"steps": 4}})
    ms = 10**6
    gradient = Gradient(name="only.weight", numel=10, ready=Nanoseconds(20 * ms))
    layer = Layer(name="only", gradients=(gradient,), forward=Nanoseconds(10 * ms), backward=Nanoseconds(20 * ms))
    table = LayerTable(key=compute_key(plain), layers=(layer,), update=Nanoseconds(10 * ms), read=Nanoseconds(10 * ms))
    Profile(machine="none", created="now", tables=(table,)).save(tmp_path / "profile.toml")
    experiment = plain.replace(workload=dataclasses.replace(plain.workload, profile=str(tmp_path / "profile.toml")))
    found = fitted(experiment, tmp_path, ["seconds", "0.09", "0.0901"], COMPUTE)
    assert found.parameters[0].value == pytest.approx(2.0, rel=0.005)
    found.save(tmp_path / "calibrated.toml")
    again = Experiment.load(tmp_path / "calibrated.toml")
    assert again.workload.profile is not None
    (scaled,) = Profile.load(again.workload.profile).tables
    assert scaled.layers[0].gradients[0].ready == pytest.approx(40 * ms, rel=0.005)
    assert scaled.update == pytest.approx(20 * ms, rel=0.005)
    assert scaled.read == 10 * ms


def test_a_benchmark_of_other_ranks_is_refused(declared: Experiment, tmp_path: Path) -> None:
    """Its output says how many ranks took part, and the experiment has as many, or is told."""
    path = tmp_path / "nccl.txt"
    path.write_text(nccl_tests(n=3), encoding="utf-8")
    with pytest.raises(ConfigError, match="3 ranks, and the experiment has 4"):
        calibrate(declared, read_cells(path), [BANDWIDTH])


def test_a_table_may_have_short_names(declared: Experiment, tmp_path: Path) -> None:
    """Nodes, GPUs of all nodes or of each, seconds or samples per second, also as gzip."""
    expected = fitted(declared, tmp_path, ["cluster.nodes,seconds", "2,0.12", "4,0.14", "8,0.16"], COMPUTE)
    for rows in (
        ["nodes, gpus, seconds", "2, 2, 0.12", "4, 4, 0.14", "8, 8, 0.16"],
        ["nodes,gpus_per_node,seconds", "2,1,0.12", "4,1,0.14", "8,1,0.16"],
        ["gpus,samples_per_s", f"2,{16 / 0.12}", f"4,{32 / 0.14}", f"8,{64 / 0.16}"],
    ):
        found = fitted(declared, tmp_path, rows, COMPUTE)
        assert found.measured_s == pytest.approx(expected.measured_s)
        assert found.parameters[0].value == pytest.approx(expected.parameters[0].value)
        assert [cell.all_reduce_bytes for cell in found.cells] == [None] * 3
    (tmp_path / "cells.csv.gz").write_bytes(gzip.compress((tmp_path / "cells.csv").read_bytes()))
    assert calibrate(declared, read_cells(tmp_path / "cells.csv.gz"), [COMPUTE]).measured_s == found.measured_s


def test_gpus_are_those_of_all_nodes(declared: Experiment, tmp_path: Path) -> None:
    """8 GPUs of 2 nodes with 4 trainers each, 4 or 2 of one node; a number that is no whole nodes' is refused with how to say it."""
    of_four = declared.replace(cluster=dataclasses.replace(declared.cluster, nodes=1, trainers_per_node=4, intra=declared.cluster.inter))
    own = fitted(of_four, tmp_path, ["cluster.nodes,cluster.trainers_per_node,samples_per_s", "2,4,500", "1,4,300", "1,2,160"], COMPUTE)
    for rows in (["gpus,samples_per_s", "8,500", "4,300", "2,160"], ["nodes,gpus,samples_per_s", "2,8,500", "1,4,300", "1,2,160"]):
        found = fitted(of_four, tmp_path, rows, COMPUTE)
        assert found.measured_s == pytest.approx(own.measured_s)
        assert found.errors == pytest.approx(own.errors)
    for rows in (["gpus,seconds", "6,0.1"], ["nodes,gpus,seconds", "2,4,0.1"], ["gpus,seconds", "0,0.1"], ["gpus,seconds", "4.5,0.1"]):
        with pytest.raises(ConfigError, match="line 2, gpus: must be the GPUs of all nodes") as refused:
            fitted(of_four, tmp_path, rows, COMPUTE)
        assert "gpus_per_node" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "holds no measurement"),
        ("seconds\n", "holds no measurement"),
        ("cluster.nodes\n2\n", "needs one of seconds"),
        ("nodez,seconds\n2,1\n", r"line 1: is no column .*'nodez'.*\n.*Did you mean 'nodes'"),
        ("nodes,cluster.nodes,seconds\n2,2,1\n", "names a column twice"),
        ("tokens/s\n2\n", "is no column"),
        ("seconds,seconds\n2,1\n", "names a column twice"),
        ("seconds\n1\n-1\n", r"line 3, seconds: must be a number above zero"),
        ("seconds\nfast\n", r"line 2, seconds: must be a number above zero"),
        ("cluster.nodes,seconds\n2\n", r"line 2: needs 2 values"),
        ("seconds,samples_per_s\n1,2\n", r"line 2: needs one of"),
        ("cluster.nodes,seconds\n2,\n", r"line 2: needs one of"),
        ("samples_per_s,all_reduce_bytes\n1,2\n", "whole number of bytes"),
        ('seconds,cluster.nodes\n1,"2\n', "is no CSV"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path: Path, text: str, what: str) -> None:
    """With the line, and a hint."""
    path = tmp_path / "cells.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=what) as refused:
        read_cells(path)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("rows", "keys", "what"),
    [
        (["cluster.nodez,seconds", "2,1"], [BANDWIDTH], r"line 2, cluster.nodez"),
        (["seconds", "1"], [BANDWIDTH, COMPUTE], "at least as many measurements"),
        (["seconds", "1"], ["cluster.nodes"], "is no quantity"),
        (["seconds", "1"], ["cluster.inter.bandwith"], "is no quantity"),
        (["seconds", "1"], ["cluster.host_bandwidth"], "no declared value above zero"),
        (["seconds", "1"], [], "at least one"),
        ([f"{BANDWIDTH},seconds", "1 Gbit/s,1"], [BANDWIDTH], "is a column of the cells, and to be fitted"),
        (["strategy.mode,cluster.servers,seconds", "ps,1,1"], [COMPUTE], r"line 2, strategy.mode: cannot be fitted"),
        (["cluster.nodes,all_reduce_bytes,seconds", "1,100,1"], [BANDWIDTH], "needs two trainers"),
    ],
)
def test_what_cannot_be_fitted_is_refused(declared: Experiment, tmp_path: Path, rows: list[str], keys: list[str], what: str) -> None:
    """With where, and a hint."""
    with warnings.catch_warnings(), pytest.raises(ConfigError, match=what) as refused:
        fitted(declared, tmp_path, rows, *keys)
    assert refused.value.hint
