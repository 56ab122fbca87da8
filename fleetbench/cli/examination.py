"""What ``fleetbench doctor`` looks at on this machine, beside its network. Reads only."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from pathlib import Path

import psutil

from fleetbench.cli.findings import GIB, Findings
from fleetbench.cli.network_findings import INFINIBAND, look_at_network
from fleetbench.store import machine, versions

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_PROCESS_QUOTA = Path("/sys/fs/cgroup/pids.max")
_FEW_PROCESSES = 1024
"""A trainer has some 30 threads, which count here, and three more for each of gloo's groups."""


def examine() -> Findings:
    """Look at this machine. Imports torch, which takes seconds."""
    findings = Findings()
    findings.sections["versions"] = versions()
    _look_at_host(findings)
    _look_at_torch(findings)
    _look_at_gpus(findings)
    look_at_network(findings, os.environ)
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
        "memory": f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f} GiB",
    }
    quota = cpu_quota(_CPU_QUOTA)
    if quota is not None:
        facts["cpu quota"] = f"{quota:g} cores"
        if quota < usable:
            findings.warnings.append(f"the container may use {quota:g} of {usable} cores: processes will be throttled")
    if load > usable / 2:
        findings.warnings.append(f"the machine is busy (load {load:.1f} on {usable} cores): step times will not repeat")
    if memory.available < 2 * GIB:
        findings.warnings.append(f"{memory.available / GIB:.1f} GiB of memory are free: each trainer takes about 0.5 GiB before its model")
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
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if available and dist.is_nccl_available() else "not available",
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


def _look_at_limits(findings: Findings) -> None:
    kinds = {"open files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC, "locked memory": resource.RLIMIT_MEMLOCK}
    soft = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    facts = {name: "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}" for name, value in soft.items()}
    facts["locked memory"] += " bytes" if soft["locked memory"] != resource.RLIM_INFINITY else ""
    quota = process_quota(_PROCESS_QUOTA)
    if quota is not None:
        facts["processes of the control group"] = f"{quota:,}"
    shared = Path("/dev/shm")  # noqa: S108  # where processes share memory, looked at and not written
    shared_free = None
    if shared.is_dir():
        usage = shutil.disk_usage(shared)
        shared_free = usage.free
        facts["shared memory"] = f"{usage.free / GIB:.2f} GiB free of {usage.total / GIB:.2f} GiB"
    findings.sections["limits"] = facts
    findings.warnings += limit_warnings(soft, quota, shared_free=shared_free, has_infiniband=INFINIBAND.is_dir())


def limit_warnings(soft: dict[str, int], quota: int | None, *, shared_free: int | None, has_infiniband: bool) -> list[str]:
    """What these limits will stop: ``soft`` by name, -1 for none; ``shared_free`` in bytes."""
    warnings = []
    if shared_free is not None and shared_free < GIB // 16:
        warnings.append("less than 64 MiB of shared memory are free: NCCL and data loaders need it")
    if 0 <= soft["open files"] < 1024:
        warnings.append(f"{soft['open files']} open files are allowed: raise it (ulimit -n 4096)")
    if 0 <= soft["processes"] < _FEW_PROCESSES:
        warnings.append(f"{soft['processes']} processes and threads are allowed: raise it (ulimit -u {4 * _FEW_PROCESSES})")
    if quota is not None and quota < _FEW_PROCESSES:
        warnings.append(f"the container may have {quota} processes and threads: a few trainers with data loaders take as many")
    if has_infiniband and soft["locked memory"] >= 0:
        warnings.append(f"{soft['locked memory']:,} bytes of memory may be locked: InfiniBand needs it unlimited (ulimit -l unlimited)")
    return warnings


def process_quota(path: Path) -> int | None:
    """Processes and threads that the control group allows (``pids.max``); none where there is no limit."""
    try:
        limit = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(limit) if limit.isdecimal() else None
