"""Topology: the hosts and wires that represent a cluster on one machine. It makes no system call.

Every host is a network namespace with one interface, ``eth0``. A switch is a namespace with a bridge that has
its own address, so that the rate of each single wire can be measured between its two ends. A wire is a pair
of virtual Ethernet devices, shaped at both ends.
"""

import dataclasses
from dataclasses import dataclass
from itertools import accumulate

from fleetbench.cluster import Cluster, Link
from fleetbench.errors import ConfigError
from fleetbench.framing import DEFAULT_MTU, payload_share
from fleetbench.result import skip

INTERFACE = "eth0"
"""Name of a host's only interface."""
SERVER_PORT = 6170
"""Port of a parameter server on its host, below the ports that a kernel assigns. No host has two servers."""
PAYLOAD_SHARE = float(payload_share("tcp"))
"""Ratio of a full TCP segment's payload (with timestamps) to the shaped size: its frame without preamble and
checksum."""
LEAST_LATENCY_NS = 300_000
"""Smallest latency in ns that the testbed builds."""
_SUBNET = "10.77"
_SWITCH_NET = 250


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A link in both directions, between ``lower`` (a host, or the switch of a site) and ``upper`` (a switch)."""

    lower: str
    upper: str
    rate_bps: int
    """Rate of Ethernet frames in bit/s, upwards."""
    down_bps: int
    """Rate downwards."""
    latency_ns: int = 0
    """Latency in ns of a message from host to host; of a site, what messages that leave it take in addition."""
    down_ns: int = 0
    """Latency in ns that messages into a site take in addition."""

    @property
    def port(self) -> str:
        """Name of the device at the upper end."""
        return f"p-{self.lower}"

    @property
    def device(self) -> str:
        """Name of the device at the lower end."""
        return INTERFACE if self.lower.startswith("host") else "uplink"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Hosts, switches and the wires between them.

    Hosts are the nodes in their order, then parameter servers on hosts of their own.
    """

    num_hosts: int
    switches: tuple[str, ...]
    wires: tuple[Wire, ...]
    trainers_per_node: int = 1
    server_hosts: tuple[str, ...] = ()
    """Names of the parameter servers' hosts, by server."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts."""
        return tuple(f"host{number}" for number in range(self.num_hosts))

    def host_of(self, rank: int) -> str:
        """Return the host of a trainer."""
        return f"host{rank // self.trainers_per_node}"

    @property
    def server_endpoints(self) -> tuple[str, ...]:
        """``address:port`` of every parameter server."""
        return tuple(f"{self.address(host)}:{SERVER_PORT}" for host in self.server_hosts)

    def address(self, name: str) -> str:
        """Return the IPv4 address of a host or switch; all are in one subnet of 16 bits."""
        if name in self.switches:
            return f"{_SUBNET}.{_SWITCH_NET}.{self.switches.index(name) + 1}"
        number = int(name.removeprefix("host")) + 1
        return f"{_SUBNET}.{number // 256}.{number % 256}"

    def hardware_address(self, name: str) -> str:
        """Return the Ethernet address of a host or switch."""
        high, low = (int(part) for part in self.address(name).split(".")[2:])
        return f"02:66:00:00:{high:02x}:{low:02x}"

    def latency_ns(self, source: str, target: str) -> int:
        """Return a message's latency in ns, or 0 if it is too small to build.

        It is the larger of both hosts' links', and between sites that of both sites' links in addition.
        """
        wires = {wire.lower: wire for wire in self.wires}
        ends = [wires[name] for name in (source, target) if name in self.hosts]
        declared = max((wire.latency_ns for wire in ends), default=0)
        if len({wire.upper for wire in ends}) > 1:
            declared += sum(wires[wire.upper].latency_ns for wire in ends[:1] if wire.upper in wires)
            declared += sum(wires[wire.upper].down_ns for wire in ends[1:] if wire.upper in wires)
        return declared if declared >= LEAST_LATENCY_NS else 0

    def delays(self) -> dict[str, dict[str, int]]:
        """Return the ns for which a relay holds a packet, by host and by the receiver's Ethernet address.

        The result is empty if no link has a latency.
        """
        names = (*self.hosts, *self.switches)
        found = {
            host: {self.hardware_address(other): self.latency_ns(host, other) for other in names if other != host} for host in self.hosts
        }
        return found if any(ns for by_address in found.values() for ns in by_address.values()) else {}

    @property
    def slowest_bps(self) -> int:
        """Rate of the slowest wire in bit/s.

        A ring through all hosts has this rate: it uses each wire once each way.
        """
        return min(min(wire.rate_bps, wire.down_bps) for wire in self.wires)


