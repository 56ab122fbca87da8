"""Traces of torch.profiler, made with a device that lags: the truth is what was launched in each step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from profiled_devices import BASE_US, CUDA, ROCM, Device

from fleetbench.errors import ConfigError
from fleetbench.fitting.stragglers import compute_times, fit_source
from fleetbench.profiler_traces import COMMUNICATION, read_profiler


def matches(table: pd.DataFrame, devices: list[Device]) -> None:
    """The table has the truth of every rank and step, to the nanosecond."""
    assert len(table) == sum(len(device.truth) for device in devices)
    for row in table.itertuples():
        compute, communication = next(device for device in devices if device.rank == row.rank).truth[int(str(row.step))]
        assert row.compute_s == pytest.approx(len(compute) * 1e-7, abs=1e-12)
        assert row.communication_s == pytest.approx(len(communication) * 1e-7, abs=1e-12)


@pytest.mark.parametrize("words", [CUDA, ROCM], ids=["CUDA", "ROCm"])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("lag", range(6))
def test_kernels_are_of_the_step_that_launched_them(lag: int, graphs: bool, words: dict[str, str], tmp_path: Path) -> None:
    """However far the device lags, on several streams, by single launches or graphs; a launch at a step's first instant is that step's."""
    devices = [Device(rank=rank, lag=lag, words=words, graphs=graphs) for rank in range(2)]
    for device in devices:
        device.run(range(5, 17), seed=10 * lag + device.rank)
    paths = [device.write(tmp_path / f"host_{device.rank}.pt.trace.json{'.gz' * device.rank}") for device in devices]
    table, notes = read_profiler(paths, "--from")
    matches(table, devices)
    assert "12 steps (5 to 16) of 2 ranks" in notes[0]
    if lag > 1:  # this is what giving them to the step in whose host time they run would get wrong
        (one, *_) = devices
        following = next(event for event in one.events if event["name"] == "ProfilerStep#6")
        assert max(*one.truth[5][0], *one.truth[5][1]) > float(following["ts"].strip("@")) * 10 - BASE_US * 10


def test_cycles_of_ranks_make_one_table(tmp_path: Path) -> None:
    """A file for each rank and cycle, from folders within folders; ranks come from what the traces say."""
    devices = [Device(rank=rank, lag=2) for rank in (1, 0)]
    for device in devices:
        begin = 0
        for cycle, steps in enumerate((range(2, 5), range(9, 12))):
            own = Device(rank=device.rank, lag=2, truth=device.truth)
            begin = own.run(steps, seed=cycle, begin=begin)
            own.write(tmp_path / "logs" / str(device.rank) / f"node_{900 - device.rank}.{10**18 + cycle}.pt.trace.json")
    table, notes = read_profiler([tmp_path / "logs"], "--from")
    matches(table, devices)
    assert not any("rank" in note for note in notes[1:])
    with pytest.raises(ConfigError, match="second trace that has step"):
        read_profiler([tmp_path / "logs", tmp_path / "logs" / "0"], "--from")


def test_a_rank_that_no_trace_says_is_told_by_names(tmp_path: Path) -> None:
    """By the number behind "rank"; other names tell no ranks."""
    devices = [Device(rank=rank, lag=1) for rank in (1, 0)]
    for device, name in zip(devices, ("rank1.json", "rank-0.Apr_03.1102.pt.trace.json.gz"), strict=True):
        device.run(range(3), seed=device.rank)
        device.write(tmp_path / "told" / name, knows_rank=False)
        device.write(tmp_path / "untold" / f"node_{device.rank}.pt.trace.json", knows_rank=False)
    table, _ = read_profiler([tmp_path / "told"], "--from")
    matches(table, devices)
    for knows_rank in (False, True):
        devices[0].write(tmp_path / "untold" / "node_1.pt.trace.json", knows_rank=knows_rank)
        with pytest.raises(ConfigError, match="says no rank"):
            read_profiler([tmp_path / "untold"], "--from")


def test_kernels_without_a_launch(tmp_path: Path) -> None:
    """Kernels before the first launched one belong to no step. Others without a launch are noted; a trace without launches is refused."""
    device = Device(rank=0, lag=3)
    for stream in (7, 13, 20):  # launched before the trace began
        device.event("kernel", "gemm", 0, 5000, stream, correlation=stream, stream=stream)
        device.free[stream] = 5000
    device.run(range(1, 6), seed=3)
    launches = sorted((event for event in device.events if event["cat"] == "cuda_runtime"), key=lambda event: event["ts"])
    table, notes = read_profiler([device.write(tmp_path / "t.json")], "--from")
    matches(table, [device])
    assert not any("no launch" in note for note in notes)
    device.events = [event for event in device.events if event["cat"] != "cuda_runtime" or event in launches[::5]]
    _, notes = read_profiler([device.write(tmp_path / "t.json")], "--from")
    assert any("have no launch in t.json, and are left out" in note for note in notes)
    device.events = [event for event in device.events if event["cat"] != "cuda_runtime"]
    with pytest.raises(ConfigError, match="has no launches of its kernels"):
        read_profiler([device.write(tmp_path / "t.json")], "--from")


def _spoilt(change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], path: Path) -> Path:
    device = Device(rank=0, lag=1)
    device.run(range(3), seed=0)
    device.events = change(device.events)
    return device.write(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda events: [event for event in events if "Profiler" not in event["name"]], "has no ProfilerStep.*33 kernels, 0 operators"),
        (
            lambda events: [event for event in events if event["cat"] != "kernel"],
            "has no kernels of CUDA or ROCm",
        ),
        (lambda events: [event for event in events if event["cat"] == "user_annotation"], "no operators without them"),
        (lambda events: events + [event for event in events if event["name"].endswith("#1")], "overlap, or one twice"),
        (lambda _: [], "is JSON, but no trace"),
        (
            lambda events: [event | {"name": "gloo:all_reduce"} if event["cat"] == "kernel" else event for event in events],
            "no step has compute on each rank .got steps 0 to 2 of 1 rank",
        ),
    ],
)
def test_what_cannot_be_told_is_refused(change: Callable[..., Any], said: str, tmp_path: Path) -> None:
    """In a sentence that says what was found."""
    with pytest.raises(ConfigError, match=rf"(?s){said}.*HINT"):
        read_profiler([_spoilt(change, tmp_path / "t.json")], "--from")


@pytest.mark.parametrize(
    ("name", "communicates"),
    [
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", True),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", True),
        ("rccl_main_kernel", True),
        ("void vllm::cross_device_reduce_1stage<half, 8>", True),
        ("gloo:all_reduce", True),
        ("c10d::allreduce_", True),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", False),
        ("triton_red_fused_native_layer_norm_3", False),
        ("void at::native::elementwise_kernel<128, 4, broadcast>", False),
        ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn", False),
        ("aten::scatter_add_", False),
    ],
)
def test_communication_is_told_by_its_name(name: str, communicates: bool) -> None:
    """Of NCCL, RCCL, gloo and custom collectives; a reduction within a rank is compute."""
    assert bool(COMMUNICATION.search(name)) is communicates


def test_steps_that_a_rank_lacks_are_left_out(tmp_path: Path) -> None:
    """Ranks 3 and 5 of a job, of which one stopped a step later: the common steps count, and both facts are said."""
    devices = [Device(rank=rank, lag=2) for rank in (3, 5)]
    for device in devices:
        device.run(range(1, 4 + device.rank // 5), seed=device.rank)
        device.write(tmp_path / f"{device.rank}.json")
    table, notes = read_profiler([tmp_path], "--from")
    assert table["rank"].unique().tolist() == [0, 1]
    assert table["step"].unique().tolist() == [1, 2, 3]
    assert "1 of 4 steps are left out: a rank lacks them, or computes nothing in them" in notes
    assert "ranks 3, 5 of the job are counted from 0 here" in notes


def test_a_lagging_device_makes_no_straggler(tmp_path: Path) -> None:
    """Eighty steps of ten kernels of 0.1 ms; the host launches a step in half of that, and reads the loss every tenth step."""
    for rank in range(2):
        device = Device(rank=rank, lag=1)
        begin = 0
        for number in range(1, 81):
            begin = device.step(number, begin, [(7, 1_000, False)] * 10)
            if number % 10 == 0:
                begin = max(begin, device.free[7])
        device.write(tmp_path / f"{rank}.json.gz")
    fit = fit_source(tmp_path)
    assert fit.entries == ()
    assert fit.base == fit.median == 1_000_000
    assert any("1 ms of compute" in text for text in fit.statements)


def test_sources_that_are_nothing_are_refused(tmp_path: Path) -> None:
    """A folder without a trace says what it holds; two tables are not one."""
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"has no trace of torch.profiler"):
        compute_times(tmp_path)
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("rank,step,compute_s\n0,1,1\n")
    with pytest.raises(ConfigError, match="several sources"):
        compute_times([tmp_path / "a.csv", tmp_path / "b.csv"])


def test_the_fit_of_a_trace_says_how_it_was_read(tmp_path: Path) -> None:
    """Before what was found of stragglers; the slow rank of forty steps is found by its kernels."""
    for rank in range(2):
        device = Device(rank=rank, lag=2)
        draw = np.random.default_rng(rank)
        begin = 0
        for number in range(1, 41):
            took = round((1 + 0.5 * rank) * 2000 * (1 + 0.05 * draw.random()))
            begin = device.step(number, begin, [(7, took, False)] * 4)
        device.write(tmp_path / f"{rank}.json")
    fit = fit_source([tmp_path / "0.json", tmp_path / "1.json"])
    assert fit.statements[0].startswith("traces of torch.profiler: 40 steps (1 to 40) of 2 ranks")
    assert fit.rank_factors == (1.0, pytest.approx(1.5, rel=0.02))
