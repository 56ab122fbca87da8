"""Cluster: the machines and links that the simulator assumes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from fleetbench.churn import Churn
from fleetbench.config import Config, at_least
from fleetbench.errors import ConfigError
from fleetbench.framing import DEFAULT_MTU, Framing, default_efficiency, default_framing, payload_share
from fleetbench.hardware import gpu_name
from fleetbench.measurements import CollectivePoint
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.stragglers import LARGEST, Straggler

LEAST_MTU, LARGEST_MTU, LARGEST_VERBS_MTU = 256, 65_535, 4096
"""Limits in bytes: InfiniBand's smallest MTU, the largest IPv4 packet, and the largest MTU of InfiniBand and
RoCE."""
MOST_LOSS = 0.1
"""Largest share of lost packets. Above it, TCP's timeouts count more than its window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Config):
    """One direction of a link.

    ``bandwidth`` is the rate on the wire, including the headers of ``framing``. With ``payload = true`` it is
    the payload rate, as iperf measures it.
    """

    bandwidth: BitsPerSecond
    """Bandwidth of the link in this direction."""
    latency: Nanoseconds = Nanoseconds(0)
    """Latency of each message."""
    framing: Framing | None = None
    """Framing of packets. Default: the framing of ``run.backend``. Gloo uses ``tcp`` between nodes and ``none``
    inside them; NCCL, also when simulated by an ``nccl-`` collective, uses ``infiniband`` and ``nvlink``."""
    mtu: int | None = None
    """Size of a packet in bytes: for ``tcp`` including IP and TCP headers (default 1500), for ``roce`` and
    ``infiniband`` the payload (default 4096)."""
    payload: bool | None = None
    """Whether ``bandwidth`` is the payload rate, so that no framing is subtracted."""
    flow_limit: BitsPerSecond | None = None
    """Largest bandwidth of one connection, such as a cloud's limit per TCP flow below the interface's rate. A
    communicator has one connection between two ranks."""
    efficiency: float | None = None
    """Share of the payload bandwidth that NCCL's collectives reach. Default: 0.95 over ``infiniband`` and
    ``roce``, where 0.74 to 0.97 was measured (reports/nccl_model), and 1 otherwise; TCP on 200 Gbit/s reached
    0.2. Gloo and links with ``payload`` ignore it."""
    simple_latency: Nanoseconds | None = None
    """Least time of a ring's step, and of a tree's hop, in NCCL's Simple protocol between nodes. Default,
    from NCCL's model: 14 us plus twice ``latency`` for each message between nodes, and at least 9.5 us for a
    ring's step, as on InfiniBand. On Slingshot, 42 and 48 us were measured."""
    loss: float | None = None
    """Share of packets that are lost. It limits each TCP connection to 1448 bytes / RTT * sqrt(3 / 2 / ``loss``),
    where RTT is the latency there and back (Mathis et al. 1997)."""

    def carried(self, backend: str, *, between_nodes: bool) -> Link:
        """Return this link without framing: its bandwidth is the rate at which this link carries payload.

        Raises ``ConfigError`` for an ``mtu`` that its framing does not allow.
        """
        if self.payload:
            return self
        framing = self.framing or default_framing(backend, between_nodes=between_nodes)
        if self.mtu is not None:
            _check_mtu(framing, self.mtu)
        share = payload_share(framing, self.mtu)
        if backend == "nccl":
            share *= default_efficiency(framing) if self.efficiency is None else Fraction(repr(self.efficiency))
        return Link(
            bandwidth=BitsPerSecond(max(1, round(self.bandwidth * share))),
            latency=self.latency,
            payload=True,
            simple_latency=self.simple_latency,
            flow_limit=None if self.flow_limit is None else BitsPerSecond(max(1, round(self.flow_limit * share))),
            loss=self.loss,
        )

    def _validate(self) -> None:
        at_least(self, 0, "bandwidth", "flow_limit", above=True)
        at_least(self, 0, "efficiency", most=1, above=True)
        at_least(self, 0, "latency", "simple_latency")
        at_least(self, LEAST_MTU, "mtu", most=LARGEST_MTU)
        at_least(self, 0, "loss", most=MOST_LOSS)
        if self.loss and (not self.latency or self.framing not in (None, "tcp") or self.mtu not in (None, DEFAULT_MTU["tcp"])):
            what = "slows TCP connections by their round trip, and needs a latency, TCP and packets of 1500 bytes"
            raise ConfigError(what, "loss", repr(self.loss), 'for example latency = "10 ms", without framing and mtu')
        if self.payload and (self.framing is not None or self.mtu is not None or self.efficiency is not None):
            hint = "drop framing, mtu and efficiency, or payload"
            raise ConfigError("payload = true excludes framing, mtu and efficiency", "payload", "true", hint)
        if self.mtu is not None and self.framing is not None:
            _check_mtu(self.framing, self.mtu)


