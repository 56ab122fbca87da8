"""Link shaping: commands of ``ip`` and ``tc`` that build a topology and shape its links, for ``network``.

The settings are those with which a pair of virtual devices behaved as a link: short segments
(``gso_max_size``), so that a burst is not one packet; a peak rate, so that tokens saved while idle are not
spent at once; one CPU set for every receive queue, so that packets keep their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from real.testbed.topology import INTERFACE, Topology, Wire

Tool = Literal["ip", "tc", "sysctl"]

SEGMENT_BYTES = 8192
BURST_BYTES = 64 * 1024
LIMIT = "4mb"
PEAK = 1.03
"""Ratio of the peak rate to the rate."""
MTU_BYTES = 9000
"""Largest packet in bytes that the peak rate's bucket takes: a segment with its headers."""
_SHORT_SEGMENTS = f"gso_max_size {SEGMENT_BYTES} gro_max_size {SEGMENT_BYTES}"
_QUEUE = 10_000
"""Largest number of packets that wait for the relay."""
_SHORT = "short segments (gso_max_size, gro_max_size)"
STEERED = "packets in order (rps_default_mask)"
SYSCTLS = (
    "net/ipv6/conf/all/disable_ipv6=1",
    "net/ipv6/conf/default/disable_ipv6=1",
    "net/ipv4/tcp_slow_start_after_idle=0",
    "net/ipv4/tcp_no_metrics_save=1",
    "net/ipv4/conf/all/rp_filter=0",  # a host sends into the relay's device, and receives from another
    "net/ipv4/conf/default/rp_filter=0",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Lines for one tool in one namespace.

    A refused line ends the build, or is noted if the step is ``optional``.
    """

    namespace: str
    tool: Tool
    lines: tuple[str, ...]
    """Lines for ``ip``, in which ``{name}`` stands for the namespace ``name``; or for ``sysctl``."""
    optional: str = ""
    """Name of the missing feature if a line is refused; empty if no line may be refused."""


def build(topology: Topology) -> list[Step]:
    """Return all steps from empty namespaces to shaped links."""
    names = (*topology.switches, *topology.hosts)
    steps = [Step(namespace=name, tool="sysctl", lines=SYSCTLS) for name in names]
    steps += [_bridge(topology, switch) for switch in topology.switches]
    for wire in topology.wires:
        steps += _connect(topology, wire)
    devices = [*_ends(topology.wires), *((switch, "lan") for switch in topology.switches)]
    steps += [
        Step(namespace=name, tool="ip", lines=(f"link set dev {device} {_SHORT_SEGMENTS}",), optional=_SHORT) for name, device in devices
    ]
    steps += [_neighbours(topology, name, "lan" if name in topology.switches else INTERFACE) for name in names]
    return steps + shape(topology.wires)


def steer(topology: Topology, cores: int) -> list[Step]:
    """Return steps that send each flow to one of ``cores`` CPUs in every device created later.

    They must be applied before all other steps. Kernels before 6.4 refuse them.
    """
    names = (*topology.switches, *topology.hosts)
    return [Step(namespace=name, tool="sysctl", lines=(f"net/core/rps_default_mask={_mask(cores)}",), optional=STEERED) for name in names]


def shape(wires: Sequence[Wire]) -> list[Step]:
    """Return steps that set the rate at both ends of every wire; a new rate replaces an old one."""
    ends = [(end, rate) for wire in wires for end, rate in zip(_ends([wire]), (wire.down_bps, wire.rate_bps), strict=True)]
    return [Step(namespace=name, tool="tc", lines=(_bucket(device, rate),)) for (name, device), rate in ends]


def delay(topology: Topology, device: str) -> list[Step]:
    """Return steps that let every host send into ``device``, where a relay reads.

    A host's traffic no longer enters its interface directly. Its link's token bucket moves to ``device``,
    too.
    """
    steps = []
    for wire in topology.wires:
        if (host := wire.lower) in topology.hosts:
            address = topology.address(host)
            lines = (
                f"link set dev {device} address {topology.hardware_address(host)} txqueuelen {_QUEUE} {_SHORT_SEGMENTS} up",
                f"route replace {address.rsplit('.', 2)[0]}.0.0/16 dev {device} src {address}",
            )
            steps += [
                Step(namespace=host, tool="ip", lines=lines),
                _neighbours(topology, host, device),
                Step(namespace=host, tool="tc", lines=(_bucket(device, wire.rate_bps), f"qdisc del dev {wire.device} root")),
            ]
    return steps


def settling_s(rate_bps: float) -> float:
    """Return the seconds that an idle link sends at its peak rate before its saved tokens are spent."""
    return 8 * BURST_BYTES / ((PEAK - 1.0) * rate_bps)


def _ends(wires: Sequence[Wire]) -> list[tuple[str, str]]:
    """Return namespace and device of both ends of every wire, the upper one first."""
    return [end for wire in wires for end in ((wire.upper, wire.port), (wire.lower, wire.device))]


def _mask(cores: int) -> str:
    """Return the bitmap of all cores in the kernel's format: words of 32 bits, separated by commas.

    Source: lib/bitmap-str.c.
    """
    words = [min(32, cores - start) for start in range(0, cores, 32)]
    return ",".join([f"{(1 << words[-1]) - 1:x}", *("ffffffff" for _ in words[1:])])


def _bucket(device: str, rate_bps: int) -> str:
    peak = round(PEAK * rate_bps)
    bucket = f"tbf rate {rate_bps}bit burst {BURST_BYTES} limit {LIMIT} peakrate {peak}bit mtu {MTU_BYTES}"
    return f"qdisc replace dev {device} root handle 1: {bucket}"


def _bridge(topology: Topology, switch: str) -> Step:
    """Return the step for a bridge that forgets no address within a day, and sends nothing itself."""
    settings = "stp_state 0 forward_delay 0 mcast_snooping 0 ageing_time 8640000"
    lines = (
        "link set dev lo up",
        f"link add name lan address {topology.hardware_address(switch)} type bridge {settings}",
        f"addr add {topology.address(switch)}/16 dev lan",
        "link set dev lan up",
    )
    return Step(namespace=switch, tool="ip", lines=lines)


def _connect(topology: Topology, wire: Wire) -> list[Step]:
    make = f"link add name {wire.port} type veth peer name {wire.device} netns {{{wire.lower}}}"
    upper = (make, f"link set dev {wire.port} master lan", f"link set dev {wire.port} up")
    lower = (
        (f"link set dev {wire.device} master lan", f"link set dev {wire.device} up")
        if wire.lower in topology.switches
        else (
            "link set dev lo up",
            f"link set dev {wire.device} address {topology.hardware_address(wire.lower)}",
            f"addr add {topology.address(wire.lower)}/16 dev {wire.device}",
            f"link set dev {wire.device} up",
        )
    )
    return [Step(namespace=wire.upper, tool="ip", lines=upper), Step(namespace=wire.lower, tool="ip", lines=lower)]


def _neighbours(topology: Topology, name: str, device: str) -> Step:
    """Return the step that sets permanent neighbour entries, so that no ARP request falls into a measurement."""
    lines = tuple(
        f"neigh replace {topology.address(other)} lladdr {topology.hardware_address(other)} dev {device} nud permanent"
        for other in (*topology.switches, *topology.hosts)
        if other != name
    )
    return Step(namespace=name, tool="ip", lines=lines)
