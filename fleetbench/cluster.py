"""Cluster: what the simulator believes about machines and links."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from fleetbench.config import Config, at_least
from fleetbench.errors import ConfigError
from fleetbench.framing import DEFAULT_MTU, Framing, default_efficiency, default_framing, payload_share
from fleetbench.hardware import gpu_name
from fleetbench.measurements import CollectivePoint
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.stragglers import LARGEST, Straggler

LEAST_MTU, LARGEST_MTU, LARGEST_VERBS_MTU = 256, 65_535, 4096
"""Bytes: the least of InfiniBand, the most that IPv4 counts, and the most of InfiniBand and RoCE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Config):
    """One direction of a link. ``latency`` is per message.

    ``bandwidth`` is the wire's, headers of ``framing`` included; ``payload = true`` declares what arrives, as iperf measures it.
    """

    bandwidth: BitsPerSecond
    latency: Nanoseconds = Nanoseconds(0)
    framing: Framing | None = None
    """By default what ``run.backend`` sends over: gloo ``tcp`` between nodes and ``none`` inside, NCCL (also simulated by an ``nccl-``
    collective) ``infiniband`` and ``nvlink``."""
    mtu: int | None = None
    """Bytes: of ``tcp`` a packet with its IP and TCP headers (default 1500), of ``roce`` and ``infiniband`` its payload (default 4096)."""
    payload: bool | None = None
    """``bandwidth`` is what arrives: no framing is taken off."""
    flow_limit: BitsPerSecond | None = None
    """The most that one connection carries, as clouds limit a TCP flow below the interface. A communicator has one between two ranks."""
    efficiency: float | None = None
    """Part of the payload's bandwidth that NCCL's collectives reach. Default: 0.95 over ``infiniband`` and ``roce``,
    where 0.74 to 0.97 was measured (reports/nccl_model), and 1 over others; TCP on 200 Gbit/s reached 0.2. Gloo and
    ``payload`` leave it out."""
    simple_latency: Nanoseconds | None = None
    """Least time of a ring's step, and of a tree's hop, in NCCL's Simple protocol between nodes. Default: that of NCCL's
    model, 14 us and twice ``latency`` in each message between nodes, and in a ring's step at least 9.5 us, as on
    InfiniBand; on Slingshot 42 and 48 us were measured."""

    def carried(self, backend: str, *, between_nodes: bool) -> Link:
        """The link that carries this one's payload with no framing. Raises ``ConfigError`` for an ``mtu`` that its framing has not."""
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
        )

    def _validate(self) -> None:
        at_least(self, 0, "bandwidth", "flow_limit", above=True)
        at_least(self, 0, "efficiency", most=1, above=True)
        at_least(self, 0, "latency", "simple_latency")
        at_least(self, LEAST_MTU, "mtu", most=LARGEST_MTU)
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


