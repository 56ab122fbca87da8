"""Network hardware of a host, and the interfaces that its processes use; without torch.

Sources: the kernel's Documentation/ABI/stable/sysfs-class-infiniband; tcp_info in linux/tcp.h.
"""

import collections
import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from fleetbench.config import Config
from fleetbench.quantities import BitsPerSecond
from fleetbench.why.gpus import Gpus

SYSFS = Path("/sys")
LOOPBACK = "lo"
_TCP_BYTES_ACKED = slice(120, 128)
"""Bytes of ``tcp_info`` that hold ``tcpi_bytes_acked``, an unsigned integer (linux/tcp.h; Linux 4.1)."""


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
    gpus: Gpus | None = None
    """Connections of the GPUs; None if nvidia-smi or GPUs are missing, or if not requested."""

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


def bytes_sent() -> Mapping[str, int]:
    """Return the acknowledged bytes of this process's established TCP connections, by local address.

    It is empty on a system without Linux's ``tcp_info``, or if sockets have a default timeout.
    """
    sent = collections.Counter[str]()
    if not hasattr(socket, "TCP_INFO"):
        return sent
    if socket.getdefaulttimeout() is not None:  # with a default timeout, copying a socket would change the timeout of the original
        return sent
    for one in psutil.Process().net_connections(kind="tcp"):
        if one.status == psutil.CONN_ESTABLISHED and one.fd >= 0:
            try:
                with socket.socket(fileno=os.dup(one.fd)) as copy:
                    told = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            except OSError:  # the connection has been closed since
                continue
            sent[one.laddr.ip.removeprefix("::ffff:")] += int.from_bytes(told[_TCP_BYTES_ACKED], "little")
    return sent


def interface_of_connections(before: Mapping[str, int] | None = None) -> str | None:
    """Return the interface that this process's TCP connections use most; None without connections.

    With ``before``, an earlier ``bytes_sent()``, only bytes sent since then count, such as those of a
    collective.
    """
    now = bytes_sent()
    grown = {address: number - (before or {}).get(address, 0) for address, number in now.items()}
    if not grown:
        return None
    own = max(grown, key=lambda address: grown[address])
    every = [(name, entry.address) for name, entries in psutil.net_if_addrs().items() for entry in entries]
    return next((name for name, address in every if address.partition("%")[0] == own), None)


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
