"""What a host's hardware should carry: a made-up sysfs and nvidia-smi, and this process's connections."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fleetbench.quantities import BitsPerSecond
from fleetbench.why.interfaces import Host, Interface, Port, gloo_interface, shared_interfaces, this_host, with_gpus

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV6\tSYS\tNODE\tPXB\t0-31\t0\t\tN/A
GPU1\tNV6\t X \tSYS\tPHB\tNODE\t0-31\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tSYS\tSYS\t32-63\t1\t\tN/A
NIC0\tNODE\tPHB\tSYS\t X \tNODE
NIC1\tPXB\tNODE\tSYS\tNODE\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
NVLINK = """\
GPU 0: Some GPU (UUID: GPU-1)
\t Link 0: 25 GB/s
\t Link 1: 25.5 GB/s
GPU 1: Some GPU (UUID: GPU-2)
\t Link 0: 25 GB/s
\t Link 1: <inactive>
"""


def write(root: Path, **files: str) -> None:
    """Files of a made-up sysfs; a double underscore is a slash."""
    for name, text in files.items():
        path = root.joinpath(*name.split("__"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six interfaces as psutil would name them, two of which sysfs shows above a device, and two adapters."""
    root = tmp_path / "sys"
    write(root / "class/net", eth0__device__vendor="0x1", bond0__lower_eth0__mtu="1500")
    one, two = (root / f"class/infiniband/mlx5_{number}/ports/1" for number in (0, 1))
    write(one, rate="400 Gb/sec (4X NDR)", state="4: ACTIVE", link_layer="InfiniBand")
    write(two, rate="2.5 Gb/sec (1X SDR)", state="1: DOWN", link_layer="Ethernet")

    def entry(address: str, netmask: str | None) -> SimpleNamespace:
        return SimpleNamespace(address=address, netmask=netmask)

    known = {
        "eth0": [
            entry("fd00::5", "ffff:ffff:ffff:ffff::"),
            entry("10.7.0.5", "255.255.0.0"),
            entry("00:16:3e:00:00:01", None),
        ],
        "bond0": [entry("10.6.0.5", "255.255.255.0")],
        "eth1": [entry("10.8.0.5", "255.255.255.0")],
        "veth0": [entry("172.30.0.1", "255.255.255.255"), entry("fe80::1%veth0", "ffff:ffff:ffff:ffff::")],
        "far": [entry("10.9.0.5", "255.255.255.0")],
        "lo": [entry("127.0.0.1", "255.0.0.0")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    told = {"eth0": (True, 9000, 25000), "bond0": (True, 1500, 50000), "eth1": (False, 1500, 10000), "veth0": (True, 1500, 10000)}
    told |= {"far": (True, 1400, 0), "lo": (True, 65536, 0)}
    stats = {name: SimpleNamespace(isup=isup, mtu=mtu, speed=speed) for name, (isup, mtu, speed) in told.items()}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    return root


def test_interfaces_and_ports_are_those_of_sysfs(sysfs: Path) -> None:
    """Interfaces that are down are left out, and a virtual device's speed is unknown."""
    host = this_host(sysfs)
    assert host.interfaces == (
        Interface(name="bond0", addresses=("10.6.0.5/24",), mtu=1500, speed=BitsPerSecond(50 * 10**9)),
        Interface(
            name="eth0",
            addresses=("10.7.0.5/16", "fd00::5/64"),
            mtu=9000,
            speed=BitsPerSecond(25 * 10**9),
        ),
        Interface(name="far", addresses=("10.9.0.5/24",), mtu=1400),
        Interface(name="lo", addresses=("127.0.0.1/8",), mtu=65536),
        Interface(name="veth0", addresses=("172.30.0.1/32",), mtu=1500),
    )
    assert host.ports == (
        Port(name="mlx5_0:1", link_layer="InfiniBand", state="ACTIVE", rate=BitsPerSecond(400 * 10**9)),
        Port(name="mlx5_1:1", link_layer="Ethernet", state="DOWN", rate=BitsPerSecond(2_500_000_000)),
    )
    assert host.has_infiniband
    assert not Host(name="a", ports=host.ports[1:]).has_infiniband


def test_gpus_are_connected_as_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its topology without the legend, and the NVLinks of the GPU with the fewest; a program that fails tells nothing."""
    fake = tmp_path / "nvidia-smi"
    (tmp_path / "topo").write_text(TOPOLOGY)
    (tmp_path / "nvlink").write_text(NVLINK)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for program, is_known in ((f'cat {tmp_path}/"$1"', True), ("exit 9", False)):
        fake.write_text(f"#!/bin/sh\n{program}\n")
        fake.chmod(0o755)
        found = with_gpus(Host(name="a"))
        assert found.nvlink == (BitsPerSecond(200 * 10**9) if is_known else None)
        assert ("GPU0\t X \tNV6" in found.topology, "Legend" in found.topology) == (is_known, False)


def test_gloos_interface_is_that_of_its_variable_or_of_the_hosts_name(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch chooses it; a name that no interface has leads to the loopback."""
    assert sysfs
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    assert gloo_interface() == "eth9"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for address, name in (("10.7.0.5", "eth0"), ("192.0.2.1", "lo")):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, address=address: [(0, 0, 0, "", (address, 0))])
        assert gloo_interface() == name


def host(name: str, **addresses: str) -> Host:
    """A host with these interfaces, beside its loopback."""
    known = {"lo": "127.0.0.1/8"} | addresses
    found = (Interface(name=each, addresses=(address,), mtu=1500) for each, address in known.items())
    return Host(name=name, interfaces=tuple(found))


def test_hosts_share_interfaces_of_one_name_and_subnet() -> None:
    """Not the loopback, a bridge with one address everywhere, another subnet, or what a single host has."""
    one = host("a", eth0="10.0.0.1/24", eth1="10.1.0.1/24", docker0="172.17.0.1/16", ib0="10.2.0.1/24")
    two = host("b", eth0="10.0.0.2/24", eth1="10.9.0.2/24", docker0="172.17.0.1/16")
    assert shared_interfaces([one, two]) == ("eth0",)
    assert shared_interfaces([one]) == ()
