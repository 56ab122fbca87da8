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
    """Transports of a job's communicators."""

    version: str | None = None
    """Version, such as ``2.21.5``; only rank 0 prints it."""
    network: str | None = None
    """Network: ``IB`` (InfiniBand and RoCE), ``Socket``, or a plugin's name such as ``OFI`` or ``AWS
    Libfabric``."""
    devices: tuple[str, ...] = ()
    """Devices: ``mlx5_0:1/IB`` or ``mlx5_0:1/RoCE``; interfaces for sockets."""
    connections: dict[str, int] = field(default_factory=dict)
    """Number of connected channels by transport: ``P2P/IPC``, ``P2P/CUMEM``, ``P2P/direct pointer``, ``SHM``,
    ``NET/IB/GDRDMA``, ``NET/IB``, ``NET/Socket``."""
    channels: tuple[int, ...] = ()
    """Number of channels of each communicator of one process, in order."""
    nvls: Literal["used", "unused", "unavailable"] | None = None
    """NVLink SHARP; none if the log does not mention it, as with NCCL_NVLS_ENABLE=0."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that NCCL reports to have read."""

    def of(self, *kinds: str) -> int:
        """Return the number of connections whose transport begins with one of ``kinds``."""
        return sum(number for kind, number in self.connections.items() if kind.startswith(kinds))


def read_nccl_log(text: str) -> Transports | None:
    """Parse NCCL's lines in a job's output, among other lines and after any prefix.

    None if there are none.
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


def remarks(transports: Transports, nodes: int, has_infiniband: bool) -> tuple[Remark, ...]:
    """Return what slows NCCL, the largest loss first; empty if nothing does.

    ``nodes``: number of hosts. ``has_infiniband``: whether they have an active InfiniBand or RoCE port.
    """
    between = (_sockets(transports, nodes, has_infiniband), _gdr(transports))
    inside = (_peer_to_peer(transports), _shared_memory(transports, nodes), _nvls(transports))
    both = (_channels(transports), *_forced(transports))
    return tuple(remark for remark in (*between, *inside, *both) if remark is not None)


def _unset(transports: Transports, *names: str) -> str | None:
    """Return ``unset A B`` for the variables that were set according to the log; none if none was."""
    were = [name for name in names if name in transports.environment]
    return f"unset {' '.join(were)}" if were else None


def _is_on(transports: Transports, name: str) -> bool:
    return transports.environment.get(name, "0") not in ("0", "-2")


def _sockets(transports: Transports, nodes: int, has_infiniband: bool) -> Remark | None:
    if nodes < 2 or transports.network != "Socket" or not has_infiniband:
        return None
    over = f" over {', '.join(transports.devices)}" if transports.devices else ""
    what = f"NCCL uses TCP sockets{over} between nodes, and the nodes have InfiniBand or RoCE."
    if _is_on(transports, "NCCL_IB_DISABLE"):
        return Remark(what=what, remedy="unset NCCL_IB_DISABLE")
    reset = _unset(transports, "NCCL_NET", "NCCL_IB_HCA")
    container = "in a container --device=/dev/infiniband and --ulimit memlock=-1, and libibverbs"
    return Remark(what=what, remedy=reset or f"let NCCL see the adapters: {container}")


def _gdr(transports: Transports) -> Remark | None:
    """Check GPUDirect RDMA. If one connection has it, the others lack it by design (NCCL_NET_GDR_READ)."""
    plain = transports.of("NET/") - transports.of("NET/Socket")
    if not plain or any(kind.endswith("/GDRDMA") for kind in transports.connections):
        return None
    what = "NCCL copies through host memory between GPUs and network adapters: GPUDirect RDMA is off."
    reset = _unset(transports, "NCCL_NET_GDR_LEVEL", "NCCL_IB_CUDA_SUPPORT", "NCCL_DMABUF_ENABLE")
    remedy = "modprobe nvidia_peermem; NCCL_NET_GDR_LEVEL=SYS, if GPU and adapter are far apart"
    return Remark(what=what, remedy=reset or remedy)


def _peer_to_peer(transports: Transports) -> Remark | None:
    if _is_on(transports, "NCCL_P2P_DISABLE") or transports.environment.get("NCCL_P2P_LEVEL") in ("LOC", "0"):
        what = "Peer-to-peer copies between GPUs of a node are switched off."
        reset = "unset NCCL_P2P_DISABLE NCCL_P2P_LEVEL"  # NCCL up to 2.22 reports the first as the second
        return Remark(what=what, remedy=reset)
    shared, direct = transports.of("SHM"), transports.of("P2P/")
    if not shared:
        return None
    some = f"{shared} of {shared + direct} connections inside nodes"
    remedy = "NCCL_P2P_LEVEL=SYS, and PCIe ACS off in the BIOS; nvidia-smi topo -p2p r says what GPUs can"
    return Remark(what=f"{some} go through host memory (SHM) instead of peer to peer.", remedy=remedy)


def _shared_memory(transports: Transports, nodes: int) -> Remark | None:
    if _is_on(transports, "NCCL_SHM_DISABLE"):
        what = "Shared memory between GPUs of a node is switched off."
        return Remark(what=what, remedy="unset NCCL_SHM_DISABLE")
    if nodes > 1 or not transports.of("NET/"):
        return None
    remedy = "let the ranks share /dev/shm and the host's name: in containers --ipc=host; unset NCCL_HOSTID"
    return Remark(what="GPUs of one node exchange through the network.", remedy=remedy)


def _nvls(transports: Transports) -> Remark | None:
    if transports.environment.get("NCCL_NVLS_ENABLE") == "0":
        what = "NVLink SHARP (NVLS), by which NVSwitches sum, is switched off."
        return Remark(what=what, remedy="unset NCCL_NVLS_ENABLE")
    if transports.nvls == "unused":
        what = "NVLink SHARP (NVLS) is available and not used."
        reset = _unset(transports, "NCCL_ALGO", "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS")
        return Remark(what=what, remedy=reset or "NCCL_NVLS_ENABLE=1")
    return None


def _channels(transports: Transports) -> Remark | None:
    if max(transports.channels, default=0) != 1:
        return None
    reset = _unset(transports, "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_MAX_NRINGS")
    what = "NCCL uses one channel: one thread block moves all data."
    return Remark(what=what, remedy=reset or "NCCL_MIN_NCHANNELS=4")


def _forced(transports: Transports) -> list[Remark]:
    """Report choices that NCCL would make by size and topology if variables did not make them."""
    made = [name for name in ("NCCL_ALGO", "NCCL_PROTO") if name in transports.environment]
    return [Remark(what=f"{name} takes a choice from NCCL.", remedy=f"unset {name}") for name in made]
