"""NCCL's cost model: the algorithm and the protocol that NCCL would take, and what it believes they take.

After ``src/graph/tuning.cc`` of github.com/NVIDIA/nccl (its master's constants, in ``ncclTunerConstants_t``):
of every pair of algorithm (ring, tree) and protocol (LL, LL128, Simple), time = latency + bytes / bandwidth,
and the shortest is taken. Latencies are NCCL's own; what is declared for the link between nodes is added to a
message's way between them, twice in Simple, as NCCL adds what its network plugin tells. Bandwidths are the
declared links': inside a node a trainer's, between nodes that of all interfaces that the ranks of a node use,
which NCCL's rings and trees go through side by side. Its maintainers say that the model assumes a perfect network.

Left out: PCI inside nodes (NVLink is assumed), CollNet, NVLS and PAT, which need hardware or an environment
that a cluster's file does not tell of. Channels are as many as NCCL finds on NVLink, one for each link's
``CHANNEL_GBPS``, and between nodes one for each interface, and for each 48 GB/s of a fast one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from fleetbench.plan.operations import Collective
from sim.clock import half_up
from sim.network.algorithms import Ranks
from sim.network.links import Links, Port
from sim.network.turns import taken_in_turns
from sim.network.work import Cost, Route, Work

Protocol = Literal["LL", "LL128", "Simple"]
PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")
Method = Literal["tree", "ring"]

BASE_NS: dict[Method, tuple[int, int, int]] = {"tree": (6_800, 14_000, 8_400), "ring": (6_600, 14_000, 8_400)}
"""``baseLatencies``, by protocol."""
NVLINK_NS: dict[Method, tuple[int, int, int]] = {"tree": (600, 1_250, 4_000), "ring": (600, 1_900, 3_400)}
"""``hwLatencies`` of a hop inside a node."""
NET_NS: dict[Method, tuple[int, int, int]] = {"tree": (5_000, 8_500, 14_000), "ring": (2_700, 4_000, 14_000)}
"""``hwLatencies`` of a hop between nodes."""
POST_NS = 1_000
"""``getNetOverhead`` on an Intel processor: what posting to the network takes at least in each step of a ring; three times in Simple."""
PLATEAU_BYTES = 64
"""From so many bytes for each channel and rank on, a Simple ring between nodes has ``plateau`` times its latency."""
TREE_CORRECTION: dict[Protocol, tuple[float, ...]] = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1, 1),
    "Simple": (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9),
}
"""``treeCorrectionFactor``: of a tree's bandwidth, what is left at 64 B, 128 B, ... 512 MiB."""
WIRE = {"LL": Fraction(2), "LL128": Fraction(128, 120), "Simple": Fraction(1)}
"""Bytes on the wire for each byte: LL sends a flag with every word, LL128 one in every 128 bytes."""
INTER_CHANNEL_GBPS = 48


@dataclass(frozen=True, slots=True)
class Generation:
    """Constants of a GPU generation; triples are of one node, two, and more. GB/s."""

    ll_max: tuple[float, float, float]
    """``llMaxBws``; beyond one node by the processor: Intel's for Volta and Hopper, AMD's for Ampere, as in NVIDIA's own systems."""
    ring_ll128: tuple[float, float, float]
    """``perChMaxRingLL128Bws``."""
    tree_ll128: tuple[float, float, float]
    """``perChMaxTreeLL128Bws``."""
    tree: tuple[float, float, float]
    """``perChMaxTreeBws``."""
    plateau: float
    channel_gbps: int
    """Of a channel inside a node."""


