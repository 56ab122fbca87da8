"""``fleetbench doctor``: what this machine offers, and what may cause problems.

It only reads, except with ``--network``, which times links.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
from dataclasses import dataclass, field

from fleetbench.cli.doctor_network import run_network
from fleetbench.cli.options import Commands, add_command, add_json, show_command, whole
from fleetbench.cli.output import emit, emit_table, new_table
from fleetbench.errors import ConfigError

_GIB = 2**30


def register(commands: Commands) -> None:
    """Add the command's parser."""
    parser = add_command(commands, "doctor", "look at this machine: versions, cores, devices, network", run)
    network = "time the network between ranks on this machine, or between those that COMMAND, a launcher with its options, starts"
    parser.add_argument("--network", action="store_true", help=network)
    ranks = "with --network: number of ranks on this machine; default: one per GPU, or 2"
    parser.add_argument("--nproc", type=whole(2), metavar="N", help=ranks)
    add_json(parser, "the findings")
    show_command(parser)
    parser.set_defaults(command_line=(), interrupted="all ranks were stopped")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; warnings do not change the exit code."""
    if arguments.network:
        return run_network(arguments.command_line, arguments.nproc, as_json=arguments.json)
    if arguments.nproc is not None or arguments.command_line:
        given = "-- COMMAND" if arguments.command_line else "--nproc"
        raise ConfigError("goes with --network", given, hint="fleetbench doctor --network -- torchrun --nproc-per-node 2")
    findings = examine()
    if arguments.json:
        emit(json.dumps(dataclasses.asdict(findings), indent=1))
        return 0
    table = new_table("fleetbench doctor", "", "found", left=("found",), show_header=False)
    for section, facts in findings.sections.items():
        table.add_section()
        for name, value in facts.items():
            table.add_row(f"{section}: {name}", value)
    emit_table(table)
    for text in findings.skipped:
        emit(f"SKIPPED: {text}")
    for text in findings.warnings:
        emit(f"warning: {text}")
    if not findings.warnings:
        emit("no warnings")
    return 0


@dataclass(slots=True)
class Findings:
    """Facts about a machine by section, parts that could not be examined, and likely problems."""

    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def examine() -> Findings:
    """Examine this machine. This imports torch, which takes seconds."""
    from fleetbench.store import versions

    findings = Findings(sections={"versions": versions()})
    look_at_host(findings)
    _look_at_torch(findings)
    _look_at_network(findings)
    return findings


def look_at_host(findings: Findings) -> None:
    """Add processor, cores, load and memory to the findings."""
    import psutil

    from fleetbench.store import machine

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
    if load > usable / 2:
        findings.warnings.append(f"the machine is busy (load {load:.1f} on {usable} cores): step times will not repeat")
    if memory.available < 2 * _GIB:
        findings.warnings.append(f"{memory.available / _GIB:.1f} GiB of memory are free: each trainer takes about 0.5 GiB before its model")
    if usable < 2:
        findings.warnings.append("one core: two trainers will take turns instead of running at once")


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


def _look_at_network(findings: Findings) -> None:
    """Add network interfaces, the host's name, and environment variables to the findings."""
    import psutil

    from fleetbench.environment import RECORDED

    facts, status = {"host name": socket.gethostname()}, psutil.net_if_stats()
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        found = [address.address for address in addresses if address.family in (socket.AF_INET, socket.AF_INET6)]
        state = "up" if name in status and status[name].isup else "down"
        speed = f", {status[name].speed} Mbit/s" if name in status and status[name].speed else ""
        facts[name] = f"{state}{speed}: {' '.join(found) or 'no address'}"
    findings.sections["network"] = facts | {name: value for name, value in sorted(os.environ.items()) if name.startswith(RECORDED)}
