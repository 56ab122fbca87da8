"""Transports that NCCL 2.18 to 2.28 reports in a job's output with NCCL_DEBUG=INFO.

Sources: the INFO lines of NCCL's src/transport/{p2p,shm,net,net_ib,net_socket,nvls}.cc, src/init.cc,
src/misc/param.cc and src/graph/paths.cc; its documentation of environment variables.
"""

import collections
import re
from dataclasses import dataclass, field
from typing import Literal

from fleetbench.config import Config
from fleetbench.why.links import Remark

_INFO = "NCCL INFO "
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_PROCESS = re.compile(r"([^\s:]+:\d+):\d+ \[\d+\] NCCL INFO ")
_SET = re.compile(r"(NCCL_\w+) set (?:by environment )?to (\S+?)\.?\s*$")
_NETWORK = re.compile(r"Using network (.+?)\s*$")
_DEVICES = re.compile(r"NET/(IB|Socket) : Using(.*)")
_DEVICE = re.compile(r"\[\d+\](\w[^\s:]*:\d+/[^\s\[]+|[^\s:\[]+)")
_VIA = re.compile(r"Channel \d+.* via ((?:P2P|SHM|NET)/.+?)\s*$")
_NET = re.compile(r"NET/([^/]+)/\d+(?:\(\d+\))?(/GDRDMA)?")
_CHANNELS = re.compile(r"(\d+) coll channels,.*?(\d+) nvls channels")
_NVLS = re.compile(r"NVLS multicast support is (not )?available")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transports(Config):
    """Transports that the communicators of a job use."""

    version: str | None = None
    """Version of NCCL, such as ``2.21.5``; only rank 0 prints it."""
    network: str | None = None
    """Network in use: ``IB`` (InfiniBand and RoCE), ``Socket``, or a plugin's name such as ``OFI`` or ``AWS
    Libfabric``."""
    devices: tuple[str, ...] = ()
    """Network devices, such as ``mlx5_0:1/IB`` or ``mlx5_0:1/RoCE``; names of interfaces for sockets."""
    connections: dict[str, int] = field(default_factory=dict)
    """Number of connected channels by transport: ``P2P/IPC``, ``P2P/CUMEM``, ``P2P/direct pointer``, ``SHM``,
    ``NET/IB/GDRDMA``, ``NET/IB``, ``NET/Socket``."""
    channels: tuple[int, ...] = ()
    """Number of channels of each communicator of one process, in order."""
    nvls: Literal["used", "unused", "unavailable"] | None = None
    """Use of NVLink SHARP; None if the log does not mention it, as with NCCL_NVLS_ENABLE=0."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that NCCL reports to have read, with their values."""

    def of(self, *kinds: str) -> int:
        """Return the number of connections whose transport begins with one of ``kinds``."""
        return sum(number for kind, number in self.connections.items() if kind.startswith(kinds))


def read_nccl_log(text: str) -> Transports | None:
    """Parse NCCL's lines in a job's output, among other lines and after any prefix.

    Return None if there are no such lines.
    """
    lines = [line for line in text.splitlines() if _INFO in line]
    if not lines:
        return None
    version = _VERSION.search(text)
    said = [line.partition(_INFO)[2] for line in lines]
    networks = [found[1] for line in said if (found := _NETWORK.match(line))]
    connections = collections.Counter(_transport(found[1]) for line in said if (found := _VIA.match(line)))
    networks += [kind.split("/")[1] for kind in connections if kind.startswith("NET/")]
    used = networks[0] if networks else None
    listed = [found for line in said if (found := _DEVICES.match(line))]
    own = [found[2].partition("; OOB")[0] for found in listed if (found[1] == "Socket") is (used == "Socket")]
    devices = [device for text in own for device in _DEVICE.findall(text)]
    counts = collections.defaultdict[str, list[int]](list)
    nvls_channels = 0
    for line in lines:
        if found := _CHANNELS.search(line):
            process = _PROCESS.search(line)
            counts[process[1] if process else ""].append(int(found[1]))
            nvls_channels += int(found[2])
    multicast = [found[1] is None for line in said if (found := _NVLS.match(line))]
    has_nvls = nvls_channels > 0 or any(line.startswith("Connected NVLS tree") for line in said)
    return Transports(
        version=version[1] if version else None,
        network=used,
        devices=tuple(dict.fromkeys(devices)),
        connections=dict(connections),
        channels=tuple(next(iter(counts.values()), ())),
        nvls="used" if has_nvls else None if not multicast else "unused" if any(multicast) else "unavailable",
        environment={found[1]: found[2] for line in said if (found := _SET.search(line))},
    )