def topology_of(cluster: Cluster) -> Topology:
    """Return the topology that a cluster declares.

    Raises ``ConfigError`` if the cluster declares no link to build, or a feature that is not a link's.
    """
    _refuse_what_no_link_does(cluster)
    count = num_hosts(cluster)
    if count >= _SWITCH_NET * 256:
        raise ConfigError("more hosts than the testbed has addresses", "cluster.nodes", str(count), "a few hosts fill a machine")
    links = [_link(cluster, node) for node in range(cluster.nodes)] + [_declared(cluster.inter)] * (count - cluster.nodes)
    hosts = [f"host{number}" for number in range(count)]
    sites = [site for site in cluster.sites for _ in range(site.count)]
    sites = sites if len(sites) > 1 else []
    core = "core" if sites else "switch"
    wires = [_wire(host, core, link, link) for host, link in zip(hosts, links, strict=True)]
    for number, (site, end) in enumerate(zip(sites, accumulate(site.nodes for site in sites), strict=True)):
        for node in range(end - site.nodes, end):
            wires[node] = dataclasses.replace(wires[node], upper=f"site{number}")
        wires.append(_wire(f"site{number}", core, site.up, site.down or site.up))
    switches = (*(f"site{number}" for number in range(len(sites))), core)
    own = cluster.server_placement == "own"
    return Topology(
        num_hosts=count,
        switches=switches,
        wires=tuple(wires),
        trainers_per_node=cluster.trainers_per_node,
        server_hosts=tuple(hosts[(cluster.nodes if own else 0) + server] for server in range(cluster.servers)),
    )


def num_hosts(cluster: Cluster) -> int:
    """Return the number of hosts: nodes, and parameter servers on hosts of their own."""
    return cluster.nodes + (cluster.servers if cluster.server_placement == "own" else 0)


def unrealised(cluster: Cluster, *, latency: bool) -> list[dict[str, str]]:
    """Return entries of ``skipped`` for declared features that the testbed cannot build.

    ``latency``: whether this kernel can delay packets.
    """
    skipped = []
    links = {"cluster.inter.latency": cluster.inter} | {
        f"cluster.node_overrides[{index}].inter.latency": override.inter for index, override in enumerate(cluster.node_overrides)
    }
    for index, site in enumerate(cluster.sites):
        links |= {f"cluster.sites[{index}].{way}.latency": link for way, link in (("up", site.up), ("down", site.down))}
    for name, link in links.items():
        if link is not None and link.latency and not (latency and link.latency >= LEAST_LATENCY_NS):
            why = (
                "this kernel refuses the device that delays packets (/dev/net/tun)"
                if not latency
                else "a latency below 300 us is not built"
            )
            skipped.append(skip(name, f"{why}: only the machine's own latency remains"))
        for field, built in {"framing": "tcp", "mtu": DEFAULT_MTU["tcp"], "flow_limit": None, "loss": 0.0}.items():
            if link is not None and getattr(link, field) not in (None, built):
                why = "links of the testbed carry TCP in packets of 1500 bytes, without loss or a limit per connection"
                skipped.append(skip(name.replace("latency", field), why))
    if cluster.intra is not None:
        skipped.append(skip("cluster.intra", "trainers of a node communicate through this machine's memory"))
    if cluster.nics_per_node > 1:
        skipped.append(skip("cluster.nics_per_node", "a host of the testbed has one interface"))
    if cluster.cores_per_node != Cluster().cores_per_node:
        skipped.append(skip("cluster.cores_per_node", "all hosts share this machine's cores"))
    return skipped


def _refuse_what_no_link_does(cluster: Cluster) -> None:
    """Raise ``ConfigError`` for an override that does not concern a link between nodes."""
    cluster.require_even("the real executor starts as many trainers on every node")
    if cluster.racks is not None:
        raise ConfigError("the testbed builds no racks", "cluster.racks", hint="drop them, declare sites, or simulate the experiment")
    for index, override in enumerate(cluster.node_overrides):
        if override.intra is not None:
            raise ConfigError(
                "trainers of a node communicate through this machine's memory",
                f"cluster.node_overrides[{index}].intra",
                f"{override.intra.bandwidth} bit/s",
                "drop it, or simulate the experiment",
            )
        if override.slowdown != 1.0:
            raise ConfigError(
                "the real executor does not execute this field yet",
                f"cluster.node_overrides[{index}].slowdown",
                repr(override.slowdown),
                'a straggler of kind "slow_node" slows a node in both executors',
            )


def _link(cluster: Cluster, node: int) -> Link:
    """Return a node's link: that of the last override that has one, or else the cluster's."""
    found = [override.inter for override in cluster.node_overrides if node in override.nodes and override.inter is not None]
    return _declared(found[-1] if found else cluster.inter)


def _declared(link: Link | None) -> Link:
    if link is None:
        raise ConfigError(
            "the testbed builds the links that are declared, and none is", "cluster.inter", hint='inter = { bandwidth = "100 Mbit/s" }'
        )
    return link


def _wire(lower: str, upper: str, up: Link, down: Link) -> Wire:
    # the shaped rate is that on the wire
    rates = [round(link.bandwidth / PAYLOAD_SHARE) if link.payload else link.bandwidth for link in (up, down)]
    return Wire(lower=lower, upper=upper, rate_bps=rates[0], down_bps=rates[1], latency_ns=up.latency, down_ns=down.latency)


def wire_s(nbytes: float, hosts: int, rate_bps: float) -> float:
    """Return the seconds that a ring all-reduce of ``nbytes`` occupies each link of ``rate_bps``, headers included."""
    return 2 * (hosts - 1) / hosts * 8 * nbytes / (rate_bps * PAYLOAD_SHARE)
