"""Network hardware of a host, and the interfaces that its processes use; without torch.

Sources: the kernel's Documentation/ABI/stable/sysfs-class-infiniband; ``nvidia-smi topo --help``.
"""

import ipaddress
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from fleetbench.config import Config
from fleetbench.quantities import BitsPerSecond

SYSFS = Path("/sys")
LOOPBACK = "lo"
_NVIDIA_SMI_S = 20.0
"""Seconds to wait for nvidia-smi. Without persistence mode it starts the driver first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface(Config):
    """A network interface that is up."""

    name: str
    addresses: tuple[str, ...]
    """Addresses with prefix lengths, such as ``10.0.0.1/24``; IPv4 first, without link-local addresses."""
    mtu: int | None = None
    """Size of the largest packet in bytes."""
    speed: BitsPerSecond | None = None
    """Speed according to the driver; None if the driver gives no speed, as for virtual devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Port(Config):
    """A port of an RDMA adapter."""

    name: str
    """Adapter and port in the format of NCCL_IB_HCA, such as ``mlx5_0:1``."""
    link_layer: str
    """Link layer: ``InfiniBand`` or ``Ethernet`` (RoCE)."""
    state: str
    """State of the port: ``ACTIVE``, ``DOWN``, ``INIT``, ``ARMED`` or ``unknown``."""
    rate: BitsPerSecond | None = None
    """Rate according to the driver; None if the driver gives no rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host(Config):
    """Hardware of one host through which its ranks can communicate."""

    name: str
    interfaces: tuple[Interface, ...] = ()
    ports: tuple[Port, ...] = ()
    topology: str = ""
    """Connections of the GPUs as ``nvidia-smi topo -m`` prints them; empty without GPUs, or if not requested."""
    nvlink: BitsPerSecond | None = None
    """Speed in one direction over all NVLinks of a GPU, for the GPU with the least; None if unknown."""

    @property
    def has_infiniband(self) -> bool:
        """Whether a port is active that NCCL could use, InfiniBand or RoCE."""
        return any(port.state == "ACTIVE" for port in self.ports)

    def interface(self, name: str | None) -> Interface | None:
        """Return the interface with this name; None if there is no such interface."""
        return next((found for found in self.interfaces if found.name == name), None)


def this_host(sysfs: Path = SYSFS) -> Host:
    """Return this host without its GPUs; ``sysfs`` is where sysfs is mounted."""
    return Host(name=socket.gethostname(), interfaces=_interfaces(sysfs), ports=_ports(sysfs))


def _interfaces(sysfs: Path) -> tuple[Interface, ...]:
    """Return the interfaces that are up and have an address.

    A virtual device that uses no other device, as in containers, gets no speed, because it always reports
    10 Gbit/s.
    """
    found, known = [], psutil.net_if_stats()
    for name, entries in sorted(psutil.net_if_addrs().items()):
        addresses = filter(None, (_with_prefix(entry.address, entry.netmask) for entry in entries))
        usable = tuple(sorted(addresses, key=lambda each: ":" in each))
        if usable and name in known and known[name].isup:
            folder = sysfs / "class/net" / name
            speed = known[name].speed if (folder / "device").exists() or any(folder.glob("lower_*")) else 0
            bits_per_s = BitsPerSecond(speed * 10**6) if speed else None
            found.append(Interface(name=name, addresses=usable, mtu=known[name].mtu, speed=bits_per_s))
    return tuple(found)


def _with_prefix(address: str, netmask: str | None) -> str | None:
    """Return psutil's address in the form ``10.0.0.1/24``; None for a link-local or non-IP address."""
    try:
        own = ipaddress.ip_address(address.partition("%")[0])
        bits = int(ipaddress.ip_address(netmask)) if netmask else 0
    except ValueError:
        return None
    return None if own.is_link_local else f"{own}/{bits.bit_count() if netmask else own.max_prefixlen}"


def _ports(sysfs: Path) -> tuple[Port, ...]:
    found = []
    for folder in sorted((sysfs / "class/infiniband").glob("*/ports/*")):
        rate = re.match(r"([\d.]+) Gb/sec", _text(folder / "rate"))  # 200 Gb/sec (4X HDR)
        found.append(
            Port(
                name=f"{folder.parents[1].name}:{folder.name}",
                link_layer=_text(folder / "link_layer") or "InfiniBand",
                state=_text(folder / "state").partition(": ")[2] or "unknown",  # 4: ACTIVE
                rate=BitsPerSecond(round(float(rate[1]) * 1e9)) if rate else None,
            )
        )
    return tuple(found)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # the file is missing, or the driver has no value
        return ""


def gloo_interface() -> str:
    """Return the interface that gloo takes in this process.

    As in torch's ProcessGroupGloo, it is that of GLOO_SOCKET_IFNAME, or else of the first own address to which
    the host's name resolves, or else the loopback.
    """
    if named := os.environ.get("GLOO_SOCKET_IFNAME"):
        return named.partition(",")[0]
    own = {entry.address.partition("%")[0]: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
    try:
        found = [str(address[0]) for *_, address in socket.getaddrinfo(socket.gethostname(), None)]
    except OSError:
        found = []
    return next((own[address] for address in found if address in own), LOOPBACK)


def with_gpus(host: Host) -> Host:
    """Return the host with the connections of its GPUs, which nvidia-smi takes a second or more to tell."""
    texts, program = [], shutil.which("nvidia-smi") or "/usr/bin/nvidia-smi"
    for words in (("topo", "-m"), ("nvlink", "-s")):
        try:
            texts.append(subprocess.check_output([program, *words], text=True, timeout=_NVIDIA_SMI_S))
        except (OSError, subprocess.SubprocessError):
            return host
    parts = re.split(r"^GPU \d+:", texts[1], flags=re.MULTILINE)[1:]
    sums = [sum(float(rate) for rate in re.findall(r"Link \d+: ([\d.]+) GB/s", part)) for part in parts]
    least = min(sums, default=0.0)
    speed = BitsPerSecond(round(8e9 * least)) if least else None
    topology = re.sub(r"\x1b\[[0-9;]*m", "", texts[0]).partition("Legend")[0].strip()
    return replace(host, topology=topology, nvlink=speed)


def shared_interfaces(hosts: Sequence[Host]) -> tuple[str, ...]:
    """Return the names of interfaces, except loopback, over which several hosts should reach one another.

    They are up on every host under one name, with different addresses in one subnet. (Bridges of containers
    have the same address everywhere, and connect nothing.) The result is empty for a single host, which
    uses its loopback.
    """
    if len(hosts) < 2:
        return ()
    found = []
    for interface in hosts[0].interfaces:
        same = [other for host in hosts if (other := host.interface(interface.name)) is not None]
        own = [[ipaddress.ip_interface(address) for address in other.addresses] for other in same]
        nets = set.intersection(*({address.network for address in addresses} for addresses in own))
        firsts = {next((each.ip for each in addresses if each.network in nets), None) for addresses in own}
        if interface.name != LOOPBACK and nets and len(same) == len(firsts) == len(hosts):
            found.append(interface.name)
    return tuple(found)
