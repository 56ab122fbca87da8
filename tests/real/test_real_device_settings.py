"""Threads, determinism, cuDNN and device memory: set as the strategy says, and taken back."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fleetbench.errors import EnvironmentLacks
from fleetbench.fleet_names import FieldHasNoEffect
from fleetbench.strategy import BuildStrategy, DistributedStrategy
from real.compute.compute import apply_device_settings

CPU = torch.device("cpu")


def test_threads_and_determinism_come_and_go() -> None:
    """They are set on any device; the variable that cuBLAS asks for is not left over."""
    threads = torch.get_num_threads()
    strategy = DistributedStrategy.from_dict({"thread_num": threads + 1, "build_strategy": {"enable_sequential_execution": True}})
    undo = apply_device_settings(strategy, CPU)
    assert torch.get_num_threads() == threads + 1
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    undo()
    undo()
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.parametrize(
    "change",
    [
        {"cudnn_exhaustive_search": False},
        {"fraction_of_gpu_memory_to_use": 0.5},
        {"conv_workspace_size_limit": 64},
        {"build_strategy": BuildStrategy(fuse_bn_act_ops=True, compile_split="bucket")},
    ],
)
def test_settings_without_an_effect_are_reported(change: dict[str, Any]) -> None:
    """What was set and does nothing is named by a warning; what was not set is not."""
    with pytest.warns(FieldHasNoEffect, match=next(iter(change))) as caught:
        apply_device_settings(DistributedStrategy(**change), CPU)()
    assert len(caught) == 1


class Device:
    """A device's memory in place of CUDA's: 100 MiB, of which 10 MiB are in use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, full: bool = False) -> None:
        self.fraction, self.taken, self.emptied, self.full = 1.0, 0, 0, full
        memory = torch.cuda.memory
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=100 * 2**20))
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty)
        monkeypatch.setattr(memory, "memory_reserved", lambda _: 10 * 2**20)
        monkeypatch.setattr(memory, "get_per_process_memory_fraction", lambda _: self.fraction)
        monkeypatch.setattr(memory, "set_per_process_memory_fraction", self.set_fraction)
        monkeypatch.setattr(torch, "empty", self.take)

    def empty(self) -> None:
        """Give the cache back."""
        self.emptied += 1

    def set_fraction(self, fraction: float, _device: torch.device) -> None:
        """Bound the process."""
        self.fraction = fraction

    def take(self, size: int, **_: Any) -> None:
        """Allocate."""
        if self.full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.taken = size


def test_device_memory_is_bounded_and_taken_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of 100 MiB, less an eighth of it and the 10 MiB in use, is allocated once; cuDNN tries every algorithm; all of it is undone."""
    device = Device(monkeypatch)
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark
    monkeypatch.setattr(type(cudnn), "benchmark_limit", 10)
    undo = apply_device_settings(DistributedStrategy(fraction_of_gpu_memory_to_use=0.5), torch.device("cuda", 0))
    assert (device.fraction, device.taken, device.emptied) == (0.5, 32 * 2**20, 0)
    assert (cudnn.benchmark, cudnn.benchmark_limit) == (True, 0)
    undo()
    assert (device.fraction, device.emptied) == (1.0, 1)
    assert (cudnn.benchmark, cudnn.benchmark_limit) == (before, 10)


def test_memory_that_is_not_there_is_said_and_the_rest_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may hold it."""
    device = Device(monkeypatch, full=True)
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    monkeypatch.setattr(type(torch.backends.cudnn), "benchmark_limit", 10)
    with pytest.raises(EnvironmentLacks, match="less memory left"):
        apply_device_settings(DistributedStrategy(fraction_of_gpu_memory_to_use=0.9, thread_num=threads + 1), torch.device("cuda", 0))
    assert (device.fraction, torch.get_num_threads(), torch.backends.cudnn.benchmark) == (1.0, threads, benchmark)


def test_sequential_execution_on_cuda_takes_the_algorithms_that_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timed choice of algorithms may differ from run to run."""
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(type(cudnn), "benchmark_limit", 10)
    before = (cudnn.benchmark, cudnn.deterministic)
    undo = apply_device_settings(DistributedStrategy(build_strategy=BuildStrategy(enable_sequential_execution=True)), torch.device("cuda"))
    assert (cudnn.benchmark, cudnn.deterministic) == (False, True)
    undo()
    assert (cudnn.benchmark, cudnn.deterministic) == before
