"""What ``fleetbench doctor`` looks at: this machine. Reads only."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from fleetbench.environment import RECORDED
from fleetbench.store import machine, versions

_CGROUP = Path("/sys/fs/cgroup")
_GIB = 2**30
_FEW_PROCESSES = 1024
"""A trainer has some 30 threads, which count here, and three more for each of gloo's groups."""


@dataclass(slots=True)
class Findings:
    """Facts by section, what could not be looked at, and what will get in the way."""

    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def examine() -> Findings:
    """Look at this machine. Imports torch, which takes seconds."""
    findings = Findings(sections={"versions": versions()})
    look_at_host(findings)
    _look_at_torch(findings)
    look_at_network(findings, os.environ)
    _look_at_limits(findings)
    return findings


def look_at_host(findings: Findings) -> None:
    """Processor, cores, load and memory."""
    host = machine()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory, load = psutil.virtual_memory(), os.getloadavg()[0]
    findings.sections["host"] = {
        "processor": str(host["processor"]),
        "system": str(host["system"]),
        "cores": f"{host['cores']}, of which this process may use {usable}",
        "load": f"{load:.1f} processes over the last minute",
        "memory": f"{memory.available / _GIB:.1f} GiB free of {memory.total / _GIB:.1f} GiB",
    }
    cores = quota(_CGROUP / "cpu.max")
    if cores is not None and cores < usable:
        findings.warnings.append(f"the container may use {cores:g} of {usable} cores: processes will be throttled")
    if load > usable / 2:
        findings.warnings.append(f"the machine is busy (load {load:.1f} on {usable} cores): step times will not repeat")
    if memory.available < 2 * _GIB:
        findings.warnings.append(f"{memory.available / _GIB:.1f} GiB of memory are free: each trainer takes about 0.5 GiB before its model")
    if usable < 2:
        findings.warnings.append("one core: two trainers will take turns instead of running at once")


def quota(path: Path) -> float | None:
    """What the control group allows, cores (``cpu.max``) or processes (``pids.max``); none where there is no limit."""
    try:
        limit, *period = path.read_text(encoding="ascii").split()
        return int(limit) / int(*period or "1")
    except (OSError, ValueError):
        return None


def _look_at_torch(findings: Findings) -> None:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        findings.skipped.append(f"torch: {error}")
        findings.warnings.append('torch cannot be imported: only model = "layers" can be simulated, and nothing can run')
        return
    has_gloo, has_nccl = (dist.is_available() and has() for has in (dist.is_gloo_available, dist.is_nccl_available))
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not num_gpus:
        findings.skipped.append("no GPU")
    findings.sections["torch"] = {
        "CUDA": f"{torch.version.cuda}, {num_gpus} x {torch.cuda.get_device_name(0)}" if num_gpus else "not available",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "not available",
        "gloo": "available" if has_gloo else "not available",
    }
    if not has_gloo:
        findings.warnings.append("torch has no gloo: nothing can run on CPUs")


def look_at_network(findings: Findings, environment: Mapping[str, str]) -> None:
    """Interfaces, the one that gloo would take, and what the environment sets."""
    facts, status = {}, psutil.net_if_stats()
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        found = [address.address for address in addresses if address.family in (socket.AF_INET, socket.AF_INET6)]
        state = "up" if name in status and status[name].isup else "down"
        speed = f", {status[name].speed} Mbit/s" if name in status and status[name].speed else ""
        facts[name] = f"{state}{speed}: {' '.join(found) or 'no address'}"
    chosen, why = gloo_interface(environment)
    facts["gloo would take"] = f"{chosen or 'nothing'} ({why})"
    if chosen is None:
        findings.warnings.append(f"gloo finds no interface ({why}): set GLOO_SOCKET_IFNAME")
    findings.sections["network"] = facts | {name: value for name, value in sorted(environment.items()) if name.startswith(RECORDED)}


def gloo_interface(environment: Mapping[str, str]) -> tuple[str | None, str]:
    """The interface gloo would take, and why: the variable's, the host name's, or else the loopback."""
    interfaces = psutil.net_if_addrs()
    named = environment.get("GLOO_SOCKET_IFNAME")
    if named:
        first = named.split(",")[0]
        return (first if first in interfaces else None), f"GLOO_SOCKET_IFNAME = {named}"
    owner = {address.address.partition("%")[0]: name for name, addresses in interfaces.items() for address in addresses}
    host = socket.gethostname()
    for address in _addresses(host):
        if address in owner:
            return owner[address], f"the host name {host} is {address}"
    return owner.get("127.0.0.1"), f"the host name {host} has no address of this machine"


def _addresses(host: str) -> list[str]:
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _look_at_limits(findings: Findings) -> None:
    kinds = {"open files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC}
    soft = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    facts = {name: "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}" for name, value in soft.items()}
    shared, shared_free = Path("/dev/shm"), None  # noqa: S108  # where processes share memory, looked at and not written
    if shared.is_dir():
        usage = shutil.disk_usage(shared)
        shared_free = usage.free
        facts["shared memory"] = f"{usage.free / _GIB:.2f} GiB free of {usage.total / _GIB:.2f} GiB"
    findings.sections["limits"] = facts
    findings.warnings += limit_warnings(soft, quota(_CGROUP / "pids.max"), shared_free=shared_free)


def limit_warnings(soft: dict[str, int], processes: float | None, *, shared_free: int | None) -> list[str]:
    """What these limits will stop: ``soft`` by name, -1 for none; ``processes`` of the control group; ``shared_free`` in bytes."""
    few = _FEW_PROCESSES
    warnings = []
    if shared_free is not None and shared_free < _GIB // 16:
        warnings.append("less than 64 MiB of shared memory are free: NCCL and data loaders need it")
    if 0 <= soft["open files"] < 1024:
        warnings.append(f"{soft['open files']} open files are allowed: raise it (ulimit -n 4096)")
    if 0 <= soft["processes"] < few:
        warnings.append(f"{soft['processes']} processes and threads are allowed: raise it (ulimit -u {4 * few})")
    if processes is not None and processes < few:
        warnings.append(f"the container may have {processes:g} processes and threads: a few trainers with data loaders take as many")
    return warnings
