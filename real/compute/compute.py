"""Compute: apply and undo everything in a strategy that changes how one trainer computes."""

import contextlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fleetbench.errors import EnvironmentLacks
from fleetbench.fleet_names import FieldHasNoEffect
from fleetbench.strategy import DistributedStrategy
from real.communication.communicators import Errors, collective_errors
from real.compute.compiled import apply_compiled
from real.compute.living import Undo
from real.compute.mixed_precision import apply_mixed_precision
from real.compute.recompute import apply_recompute, check_checkpoints
from real.compute.sync_batch_norm import apply_sync_batch_norm

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_BLOCK_BYTES = 2 * 2**20
"""Number of bytes in multiples of which the caching allocator takes memory from the device."""


def apply_device_settings(strategy: DistributedStrategy, device: torch.device) -> Undo:
    """Set this process's threads, determinism, cuDNN and device memory as the strategy says.

    A ``FieldHasNoEffect`` warning reports fields that are set but do nothing on this device. Raises
    ``EnvironmentLacks`` if the memory to be reserved is not free.
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
        return undo.pop_all().close


def _report(strategy: DistributedStrategy, device: torch.device) -> None:
    default = DistributedStrategy()
    without = {"conv_workspace_size_limit": "torch sizes cuDNN's workspace by the memory that is free"}
    if device.type != "cuda":
        without |= dict.fromkeys(("cudnn_exhaustive_search", "fraction_of_gpu_memory_to_use"), f"the device is {device.type}")
    for name, why in without.items():
        if getattr(strategy, name) != getattr(default, name):
            warnings.warn(f"{name} has no effect here: {why}", FieldHasNoEffect, stacklevel=3)
    if strategy.build_strategy.compile_split == "bucket":
        warnings.warn("build_strategy.compile_split has no effect: every block is compiled for itself", FieldHasNoEffect, stacklevel=3)


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
    """Limit the process to a share of the device's memory, and let the caching allocator hold most of it.

    An eighth stays free: tensors smaller than a MiB need segments of their own, and as soon as part of the
    large block is in use, the allocator can no longer return it to open them.
    """
    memory = torch.cuda.memory
    undo.callback(torch.cuda.empty_cache)
    undo.callback(memory.set_per_process_memory_fraction, memory.get_per_process_memory_fraction(device), device)
    memory.set_per_process_memory_fraction(fraction, device)
    share = int(fraction * torch.cuda.get_device_properties(device).total_memory)
    ahead = (share - share // 8 - memory.memory_reserved(device)) // _BLOCK_BYTES * _BLOCK_BYTES
    if ahead <= 0:
        return
    try:
        torch.empty(ahead, dtype=torch.uint8, device=device)  # freed at once, but the allocator keeps it
    except torch.OutOfMemoryError:
        raise EnvironmentLacks(
            "the device has less memory left", "fraction_of_gpu_memory_to_use", f"{fraction:g}", "a smaller share"
        ) from None


def apply_compute(
    model: nn.Module,
    strategy: DistributedStrategy,
    *,
    device: torch.device,
    group: dist.ProcessGroup | None,
    scale: Callable[[], float | torch.Tensor],
    backend: str | Callable[..., Any] = "inductor",
    errors: Errors = collective_errors,
) -> Undo:
    """Apply the compute part of ``strategy``; if any of it fails, undo the rest.

    ``group`` carries only the statistics of synchronised batch norm; ``None`` means one trainer. ``errors`` wraps its
    collectives. ``scale()`` is the loss scale, and ``backend`` is torch.compile's.

    Changes are nested in this order. Batch norms come first, because compiled graphs contain them. Compiled blocks come
    before recompute, which runs a compiled forward twice: a checkpoint inside a graph would update batch-norm
    statistics twice. Mixed precision surrounds everything. Raises ``ConfigError`` for a strategy that this model cannot
    execute.
    """
    checkpoints = strategy.recompute_configs.checkpoints if strategy.recompute else ()
    with contextlib.ExitStack() as undo:
        undo.callback(apply_device_settings(strategy, device))
        if strategy.sync_batch_norm and group is not None:
            undo.callback(apply_sync_batch_norm(model, group, errors))
        if strategy.recompute:
            check_checkpoints(model, checkpoints)
        undo.callback(apply_compiled(model, strategy.build_strategy, alone=checkpoints, backend=backend))
        if strategy.recompute:
            undo.callback(apply_recompute(model, checkpoints))
        if strategy.amp:
            undo.callback(apply_mixed_precision(model, strategy.amp_configs, device.type, scale))
        return undo.pop_all().close