def _transport(via: str) -> str:
    """Shorten ``NET/IB/0(3)/GDRDMA/Shared`` to ``NET/IB/GDRDMA``, ``P2P/IPC/read`` to ``P2P/IPC``."""
    if net := _NET.match(via):
        return f"NET/{net[1]}{net[2] or ''}"
    return "SHM" if via.startswith("SHM") else "/".join(via.split("/")[:2])


def remarks(found: Transports, nodes: int, has_infiniband: bool) -> tuple[Remark, ...]:
    """Return remarks on what slows NCCL, the largest loss first.

    ``nodes``: number of hosts. ``has_infiniband``: whether they have an active InfiniBand or RoCE port.
    """
    variables = found.environment

    def is_on(name: str) -> bool:
        return variables.get(name, "0") not in ("0", "-2")

    def unset(*names: str, otherwise: str) -> str:
        """Return the command that resets the variables that the log shows; ``otherwise`` if it shows none."""
        were = [name for name in names if name in variables]
        return f"unset {' '.join(were)}" if were else otherwise

    over = f" over {', '.join(found.devices)}" if found.devices else ""
    adapters = "let NCCL see the adapters: in a container --device=/dev/infiniband and --ulimit memlock=-1, and libibverbs"
    rdma = any(kind.endswith("/GDRDMA") for kind in found.connections)  # if some have it, others lack it by design (NCCL_NET_GDR_READ)
    p2p_off = is_on("NCCL_P2P_DISABLE") or variables.get("NCCL_P2P_LEVEL") in ("LOC", "0")  # NCCL <= 2.22 reports the first as the second
    nvls_off = variables.get("NCCL_NVLS_ENABLE") == "0"
    rows = (
        (
            nodes > 1 and found.network == "Socket" and has_infiniband,
            f"NCCL uses TCP sockets{over} between nodes, and the nodes have InfiniBand or RoCE.",
            "unset NCCL_IB_DISABLE" if is_on("NCCL_IB_DISABLE") else unset("NCCL_NET", "NCCL_IB_HCA", otherwise=adapters),
        ),
        (
            found.of("NET/") > found.of("NET/Socket") and not rdma,
            "NCCL copies through host memory between GPUs and network adapters: GPUDirect RDMA is off.",
            unset(
                "NCCL_NET_GDR_LEVEL",
                "NCCL_DMABUF_ENABLE",
                otherwise="modprobe nvidia_peermem, or NCCL_NET_GDR_LEVEL=SYS",
            ),
        ),
        (p2p_off, "Peer-to-peer copies between GPUs of a node are switched off.", "unset NCCL_P2P_DISABLE NCCL_P2P_LEVEL"),
        (
            found.of("SHM") > 0 and not p2p_off,
            f"{found.of('SHM')} of {found.of('SHM', 'P2P/')} connections inside nodes go through host memory, not peer to peer.",
            "NCCL_P2P_LEVEL=SYS, and PCIe ACS off in the BIOS; nvidia-smi topo -p2p r says what GPUs can",
        ),
        (
            found.nvls == "unused" or nvls_off,
            "NVLink SHARP (NVLS), by which NVSwitches sum, is not used.",
            unset(*(["NCCL_NVLS_ENABLE"] if nvls_off else []), "NCCL_ALGO", "NCCL_MAX_NCHANNELS", otherwise="NCCL_NVLS_ENABLE=1"),
        ),
        (
            max(found.channels, default=0) == 1,
            "NCCL uses one channel: one thread block moves all data.",
            unset("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_MAX_NRINGS", otherwise="NCCL_MIN_NCHANNELS=4"),
        ),
    )
    return tuple(Remark(what=what, remedy=remedy) for applies, what, remedy in rows if applies)