CollectiveAlgorithm = Literal[
    "ring", "halving_doubling", "tree", "double_binary_tree", "gloo", "nccl-volta", "nccl-ampere", "nccl-hopper", "measured"
]
"""How collectives are carried out; see ``sim.network``: ``algorithms``, ``gloo``, ``nccl`` and, of what was measured, ``routes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Racks(Config):
    """Nodes share an uplink, each way, that carries 1 / ``oversubscription`` of what all their network interfaces do."""

    nodes: int
    """Node n stands in rack n // ``nodes``."""
    oversubscription: float

    def _validate(self) -> None:
        at_least(self, 1, "nodes", "oversubscription")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Config):
    """Times of collectives of one kind among so many trainers, by nccl-tests or a paper."""

    kind: Literal["all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast"] = "all_reduce"
    """Collective that was timed."""
    trainers: int
    points: tuple[CollectivePoint, ...]

    def _validate(self) -> None:
        if self.trainers < 2 or len({point.nbytes for point in self.points}) < 2 or any(point.took < 0 for point in self.points):
            example = 'measured = { trainers = 8, points = [{ nbytes = "1 MB", took = "3 ms" }, { nbytes = "16 MB", took = "41 ms" }] }'
            raise ConfigError(
                "needs 2 trainers, two sizes, and times from 0", "points", f"{len(self.points)} points", f"for example {example}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOverride(Config):
    """What is different about some nodes; of several overrides of a node, the last that says a thing counts."""

    nodes: tuple[int, ...]
    intra: Link | None = None
    inter: Link | None = None
    """A message between two nodes has the latency of the later of them and the bandwidth of the slower."""
    slowdown: float = 1.0
    """Compute takes so many times as long."""
    trainers: int | None = None
    """Instead of ``trainers_per_node``; ranks are counted through the nodes in their order."""

    def _validate(self) -> None:
        if not self.nodes:
            raise ConfigError("names no node", "nodes", "[]", "for example nodes = [3], or drop the override")
        at_least(self, 1, "trainers")
        at_least(self, 0, "slowdown", most=LARGEST, above=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Config):
    """Nodes of trainers, their links, and what makes trainers late.

    A link that is not declared is the one the profile measured in the training loop.
    A file may also name a ``preset``, such as ``preset = "8 x p5.48xlarge"``: the fields that it stands for take its place (presets.md).
    """

    nodes: int = 1
    trainers_per_node: int = 1
    """One process (one GPU) each; node = rank // trainers_per_node, unless ``node_overrides`` give nodes other numbers."""
    servers: int = 0
    server_placement: Literal["own", "shared"] = "own"
    nics_per_node: int = 1
    """``inter`` is the bandwidth of one; a trainer uses the NIC local_rank % nics_per_node."""
    intra: Link | None = None
    """Per trainer, inside a node, each way."""
    inter: Link | None = None
    """Per node, between nodes, each way."""
    collective: CollectiveAlgorithm = "ring"
    """How the simulator carries collectives out; ``measured`` is by the points of ``measured``, or else of the profile."""
    measured: tuple[Measured, ...] = ()
    """Measured collectives, for ``measured`` and ``nccl-`` collectives; a text among them names a file with nccl-tests'
    output."""
    host_bandwidth: BitsPerSecond | None = None
    """What a host copies and sums a second in gloo's all-reduce (``collective = "gloo"``), and as a parameter server of what it receives
    and sends; by default copies and sums take no time. All-reduces in flight together do not slow each other's."""
    first_exchange: Nanoseconds = Nanoseconds(0)
    """What the first collective on each communicator takes beyond others in a simulated run, as its connections are opened: 0.35 s
    and more on some machines. It is most of what local steps with few exchanges wait for."""
    cores_per_node: int = 16
    gpu: str | None = None
    """What a trainer computes on, by a name of ``fleetbench.hardware``: a simulated answer says whether its memory suffices."""
    racks: Racks | None = None
    node_overrides: tuple[NodeOverride, ...] = ()
    stragglers: tuple[Straggler, ...] = ()

    @property
    def trainers(self) -> int:
        """Number of trainers, the world size."""
        return self.nodes * self.trainers_per_node if self.is_even else sum(self.trainers_by_node)

    @property
    def is_even(self) -> bool:
        """Whether no node has a number of trainers of its own."""
        return all(own.trainers is None for own in self.node_overrides)

    @property
    def trainers_by_node(self) -> tuple[int, ...]:
        """The number of each node's trainers."""
        counts = [self.trainers_per_node] * self.nodes
        for own in self.node_overrides:
            for node in own.nodes if own.trainers is not None else ():
                counts[node] = own.trainers or 0
        return tuple(counts)

    @property
    def node_by_rank(self) -> tuple[int, ...]:
        """The node of each trainer."""
        return tuple(node for node, count in enumerate(self.trainers_by_node) for _ in range(count))

    @property
    def said_of_stragglers(self) -> str:
        """What a heading adds of ``stragglers``, whose delays are in every time below it; nothing without any."""
        kinds = ", ".join(dict.fromkeys(entry.kind for entry in self.stragglers))
        return f", with stragglers as the file declares ({kinds})" if kinds else ""

    def require_even(self, what: str) -> None:
        """Raise ``ConfigError`` where nodes have different numbers of trainers. ``what``: what cannot be with it."""
        for index, own in enumerate(self.node_overrides):
            if own.trainers is not None:
                hint = "leave it out: all nodes then have cluster.trainers_per_node trainers"
                raise ConfigError(what, f"cluster.node_overrides[{index}].trainers", repr(own.trainers), hint)

    @property
    def node_bandwidth(self) -> int | None:
        """Bits per second that a node's trainers send between nodes all together, by all NICs that they use; none where undeclared."""
        return None if self.inter is None else self.inter.bandwidth * min(self.nics_per_node, self.trainers_per_node)

    def slowdown(self, node: int) -> float:
        """How many times as long compute takes on a node."""
        return next((own.slowdown for own in reversed(self.node_overrides) if node in own.nodes and own.slowdown != 1.0), 1.0)

    def _validate(self) -> None:
        at_least(self, 1, "nodes", "trainers_per_node", "nics_per_node", "cores_per_node")
        at_least(self, 0, "first_exchange", "servers")
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
        for index, override in enumerate(self.node_overrides):
            _refuse_unknown(override.nodes, self.nodes, "node", f"node_overrides[{index}].nodes")
        for index, entry in enumerate(self.stragglers):
            _refuse_unknown(getattr(entry, "ranks", ()), self.trainers, "rank", f"stragglers[{index}].ranks")
            _refuse_unknown(getattr(entry, "nodes", ()), self.nodes, "node", f"stragglers[{index}].nodes")


def _refuse_unknown(numbers: Iterable[int], count: int, what: str, where: str) -> None:
    for number in numbers:
        if not 0 <= number < count:
            raise ConfigError(f"no such {what}", where, repr(number), f"{what}s are 0 to {count - 1}")
