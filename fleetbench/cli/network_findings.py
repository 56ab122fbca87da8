"""What ``fleetbench doctor`` sees of the network. Reads only; the one socket it opens is closed at once."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from fleetbench.cli.findings import Findings
from fleetbench.environment import RECORDED
from fleetbench.experiment import Run

INFINIBAND = Path("/sys/class/infiniband")
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
_NCCL_ORDER = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")
"""NCCL's own search, first what is there (``ncclFindInterfaces`` in its ``src/misc/socket.cc``)."""


def look_at_network(findings: Findings, environment: Mapping[str, str]) -> None:
    """Interfaces, which of them gloo and NCCL would take, InfiniBand, the rendezvous' port, and what the environment sets."""
    facts = {}
    status = psutil.net_if_stats()
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        found = [address.address for address in addresses if address.family in (socket.AF_INET, socket.AF_INET6)]
        state = "up" if name in status and status[name].isup else "down"
        speed = f", {status[name].speed} Mbit/s" if name in status and status[name].speed else ""
        facts[name] = f"{state}{speed}: {' '.join(found) or 'no address'}"
    chosen, why = gloo_interface(environment)
    facts["gloo would take"] = f"{chosen or 'nothing'} ({why})"
    if chosen is None:
        findings.warnings.append(f"gloo finds no interface ({why}): set GLOO_SOCKET_IFNAME")
    adapters = infiniband_adapters(INFINIBAND)
    facts["InfiniBand"] = "; ".join(f"{name} {ports}".strip() for name, ports in adapters.items()) or "none"
    facts["NCCL would take"] = _nccl(findings, environment, adapters)
    _look_at_port(findings, facts)
    facts |= {name: value for name, value in sorted(environment.items()) if name.startswith(RECORDED)}
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


def nccl_interfaces(environment: Mapping[str, str], names: list[str]) -> tuple[list[str], str]:
    """Those of ``names`` that NCCL's sockets would use, and why; NCCL itself starts over them whatever carries the data."""
    named = environment.get("NCCL_SOCKET_IFNAME")
    if named:
        return _matching(named, names), f"NCCL_SOCKET_IFNAME = {named}"
    for pattern in _NCCL_ORDER:
        found = _matching(pattern, names)
        if found:
            return found, "NCCL's own order: ib..., then all but docker..., lo and virbr..."
    return [], "there is no interface with an address"


def infiniband_adapters(root: Path) -> dict[str, str]:
    """Adapters, each with its ports' state, rate and link layer, as the kernel says them."""
    adapters = {}
    for adapter in sorted(root.iterdir()) if root.is_dir() else []:
        ports = sorted((adapter / "ports").iterdir()) if (adapter / "ports").is_dir() else []
        said = [f"port {port.name}: {', '.join(filter(None, map(_first_line, _files(port))))}" for port in ports]
        adapters[adapter.name] = f"({'; '.join(said)})" if said else ""
    return adapters


def _files(port: Path) -> list[Path]:
    return [port / name for name in ("state", "rate", "link_layer")]


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _nccl(findings: Findings, environment: Mapping[str, str], adapters: Mapping[str, str]) -> str:
    status = psutil.net_if_stats()
    names = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if (name not in status or status[name].isup) and any(one.family in (socket.AF_INET, socket.AF_INET6) for one in addresses)
    ]
    found, why = nccl_interfaces(environment, names)
    if not found:
        findings.warnings.append(f"NCCL finds no interface ({why}): several GPUs cannot meet")
    disabled = environment.get("NCCL_IB_DISABLE", "0") != "0"
    if adapters and disabled:
        findings.warnings.append("InfiniBand is present and NCCL_IB_DISABLE sends NCCL over sockets")
    active = [name for name, ports in adapters.items() if "ACTIVE" in ports]
    if adapters and not active:
        findings.warnings.append("InfiniBand adapters are present, and no port of theirs is active: NCCL would use sockets")
    sockets = f"{' '.join(found) or 'nothing'} ({why})"
    return f"{' '.join(active)} by verbs, and to begin with {sockets}" if active and not disabled else sockets


def _matching(pattern: str, names: list[str]) -> list[str]:
    """NCCL's patterns: prefixes separated by commas; ``^`` in front: all but these; ``=``: these names and no prefixes."""
    is_not = pattern.startswith("^")
    rest = pattern.removeprefix("^")
    is_exact = rest.startswith("=")
    wanted = [part for part in rest.removeprefix("=").split(",") if part]
    return [name for name in names if any(name == part if is_exact else name.startswith(part) for part in wanted) != is_not]


def _look_at_port(findings: Findings, facts: dict[str, str]) -> None:
    port = Run().port
    listening = is_listening(port)
    facts[f"port {port}"] = "in use" if listening else "free"
    if listening:
        findings.warnings.append(f"port {port} is in use: the torchrun launcher needs another (run.port)")
    try:
        first, last = map(int, OUTGOING.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return
    facts["ports of outgoing connections"] = f"{first} to {last}"
    if first <= port <= last:
        findings.warnings.append(f"port {port} is among those of outgoing connections: it may be taken at any time (run.port)")


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
