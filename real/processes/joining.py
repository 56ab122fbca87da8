"""Joining: a process becomes one rank of its job's process group, as its role says."""

from __future__ import annotations

import os
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from fleetbench.errors import ConfigError
from real.processes.interfaces import take_interface
from real.processes.roles import ENVIRONMENT, Role, require_address


def join(role: Role, timeout: timedelta, backend: str | None = None) -> None:
    """Make torch's process group. By default NCCL carries it where there is CUDA and somebody started several, else gloo.

    Raises ``ConfigError``
    for a parameter server, and where the address of rank 0 is missing.
    """
    if role.kind == "server":
        hint = 'use DistributedStrategy(mode="ps"), or start trainers alone'
        raise ConfigError("this process is to be a parameter server, and the strategy is collective", "TRAINING_ROLE", "'PSERVER'", hint)
    require_address(role, os.environ)
    backend = backend or ("nccl" if torch.cuda.is_available() and role.launcher != "none" else "gloo")
    if role.store is not None:
        join_through(role.store, backend, role.rank, role.trainers, timeout)
        return
    if role.rendezvous is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)  # type: ignore[attr-defined]  # missing from __all__ only
        return
    address = _address(role)
    if address is not None:
        take_interface(*address, patience_s=timeout.total_seconds())
    dist.init_process_group(backend, init_method=role.rendezvous, rank=role.rank, world_size=role.trainers, timeout=timeout)


def join_through(path: str, backend: str, rank: int, trainers: int, timeout: timedelta) -> None:
    """Make torch's process group of processes that find each other through a file, whatever characters its name has."""
    store = dist.FileStore(path, trainers)  # type: ignore[attr-defined]  # missing from __all__ only
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=trainers, timeout=timeout)


def _address(role: Role) -> tuple[str, int] | None:
    """Rank 0's, where trainers meet over the network: not those of one machine, and not through a file."""
    if role.rendezvous == ENVIRONMENT:
        return None if role.trainers_per_node == role.trainers else (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    address = urlsplit(role.rendezvous or "")
    return (address.hostname or "", address.port or 0) if address.scheme == "tcp" else None