GENERATIONS = {
    "nccl-volta": Generation((39.0, 39.0, 20.4), (20.0, 20.0, 20.0), (20.0, 20.0, 20.0), (26.5, 18.5, 10.0), 1.9, 20),
    "nccl-ampere": Generation((87.7, 22.5, 19.0), (20.0, 20.0, 20.0), (20.0, 20.0, 20.0), (24.0, 23.6, 17.8), 1.4, 20),
    "nccl-hopper": Generation((141.0, 39.0, 20.4), (36.7, 36.7, 36.7), (36.7, 36.7, 29.0), (38.7, 41.4, 36.0), 1.4, 30),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """What NCCL would take for one collective."""

    method: Method
    protocol: Protocol
    latency_ns: int
    gbps: Fraction
    """The collective's bytes over the rest of its time, in GB/s."""

    def total_ns(self, nbytes: int) -> Fraction:
        """Latency and transfer of ``nbytes``."""
        return self.latency_ns + nbytes / self.gbps


class Nccl:
    """One kind of collective among some ranks, as NCCL of one GPU generation sees it."""

    def __init__(self, generation: Generation, kind: Collective, ranks: Ranks, links: Links, *, rows: bool = False) -> None:
        self._generation = generation
        self._kind = kind
        self._size = len(ranks)
        self._scale = len(ranks) if rows else 1  # NCCL counts what every rank has in the end
        members: dict[int, list[int]] = {}
        for rank in ranks:
            members.setdefault(links.node(rank), []).append(rank)
        by_node = {node: len({links.local_rank(rank) % links.nics_per_node for rank in own}) for node, own in members.items()}
        interfaces = min(by_node.values())
        self._nodes = len(members)
        self._work = Work(links).traffic(*_counts(members, by_node, links))
        self._bus_gbps = self._work.bits_per_s / (8 * 10**9)
        others = (rank for own in list(members.values())[1:] for rank in own)
        self._added_ns = max((links.hop(rank, ranks[0]).latency_ns for rank in others), default=0)
        if self._nodes == 1:
            self._channels = max(1, int(self._bus_gbps / generation.channel_gbps))
        else:
            self._channels = interfaces * max(1, -(-self._bus_gbps // (interfaces * INTER_CHANNEL_GBPS)))

    def choices(self, nbytes: int) -> list[Choice]:
        """All that NCCL chooses from, for ``nbytes`` in every rank's buffer."""
        return [self._ring(protocol, nbytes) for protocol in PROTOCOLS] + (
            [self._tree(protocol, nbytes) for protocol in PROTOCOLS] if self._kind == "all_reduce" else []
        )

    def choice(self, nbytes: int) -> Choice:
        """The one that it takes."""
        return min(self.choices(self._scale * nbytes), key=lambda choice: choice.total_ns(self._scale * nbytes))

    def route(self, nbytes: int) -> Route:
        """What a collective of ``nbytes`` takes."""
        choice, total = self.choice(nbytes), self._scale * nbytes
        passes = 2 if choice.method == "tree" else Fraction(self._steps, self._size)
        on_wire = total * passes * WIRE[choice.protocol]
        cost = Cost(choice.latency_ns, total / choice.gbps)
        messages = self._steps if choice.method == "ring" else 0
        return self._work.routed(cost, on_wire, taken_in_turns(cost.latency_ns, half_up(cost.transfer_ns), messages))

    def _ring(self, protocol: Protocol, nbytes: int) -> Choice:
        generation, scale = self._generation, min(self._nodes, 3) - 1
        bus = self._bus_gbps
        if protocol == "LL":
            bus = min(_exact(generation.ll_max[scale]), bus / 2)
        elif protocol == "LL128":
            bus = min(bus * _exact(0.92), self._channels * _exact(generation.ring_ll128[scale]))
        return Choice("ring", protocol, self._ring_latency_ns(protocol, nbytes), bus * Fraction(self._size, self._steps))

    def _ring_latency_ns(self, protocol: Protocol, nbytes: int) -> int:
        column = PROTOCOLS.index(protocol)
        is_simple = protocol == "Simple"
        inside_ns = NVLINK_NS["ring"][column]
        between_ns = NET_NS["ring"][column] + (2 if is_simple else 1) * self._added_ns
        base_ns = BASE_NS["ring"][column]
        if self._kind in ("reduce", "broadcast"):
            return base_ns + (inside_ns if self._nodes == 1 else between_ns)
        crossings = 0 if self._nodes == 1 else (2 if self._kind == "all_reduce" else 1) * (self._nodes - 1)
        if self._nodes > 1:
            inside_ns = max(inside_ns, POST_NS * (3 if is_simple else 1))
        latency_ns = base_ns + (self._steps - crossings) * inside_ns + crossings * between_ns
        is_plateau = is_simple and self._nodes > 1 and self._kind == "all_reduce"
        if is_plateau and nbytes >= PLATEAU_BYTES * self._channels * self._size:
            return round(latency_ns * _exact(self._generation.plateau))
        return latency_ns

    def _tree(self, protocol: Protocol, nbytes: int) -> Choice:
        generation, scale, column = self._generation, min(self._nodes, 3) - 1, PROTOCOLS.index(protocol)
        bus = min(self._bus_gbps * _exact(0.92), self._channels * _exact(generation.tree[scale]))
        if protocol == "LL":
            bus = min(bus / _exact(3.8), _exact(generation.ll_max[scale]))
        elif protocol == "LL128":
            kept = Fraction(7, 9) if self._nodes == 1 else Fraction(120, 128)
            bus = min(bus * kept, self._channels * _exact(generation.tree_ll128[scale]))
        power = max((nbytes >> 6).bit_length() - 1, 0)
        correction = TREE_CORRECTION[protocol]
        if power < len(correction):
            bus *= _exact(correction[power])
        between_ns = NET_NS["tree"][column] + (2 if protocol == "Simple" else 1) * self._added_ns
        chain, levels = self._size // self._nodes - 1, self._nodes.bit_length() - 1
        return Choice("tree", protocol, BASE_NS["tree"][column] + 2 * (chain * NVLINK_NS["tree"][column] + levels * between_ns), bus / 2)

    @property
    def _steps(self) -> int:
        """Steps of a ring in which a rank sends a P-th of the buffer."""
        if self._kind == "all_reduce":
            return 2 * (self._size - 1)
        return self._size if self._kind in ("reduce", "broadcast") else self._size - 1


def _counts(members: Mapping[int, list[int]], interfaces: Mapping[int, int], links: Links) -> tuple[dict[Port, int], Fraction]:
    """How many times which share passes each port when all bytes pass every rank, node and rack once, by the ranks of each node.

    They go by all interfaces that a node's ranks use, each an equal part.
    """
    parts = math.lcm(*interfaces.values())
    nodes = list(members)
    found: dict[Port, int] = {}
    for node, own in members.items():
        if len(own) > 1:
            found |= {("intra", rank, way): parts for rank in own for way in ("out", "in")}
        if len(nodes) > 1:
            other = members[nodes[0] if node != nodes[0] else nodes[1]][0]
            for rank in own:
                ends = (links.hop(rank, other).ports[0], links.hop(other, rank).ports[-1])
                found |= dict.fromkeys(ends, parts // interfaces[node])
    if links.racks is not None:
        racks = {node // links.racks.nodes for node in members}
        if len(racks) > 1:
            found |= {("rack", rack, way): parts for rack in racks for way in ("out", "in")}
    return found, Fraction(1, parts)


def _exact(value: float) -> Fraction:
    """The decimal that stands above, not the double next to it."""
    return Fraction(repr(value))