def _check_mtu(framing: Framing, mtu: int) -> None:
    if framing != "tcp" and (framing not in DEFAULT_MTU or mtu > LARGEST_VERBS_MTU):
        hint = (
            f"roce and infiniband carry up to {LARGEST_VERBS_MTU} bytes, also where Ethernet's own MTU is 9000; nvlink and none have no mtu"
        )
        raise ConfigError(f"is no payload of a packet of framing {framing}", "mtu", repr(mtu), hint)


CollectiveAlgorithm = Literal["ring", "gloo", "nccl-volta", "nccl-ampere", "nccl-hopper", "measured"]
"""Algorithm of collectives. It is described in the modules ``algorithms``, ``gloo`` and ``nccl`` of
``sim.network`` and, for ``measured``, in ``routes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Racks(Config):
    """Racks of nodes. The nodes of a rack share an uplink in each direction."""

    nodes: int
    """Nodes per rack. Node n is in rack n // ``nodes``."""
    oversubscription: float
    """Sum of the nodes' network bandwidths, divided by the bandwidth of the uplink."""

    def _validate(self) -> None:
        at_least(self, 1, "nodes", "oversubscription")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site(Config):
    """Site of consecutive nodes, such as a data centre. Its nodes share its link to the other sites."""

    nodes: int
    """Number of nodes of the site. Sites have their nodes in the order of the list."""
    up: Link
    """Link from the site to the others. Framing is that of ``tcp`` by default, with any backend."""
    down: Link | None = None
    """Link from the others to the site. Default: as ``up``."""
    count: int = 1
    """Number of such sites, one after the other."""

    def _validate(self) -> None:
        at_least(self, 1, "nodes", "count")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Config):
    """Measured times of one kind of collective at one number of trainers, from nccl-tests or a paper."""

    kind: Literal["all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast"] = "all_reduce"
    """Collective that was timed."""
    trainers: int
    """Number of trainers that took part."""
    points: tuple[CollectivePoint, ...]
    """Time at each size; at least two sizes."""

    def _validate(self) -> None:
        if self.trainers < 2 or len({point.nbytes for point in self.points}) < 2 or any(point.took < 0 for point in self.points):
            example = 'measured = { trainers = 8, points = [{ nbytes = "1 MB", took = "3 ms" }, { nbytes = "16 MB", took = "41 ms" }] }'
            raise ConfigError(
                "needs 2 trainers, two sizes, and times from 0", "points", f"{len(self.points)} points", f"for example {example}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOverride(Config):
    """Settings of some nodes that differ from those of the others.

    If several overrides set the same field of a node, the last one counts.
    """

    nodes: tuple[int, ...]
    """Numbers of the nodes, from 0."""
    intra: Link | None = None
    """Link inside these nodes."""
    inter: Link | None = None
    """Link of these nodes to others. A message between two nodes has the higher latency and the lower
    bandwidth of the two."""
    slowdown: float = 1.0
    """Factor on compute time."""
    trainers: int | None = None
    """Number of trainers per node, instead of ``trainers_per_node``. Ranks are numbered node by node."""

    def _validate(self) -> None:
        if not self.nodes:
            raise ConfigError("names no node", "nodes", "[]", "for example nodes = [3], or drop the override")
        at_least(self, 1, "trainers")
        at_least(self, 0, "slowdown", most=LARGEST, above=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Config):
    """Nodes of trainers, their links, and their stragglers.

    If a link is not declared, the one that the profile measured in the training loop is used. A file may also
    name a ``preset``, such as ``preset = "8 x p5.48xlarge"``, which expands to the fields it stands for
    (presets.md).
    """

    nodes: int = 1
    """Number of nodes."""
    trainers_per_node: int = 1
    """Number of trainers per node, one process (one GPU) each. A rank's node is rank // trainers_per_node, unless
    ``node_overrides`` change the number on some nodes."""
    servers: int = 0
    """Number of parameter servers."""
    server_placement: Literal["own", "shared"] = "own"
    """Place of the servers. ``own``: each server has its own node. ``shared``: server i is on node i,
    together with trainers."""
    nics_per_node: int = 1
    """Number of network interfaces (NICs) per node. ``inter`` describes one of them. A trainer uses NIC
    local_rank % nics_per_node."""
    intra: Link | None = None
    """Link of each trainer inside its node, in each direction."""
    inter: Link | None = None
    """Link of each node to other nodes, in each direction."""
    collective: CollectiveAlgorithm = "ring"
    """Algorithm of simulated collectives. ``measured`` uses the points of ``cluster.measured``, or else those
    of the profile."""
    measured: tuple[Measured, ...] = ()
    """Measured times of collectives, for ``collective = "measured"`` and ``nccl-`` collectives. A text names
    a file with nccl-tests' output."""
    host_bandwidth: BitsPerSecond | None = None
    """Bandwidth at which a host copies and sums in gloo's all-reduce (``collective = "gloo"``), and at which
    a parameter server copies and sums what it receives and sends. Default: copies and sums take no time.
    All-reduces in flight together do not slow each other's copies."""
    cores_per_node: int = 16
    """Processor cores per node, which the trainers' threads share."""
    gpu: str | None = None
    """GPU of each trainer, by its name in ``fleetbench.hardware``. Simulated answers then report whether its
    memory suffices."""
    racks: Racks | None = None
    """Racks with oversubscribed uplinks."""
    sites: tuple[Site, ...] = ()
    """Sites, with links between them. A message from one to another also passes the ``up`` of its sender's site and
    the ``down`` of its receiver's, and takes their latencies in addition. By default all nodes are in one place."""
    node_overrides: tuple[NodeOverride, ...] = ()
    """Settings of some nodes that differ from those of the others."""
    stragglers: tuple[Straggler, ...] = ()
    """Entries that slow trainers down. The slowdowns of several entries multiply."""
    churn: Churn | None = None
    """Nodes that leave and come back, such as spot instances. ``nodes`` is then the largest number of nodes."""

    @property
    def trainers(self) -> int:
        """Number of trainers, which is the world size."""
        return self.nodes * self.trainers_per_node if self.is_even else sum(self.trainers_by_node)

    @property
    def is_even(self) -> bool:
        """Whether all nodes have ``trainers_per_node`` trainers, because no override sets a number."""
        return all(own.trainers is None for own in self.node_overrides)

    @property
    def trainers_by_node(self) -> tuple[int, ...]:
        """Number of trainers on each node."""
        counts = [self.trainers_per_node] * self.nodes
        for own in self.node_overrides:
            for node in own.nodes if own.trainers is not None else ():
                counts[node] = own.trainers or 0
        return tuple(counts)

    @property
    def node_by_rank(self) -> tuple[int, ...]:
        """Node of each trainer, by rank."""
        return tuple(node for node, count in enumerate(self.trainers_by_node) for _ in range(count))

    @property
    def said_of_stragglers(self) -> str:
        """Words for a heading whose times include the delays of ``stragglers``; empty without stragglers."""
        kinds = ", ".join(dict.fromkeys(entry.kind for entry in self.stragglers))
        return f", with stragglers as the file declares ({kinds})" if kinds else ""

    def require_even(self, what: str) -> None:
        """Raise ``ConfigError(what)`` if an override sets the number of trainers of some nodes."""
        for index, own in enumerate(self.node_overrides):
            if own.trainers is not None:
                hint = "leave it out: all nodes then have cluster.trainers_per_node trainers"
                raise ConfigError(what, f"cluster.node_overrides[{index}].trainers", repr(own.trainers), hint)

    @property
    def node_bandwidth(self) -> int | None:
        """Bits per second that a node's trainers can send to other nodes together, over all NICs they use.

        None if ``inter`` is not declared.
        """
        return None if self.inter is None else self.inter.bandwidth * min(self.nics_per_node, self.trainers_per_node)

    def slowdown(self, node: int) -> float:
        """Return the factor on the compute time of a node's trainers."""
        return next((own.slowdown for own in reversed(self.node_overrides) if node in own.nodes and own.slowdown != 1.0), 1.0)

    def _validate(self) -> None:
        at_least(self, 1, "nodes", "trainers_per_node", "nics_per_node", "cores_per_node")
        at_least(self, 0, "servers")
        at_least(self, 0, "host_bandwidth", above=True)
        if self.measured and self.collective != "measured" and not self.collective.startswith("nccl-"):
            hint = 'set collective = "measured", or an nccl- collective, or drop measured'
            raise ConfigError("is for measured and nccl- collectives", "measured", f"collective = {self.collective!r}", hint)
        if self.gpu is not None:
            object.__setattr__(self, "gpu", gpu_name(self.gpu, "gpu"))
        if self.server_placement == "shared" and self.servers > self.nodes:
            raise ConfigError(
                "server i shares node i, and there are more servers than nodes", "servers", repr(self.servers), f"at most {self.nodes}"
            )
        self._refuse_sites()
        if self.churn is not None:
            if self.sites:
                hint = "drop it, or describe sites by cluster.churn.zones, with the link between them as cluster.inter"
                raise ConfigError("is simulated without links between sites", "churn", f"{len(self.sites)} cluster.sites", hint)
            self.churn.check_nodes(self.nodes)
        for index, override in enumerate(self.node_overrides):
            _refuse_unknown(override.nodes, self.nodes, "node", f"node_overrides[{index}].nodes")
        for index, entry in enumerate(self.stragglers):
            _refuse_unknown(getattr(entry, "ranks", ()), self.trainers, "rank", f"stragglers[{index}].ranks")
            _refuse_unknown(getattr(entry, "nodes", ()), self.nodes, "node", f"stragglers[{index}].nodes")

    def _refuse_sites(self) -> None:
        """Raise ``ConfigError`` for sites that do not hold all nodes, or whose links a collective's model ignores."""
        held = sum(site.count * site.nodes for site in self.sites)
        if self.sites and held != self.nodes:
            hint = f"{self.nodes} nodes in all, or nodes = {held}"
            raise ConfigError(f"do not hold the {self.nodes} nodes of the cluster", "sites", f"{held} nodes", hint)
        if self.sites and (self.collective == "measured" or self.collective.startswith("nccl-")):
            hint = 'set collective = "ring", or "gloo" if gloo carries the collectives'
            what = "takes times of whole collectives, in which links between sites have no place"
            raise ConfigError(what, "collective", repr(self.collective), hint)


def _refuse_unknown(numbers: Iterable[int], count: int, what: str, where: str) -> None:
    for number in numbers:
        if not 0 <= number < count:
            raise ConfigError(f"no such {what}", where, repr(number), f"{what}s are 0 to {count - 1}")
