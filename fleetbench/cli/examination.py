"""What ``fleetbench doctor`` looks at. Reads only; the one socket it opens is closed at once."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fleetbench.experiment import ALLOWED_ENVIRONMENT, Run
from fleetbench.store import machine, versions

_GIB = 2**30
_INFINIBAND = Path("/sys/class/infiniband")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(slots=True)
class Findings:
    """Facts by section, what could not be looked at, and what will get in the way."""

    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"sections": self.sections, "skipped": self.skipped, "warnings": self.warnings}


def examine() -> Findings:
    """Look at this machine. Imports torch, which takes seconds."""
    findings = Findings()
    findings.sections["versions"] = versions()
    _look_at_host(findings)
    _look_at_torch(findings)
    _look_at_gpus(findings)
    _look_at_network(findings, os.environ)
    _look_at_limits(findings)
    return findings


def _look_at_host(findings: Findings) -> None:
    host = machine()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = psutil.virtual_memory()
    load = os.getloadavg()[0]
    facts = {
        "processor": str(host["processor"]),
        "system": str(host["system"]),
        "cores": f"{host['cores']}, of which this process may use {usable}",
        "load": f"{load:.1f} processes over the last minute",
        "memory": f"{memory.available / _GIB:.1f} GiB free of {memory.total / _GIB:.1f} GiB",
    }
    quota = cpu_quota(_CPU_QUOTA)
    if quota is not None:
        facts["cpu quota"] = f"{quota:g} cores"
        if quota < usable:
            findings.warnings.append(f"the container may use {quota:g} of {usable} cores: processes will be throttled")
    if load > usable / 2:
        findings.warnings.append(f"the machine is busy (load {load:.1f} on {usable} cores): step times will not repeat")
    if memory.available < 2 * _GIB:
        findings.warnings.append(f"{memory.available / _GIB:.1f} GiB of memory are free: each trainer takes about 0.5 GiB before its model")
    if usable < 2:
        findings.warnings.append("one core: two trainers will take turns instead of running at once")
    findings.sections["host"] = facts


def cpu_quota(path: Path) -> float | None:
    """Cores that the control group allows (``cpu.max``); none where there is no limit."""
    try:
        limit, period = path.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) / int(period)


def _look_at_torch(findings: Findings) -> None:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        findings.skipped.append(f"torch: {error}")
        findings.warnings.append('torch cannot be imported: only model = "layers" can be simulated, and nothing can run')
        return
    available = dist.is_available()
    findings.sections["torch"] = {
        "CUDA": f"{torch.version.cuda}, {torch.cuda.device_count()} devices" if torch.cuda.is_available() else "not available",
        "NCCL": "available" if available and dist.is_nccl_available() else "not available",
        "gloo": "available" if available and dist.is_gloo_available() else "not available",
        "threads": f"{torch.get_num_threads()} by default; fleetbench sets thread_num",
    }
    if not (available and dist.is_gloo_available()):
        findings.warnings.append("torch has no gloo: nothing can run on CPUs")


def _look_at_gpus(findings: Findings) -> None:
    tool = shutil.which("nvidia-smi")
    query = ["--query-gpu=index,name,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run([tool, *query], capture_output=True, text=True, timeout=20, check=False) if tool else None
    except (OSError, subprocess.TimeoutExpired):
        done = None
    if done is None or done.returncode != 0 or not done.stdout.strip():
        findings.skipped.append("no GPU")
        return
    findings.sections["gpu"] = gpu_facts(done.stdout)


def gpu_facts(listing: str) -> dict[str, str]:
    """nvidia-smi's lines ``index, name, utilisation, memory used, memory total`` as facts."""
    facts = {}
    for line in listing.strip().splitlines():
        index, name, busy, used, total = (part.strip() for part in line.split(","))
        facts[index] = f"{name}, {busy} % busy, {used} of {total} MiB used"
    return facts


def _look_at_network(findings: Findings, environment: Mapping[str, str]) -> None:
    chosen, why = gloo_interface(environment)
    facts = {}
    status = psutil.net_if_stats()
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        found = [address.address for address in addresses if address.family in (socket.AF_INET, socket.AF_INET6)]
        state = "up" if name in status and status[name].isup else "down"
        speed = f", {status[name].speed} Mbit/s" if name in status and status[name].speed else ""
        facts[name] = f"{state}{speed}: {' '.join(found) or 'no address'}"
    facts["gloo would take"] = f"{chosen or 'nothing'} ({why})"
    port = Run().port
    listening = is_listening(port)
    facts[f"port {port}"] = "in use" if listening else "free"
    if listening:
        findings.warnings.append(f"port {port} is in use: the torchrun launcher needs another (run.port)")
    if chosen is None:
        findings.warnings.append(f"gloo finds no interface ({why}): set GLOO_SOCKET_IFNAME")
    adapters = sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    facts["InfiniBand"] = " ".join(adapters) or "none"
    if adapters and environment.get("NCCL_IB_DISABLE", "0") != "0":
        findings.warnings.append("InfiniBand is present and NCCL_IB_DISABLE sends NCCL over sockets")
    facts |= {name: value for name, value in sorted(environment.items()) if name.startswith(ALLOWED_ENVIRONMENT)}
    findings.sections["network"] = facts


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
    loopback = owner.get("127.0.0.1")
    return loopback, f"the host name {host} has no address of this machine"


def _addresses(host: str) -> list[str]:
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def is_listening(port: int) -> bool:
    """Whether the port is taken on any address of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _look_at_limits(findings: Findings) -> None:
    kinds = {"open files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC, "locked memory": resource.RLIMIT_MEMLOCK}
    soft = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    facts = {name: "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}" for name, value in soft.items()}
    shared = Path("/dev/shm")  # noqa: S108  # where processes share memory, looked at and not written
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        facts["shared memory"] = f"{free / _GIB:.2f} GiB free"
        if free < _GIB // 16:
            findings.warnings.append("less than 64 MiB of shared memory are free: NCCL and data loaders need it")
    if soft["open files"] != resource.RLIM_INFINITY and soft["open files"] < 1024:
        findings.warnings.append(f"{soft['open files']} open files are allowed: raise it (ulimit -n 4096)")
    findings.sections["limits"] = facts
