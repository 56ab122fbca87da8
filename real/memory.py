"""Memory: what one trainer's process holds."""

import contextlib
from pathlib import Path

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


def memory_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, activations: int) -> dict[str, int]:
    """Bytes by the fields of ``fleetbench.measurements.Memory``; ``activations`` were counted before."""
    parameters = list(model.parameters())
    return {
        "parameters": sum(parameter.nbytes for parameter in parameters),
        "gradients": sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        "optimizer_state": sum(leaf.nbytes for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, torch.Tensor)),
        "activations": activations,
        "peak": peak_bytes(parameters[0].device),
    }


def peak_bytes(device: torch.device) -> int:
    """The most so far, or since ``reset_peak``: of torch's allocator on a CUDA device, of the whole process on a CPU.

    0 where the system does not tell.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def reset_peak(device: torch.device) -> None:
    """Let ``peak_bytes`` count from now on, where the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
