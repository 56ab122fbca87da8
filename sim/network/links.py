"""Links: the ports that messages pass from rank to rank, and their rates and latencies.

Inside its node, a trainer has a link with its full rate in each direction. Between nodes, it uses the network
interface whose index is its local rank modulo the node's number of interfaces (rails). A rack's nodes share
its uplink, whose rate is their total bandwidth over the oversubscription. A site's nodes share its link to other
sites, which also has a latency. The network above racks and sites carries all that their links bring.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate

from fleetbench.cluster import Link, Measured, Racks, Site
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.framing import loss_limit
from fleetbench.measurements import CollectivePoint
from fleetbench.plan.operations import Collective
from fleetbench.profile import Communication, communication_of, links_for

Port = tuple[str, int, str]
"""Kind, number, and ``out`` or ``in`` of one direction of a link: ``intra`` and a rank, ``inter`` and an
interface (the node, if each has one), ``rack`` and a rack, or ``site`` and a site. For a limited connection:
``connection``, the sending rank, and the receiving rank with the communicator."""


@dataclass(frozen=True, slots=True)
class Hop:
    """Path of a message from one rank to another."""

    latency_ns: int
    """Latency of a message in ns."""
    ports: tuple[Port, ...]
    """All ports that a message passes."""
    connection: tuple[Port, int] | None = None
    """Port of the communicator's own connection between the two ranks, and its limit in bit/s; ``None``
    without a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of a cluster."""

    trainers_per_node: int
    intra: Link | None
    """Link of a trainer inside its node."""
    inter: Link | None
    """Link of an interface to the other nodes."""
    nics_per_node: int = 1
    nodes: int = 1
    """Number of nodes. Used only with racks, the last of which may be smaller."""
    racks: Racks | None = None
    sites: tuple[Site, ...] = ()
    """Sites one by one, with payload rates; empty if all nodes are in one place."""
    site_of: tuple[int, ...] = ()
    """Site of every node; empty without sites."""
    intra_of: Mapping[int, Link] = field(default_factory=dict)
    """Links inside nodes that differ from ``intra``, by node."""
    inter_of: Mapping[int, Link] = field(default_factory=dict)
    """Links of interfaces that differ from ``inter``, by node."""
    measured: Communication | None = None
    """Links and times that a profile has measured in the training loop."""
    declared: tuple[Measured, ...] = ()
    """Measured collectives of ``cluster.measured``; they take precedence over those of ``measured``."""
    collective: str = "ring"
    """Name of the algorithm or library that carries out collectives: ``cluster.collective``."""
    communicator: int = 0
    """Number of the communicator that carries the collectives; each communicator has its own connections."""
    host_ns_per_byte: Fraction = Fraction(0)
    """Time in ns in which a host copies and sums one byte of gloo's all-reduce."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of ``run.environment``; some of them change NCCL's choices."""
    first_ranks: tuple[int, ...] = ()
    """First rank of every node; empty if all nodes have the same number of trainers."""

    @classmethod
    def of(cls, experiment: Experiment) -> Links:
        """Return the links of an experiment, as declared or measured.

        Raises ``ConfigError`` for a link that is used, and is neither declared nor measured.
        """
        cluster, backend = experiment.cluster, experiment.transport
        intra, inter = links_for(experiment)
        own = [(node, override) for override in cluster.node_overrides for node in override.nodes]
        host = cluster.host_bandwidth
        sites = [site for site in cluster.sites for _ in range(site.count)]
        return cls(
            trainers_per_node=cluster.trainers_per_node,
            intra=intra,
            inter=inter,
            nics_per_node=cluster.nics_per_node,
            nodes=cluster.nodes,
            racks=cluster.racks,
            sites=tuple(Site(nodes=site.nodes, up=_wide(site.up), down=_wide(site.down or site.up)) for site in sites),
            site_of=tuple(number for number, site in enumerate(sites) for _ in range(site.nodes)),
            intra_of={node: override.intra.carried(backend, between_nodes=False) for node, override in own if override.intra is not None},
            inter_of={node: override.inter.carried(backend, between_nodes=True) for node, override in own if override.inter is not None},
            measured=communication_of(experiment),
            declared=cluster.measured,
            collective=cluster.collective,
            environment=experiment.run.environment,
            first_ranks=() if cluster.is_even else tuple(accumulate(cluster.trainers_by_node, initial=0))[:-1],
            host_ns_per_byte=Fraction(0) if host is None else Fraction(8 * 10**9, host),
        )

    @property
    def in_flight(self) -> tuple[Link, ...]:
        """Links that each collective sees when two, three, ... are in flight; empty if not measured."""
        return () if self.measured is None else self.measured.in_flight

    def node(self, rank: int) -> int:
        """Return the node of a rank."""
        return bisect_right(self.first_ranks, rank) - 1 if self.first_ranks else rank // self.trainers_per_node

    def local_rank(self, rank: int) -> int:
        """Return the number of a rank inside its node."""
        return rank - self.first_ranks[self.node(rank)] if self.first_ranks else rank % self.trainers_per_node

    def between(self, node: int) -> Link:
        """Return the link between a node's interface and other nodes."""
        return _known(self.inter_of.get(node, self.inter))

    def hop(self, sender: int, receiver: int) -> Hop:
        """Return the hop from one rank to another. Between nodes, it has the higher latency of the two ends."""
        nodes = (self.node(sender), self.node(receiver))
        latency_ns, links = self._path(*nodes)
        connection = self._connection(sender, receiver, links)
        if nodes[0] == nodes[1]:
            return Hop(latency_ns, (("intra", sender, "out"), ("intra", receiver, "in")), connection)
        ports: list[Port] = [("inter", self._interface(sender), "out"), ("inter", self._interface(receiver), "in")]
        for number, kind in enumerate(self.areas, start=1):
            areas = self.area(kind, nodes[0]), self.area(kind, nodes[1])
            if areas[0] != areas[1]:
                ports[number:number] = [(kind, areas[0], "out"), (kind, areas[1], "in")]
        return Hop(latency_ns, tuple(ports), connection)

    @property
    def areas(self) -> tuple[str, ...]:
        """Kinds of areas whose nodes share a link to all others: ``rack``, ``site``, both or none."""
        return ("rack",) * (self.racks is not None) + ("site",) * bool(self.sites)

    def area(self, kind: str, node: int) -> int:
        """Return the number of a node's rack or site."""
        if kind == "site":
            return self.site_of[node]
        assert self.racks is not None
        return node // self.racks.nodes

    def bits_per_s(self, port: Port) -> int | Fraction:
        """Return the rate of a port for one collective, in bit/s."""
        kind, number, way = port
        if kind == "intra":
            return self._intra(self.node(number)).bandwidth
        if kind == "inter":
            return self.between(number // self.nics_per_node).bandwidth
        if kind == "site":
            return self._of_site(number, way).bandwidth
        assert self.racks is not None
        nodes = range(number * self.racks.nodes, min((number + 1) * self.racks.nodes, self.nodes))
        of_nodes = self.nics_per_node * sum(self.between(node).bandwidth for node in nodes)
        return Fraction(of_nodes) / Fraction(repr(self.racks.oversubscription))  # the decimal that a file writes

    def points_among(self, kind: Collective, ranks: int) -> tuple[CollectivePoint, ...]:
        """Return the measured times of ``kind`` among ``ranks`` ranks.

        A kind other than all-reduce that was not measured at all has none. Otherwise raises ``ConfigError`` if fewer
        than two sizes were measured among ``ranks``.
        """
        found = next((one.points for one in reversed(self.declared) if (one.kind, one.trainers) == (kind, ranks)), ())
        known = {one.trainers: one.points for one in self.declared if one.kind == kind}
        if found or (kind != "all_reduce" and not known):
            return found
        if not known and self.measured is not None and self.measured.points:
            known = {self.measured.trainers: self.measured.points}
        found = known.get(ranks, ())
        if len({point.nbytes for point in found}) < 2:
            told = ", ".join(f"{len(points)} sizes among {trainers}" for trainers, points in known.items()) or "no size"
            raise ConfigError(
                f"needs {kind} measured among {ranks} trainers, of two sizes at least, and knows {told}",
                "cluster.collective",
                "'measured'",
                "give cluster.measured, take the profile with as many trainers as meet in one, or choose an algorithm: ring, ...",
            )
        return found

    def slower(self, port: Port, collectives: int) -> tuple[float, float]:
        """Return the factors on a port's busy time and on latencies while ``collectives`` in flight pass the port.

        Both are 1 unless measured. Beyond the largest measured number of collectives, their total rate stays
        constant, and latencies grow in proportion.
        """
        measured_name = "inter" if self.measured is not None and self.measured.between == "nodes" else "intra"
        if collectives < 2 or self.measured is None or not self.in_flight or port[0] != measured_name:
            return 1.0, 1.0
        alone, known = self.measured.link, min(collectives, len(self.in_flight) + 1)
        seen = self.in_flight[known - 2]
        latency = collectives / known * seen.latency / alone.latency if seen.latency and alone.latency else 1.0
        return alone.bandwidth / (known * seen.bandwidth), latency

    def _path(self, sender: int, receiver: int) -> tuple[int, list[Link]]:
        """Return the latency in ns, and the links, of the way from one node to another or inside one."""
        if sender == receiver:
            return self._intra(sender).latency, [self._intra(sender)]
        ends = [self.between(sender), self.between(receiver)]
        apart = bool(self.sites) and self.site_of[sender] != self.site_of[receiver]
        wide = [self._of_site(self.site_of[sender], "out"), self._of_site(self.site_of[receiver], "in")] if apart else []
        return max(link.latency for link in ends) + sum(link.latency for link in wide), [*ends, *wide]

    def _of_site(self, number: int, way: str) -> Link:
        return self.sites[number].up if way == "out" else _known(self.sites[number].down)

    def _connection(self, sender: int, receiver: int, links: Sequence[Link]) -> tuple[Port, int] | None:
        limits: list[int] = [link.flow_limit for link in links if link.flow_limit is not None]
        if loss := 1 - math.prod(1 - (link.loss or 0) for link in links):
            there, back = (self._path(self.node(a), self.node(b))[0] for a, b in ((sender, receiver), (receiver, sender)))
            limits.append(loss_limit(loss, there + back))
        return (("connection", sender, f"to {receiver} by {self.communicator}"), min(limits)) if limits else None

    def _interface(self, rank: int) -> int:
        return self.node(rank) * self.nics_per_node + self.local_rank(rank) % self.nics_per_node

    def _intra(self, node: int) -> Link:
        return _known(self.intra_of.get(node, self.intra))


def _wide(link: Link) -> Link:
    """Return a link between sites without framing, which is TCP's."""
    return link.carried("gloo", between_nodes=True)


def _known(link: Link | None) -> Link:
    assert link is not None, "a collective crosses a link that is neither declared nor measured"
    return link
