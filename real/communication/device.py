"""Device: where a trainer computes, and what runs beside its compute there."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fleetbench.errors import EnvironmentLacks
from real.communication.lanes import Lane, StreamLane, ThreadLane


def require_cuda(trainers: int, backend: str) -> None:
    """Raise ``EnvironmentLacks`` where this machine has no CUDA device, or NCCL fewer than it needs: one a rank."""
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices == 0:
        hint = 'to simulate: fleetbench estimate EXPERIMENT.toml --gpu H100; to run: run.device = "cpu", and run.backend = "gloo"'
        raise EnvironmentLacks("there is no CUDA device", "run.device", "'cuda'", hint)
    if backend == "nccl" and num_devices < trainers:
        hint = 'to simulate: fleetbench estimate EXPERIMENT.toml; to run: fewer cluster.trainers_per_node, or run.backend = "gloo"'
        raise EnvironmentLacks(f"NCCL needs a device for each of {trainers} trainers", "run.backend", f"{num_devices} devices", hint)


def device_of(name: str, local_rank: int | None = None) -> torch.device:
    """The device of this rank: the CPU, or the CUDA device of its place on the node (default: torchrun's LOCAL_RANK).

    Raises ``EnvironmentLacks`` without one.

    Never executed with CUDA so far.
    """
    if name != "cuda":
        return torch.device("cpu")
    require_cuda(1, "gloo")
    if local_rank is None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def backend_of_world() -> str:
    """NCCL where the job's process group has it for CUDA, as one made without naming a backend has; else gloo."""
    return "nccl" if "cuda:nccl" in dist.get_backend_config().split(",") else "gloo"


def make_lane(device: torch.device, backend: str, name: str) -> Lane:
    """A lane for collectives of ``backend`` on tensors of ``device``.

    gloo blocks the thread that waits, on every device, so it needs one of its own; NCCL needs a stream.
    """
    return StreamLane(torch.get_device_module(device), priority=-1) if backend == "nccl" else ThreadLane(name, device)


def group_options(backend: str, timeout: timedelta) -> Any:
    """``pg_options`` of a process group whose collectives the device prefers to compute: none but with NCCL.

    NCCL runs them on a stream of its own, which does not inherit the priority of the stream that issues them.
    """
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # noqa: SLF001  # new_group warns of options whose timeout is not its own; there is no public name
    return options
