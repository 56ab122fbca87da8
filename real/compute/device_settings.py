"""Device settings: what a strategy says of cuDNN, of device memory, of determinism and of threads."""

from __future__ import annotations

import contextlib
import os
import warnings

import torch

from fleetbench.errors import EnvironmentLacks
from fleetbench.fleet_names import FieldHasNoEffect
from fleetbench.strategy import DistributedStrategy
from real.compute.living import Undo

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_BLOCK_BYTES = 2 * 2**20
"""The caching allocator takes device memory in multiples of this."""


def apply_device_settings(strategy: DistributedStrategy, device: torch.device) -> Undo:
    """Set this process's threads, determinism, cuDNN and device memory as the strategy says.

    Fields that are set and do nothing on this device are reported by a ``FieldHasNoEffect`` warning.
    Raises ``EnvironmentLacks`` where the memory that is to be taken ahead is not there.
    """
    _report(strategy, device)
    with contextlib.ExitStack() as undo:
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(strategy.thread_num)
        if strategy.build_strategy.enable_sequential_execution:
            _be_deterministic(undo)
        if device.type == "cuda":
            _set_cudnn(undo, strategy)
            if strategy.fraction_of_gpu_memory_to_use is not None:
                _take_memory(undo, strategy.fraction_of_gpu_memory_to_use, device)
        kept = undo.pop_all()
    return kept.close


def _report(strategy: DistributedStrategy, device: torch.device) -> None:
    default = DistributedStrategy()
    without = {"conv_workspace_size_limit": "torch sizes cuDNN's workspace by the memory that is free"}
    if device.type != "cuda":
        without |= dict.fromkeys(("cudnn_exhaustive_search", "fraction_of_gpu_memory_to_use"), f"the device is {device.type}")
    for name, why in without.items():
        if getattr(strategy, name) != getattr(default, name):
            warnings.warn(f"{name} has no effect here: {why}", FieldHasNoEffect, stacklevel=3)


def _be_deterministic(undo: contextlib.ExitStack) -> None:
    undo.callback(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    if _CUBLAS not in os.environ:  # torch refuses cuBLAS without it
        undo.callback(os.environ.pop, _CUBLAS, None)
        os.environ[_CUBLAS] = ":4096:8"


def _set_cudnn(undo: contextlib.ExitStack, strategy: DistributedStrategy) -> None:
    cudnn = torch.backends.cudnn
    sequential = strategy.build_strategy.enable_sequential_execution
    wanted = {"benchmark": strategy.cudnn_exhaustive_search and not sequential, "benchmark_limit": 0}
    if sequential:
        wanted |= {"deterministic": True}
    for name, value in wanted.items():
        undo.callback(setattr, cudnn, name, getattr(cudnn, name))
        setattr(cudnn, name, value)


def _take_memory(undo: contextlib.ExitStack, fraction: float, device: torch.device) -> None:
    """Bound the process to a share of the device's memory, and let the caching allocator hold all of it."""
    memory = torch.cuda.memory
    undo.callback(torch.cuda.empty_cache)
    undo.callback(memory.set_per_process_memory_fraction, memory.get_per_process_memory_fraction(device), device)
    memory.set_per_process_memory_fraction(fraction, device)
    share = int(fraction * torch.cuda.get_device_properties(device).total_memory)
    ahead = (share - memory.memory_reserved(device)) // _BLOCK_BYTES * _BLOCK_BYTES
    if ahead <= 0:
        return
    try:
        torch.empty(ahead, dtype=torch.uint8, device=device)  # freed at once, to the allocator and not to the device
    except torch.OutOfMemoryError:
        raise EnvironmentLacks(
            "the device has not so much memory left", "fraction_of_gpu_memory_to_use", f"{fraction:g}", "a smaller share"
        ) from None
