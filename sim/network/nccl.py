"""NCCL: the algorithm and the protocol that its own cost model chooses, and the time that they take.

The choice is that of ``src/graph/tuning.cc`` of github.com/NVIDIA/nccl (5067397c, ``ncclTunerConstants_t``):
every pair of algorithm and protocol has a time = latency + bytes / bandwidth, and NCCL takes the pair with
the shortest. Its maintainers say that the model assumes a perfect network, so a collective's time differs
from it in three ways:

- NCCL expects ``BELIEVED`` of the interfaces' rate, and gets what the link carries (``Link.efficiency``).
- The latency of a Simple ring between nodes overlaps with its transfer: the ring takes the longer of the two.
- A link may declare the ``simple_latency`` of its fabric: each step of such a ring, and each hop of a Simple
  tree, takes at least that.

A link's declared latency is added to each message between nodes, twice in Simple, as NCCL adds the latency
that its network plugin reports. NVLS is available on nodes of more than ``DIRECT`` Hopper GPUs on NVLink,
which have an NVSwitch, and NVLSTree between such nodes. ``NCCL_ALGO``, ``NCCL_PROTO`` and
``NCCL_NVLS_ENABLE`` of ``run.environment`` are followed.

PCI inside nodes (NVLink is assumed), CollNet and PAT are left out. On NVLink, NCCL finds one channel per
``Generation.channel_gbps``; between nodes, there is one per interface, or per 48 GB/s of a fast one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeVar

from fleetbench.plan.operations import Collective
from sim.clock import half_up
from sim.network.algorithms import Ranks
from sim.network.links import Links, Port
from sim.network.turns import taken_in_turns
from sim.network.work import Cost, Route, Work

_Name = TypeVar("_Name", bound=str)

Protocol = Literal["LL", "LL128", "Simple"]
PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")
Method = Literal["ring", "tree", "nvls", "nvlstree"]
METHODS: tuple[Method, ...] = ("ring", "tree", "nvls", "nvlstree")

BASE_NS = {"tree": (6_800, 14_000, 8_400), "ring": (6_600, 14_000, 8_400)}
"""NCCL's ``baseLatencies`` in ns, by algorithm and protocol (``PROTOCOLS``)."""
NVLINK_NS = {"tree": (600, 1_250, 4_000), "ring": (600, 1_900, 3_400)}
"""NCCL's ``hwLatencies`` of a hop inside a node, as in ``BASE_NS``."""
NET_NS = {"tree": (5_000, 8_500, 14_000), "ring": (2_700, 4_000, 14_000)}
"""NCCL's ``hwLatencies`` of a hop between nodes, as in ``BASE_NS``."""
POST_NS = 1_000
"""Least time in ns that posting to the network takes in each step of a ring, three times in Simple: NCCL's
``getNetOverhead`` on an Intel processor."""
PLATEAU_BYTES = 64
"""Number of bytes per channel and rank from which an all-reduce on a Simple ring between nodes has
``plateau`` times its latency."""
TREE_CORRECTION: dict[Protocol, tuple[float, ...]] = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1, 1),
    "Simple": (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9),
}
"""NCCL's ``treeCorrectionFactor``: share of a tree's bandwidth that remains at 64 B, 128 B, ... 512 MiB."""
WIRE = {"LL": Fraction(2), "LL128": Fraction(128, 120), "Simple": Fraction(1)}
"""Bytes on the wire per byte of data: LL sends a flag with every word, LL128 one in every 128 bytes."""
INTER_CHANNEL_GBPS = 48
BELIEVED = Fraction(57, 100)
"""Share of the interfaces' rate that NCCL expects between nodes when it chooses. With 0.55 to 0.60, the model
changes its choice at all sizes at which times on 2, 4 and 16 nodes of Alps show a change. Times on Polaris do
not contradict it (reports/nccl_model)."""
STEP_NS = 9_500
"""Least time in ns of a step of a Simple ring between nodes. All-reduces of 1 and 2 GiB among 1,024 GPUs on
InfiniBand took 9.5 and 9.9 us per step, although the bytes of a step take only 2.6 and 5.2 us
(github.com/NVIDIA/nccl-tests, issue 322)."""
NVLS_NS, NVLS_NET_NS = 25_000, 20_900
"""NCCL's ``hwLatencies`` in ns of NVLS inside a node, and of NVLSTree between nodes."""
NVLS_SHARE = Fraction("0.765")
"""Rate of an NVLS all-reduce's bytes, as a share of NVLink's payload rate: 275 of 360 GB/s on 8 H100, 123 of
160 GB/s on 8 H800 (github.com/NVIDIA/nccl-tests, issue 212; github.com/NVIDIA/nccl, issue 1374)."""
DIRECT, NVLINK_GBPS = 4, 100
"""Largest number of GPUs that NVLink connects without a switch, and a rate in GB/s that PCIe does not reach."""


@dataclass(frozen=True, slots=True)
class Generation:
    """NCCL's constants for a GPU generation.

    Rates are in GB/s. Triples are for one node, for two nodes, and for more.
    """

    ll_max: tuple[float, float, float]
    """NCCL's ``llMaxBws``: largest rate of LL. With several nodes it depends on the processor: Intel's for
    Volta and Hopper, AMD's for Ampere, as in NVIDIA's own systems."""
    ring_ll128: tuple[float, float, float]
    """NCCL's ``perChMaxRingLL128Bws``: largest rate of a channel of a ring in LL128."""
    tree_ll128: tuple[float, float, float]
    """NCCL's ``perChMaxTreeLL128Bws``: largest rate of a channel of a tree in LL128."""
    tree: tuple[float, float, float]
    """NCCL's ``perChMaxTreeBws``: largest rate of a channel of a tree."""
    plateau: float
    channel_gbps: int
    """Rate of a channel inside a node in GB/s."""
    nvls_tree: tuple[float, float, float] | None = None
    """NCCL's ``perChMaxNVLSTreeBws``: largest rate of a channel of NVLSTree; ``None`` for GPUs without NVLS."""


GENERATIONS = {
    "nccl-volta": Generation((39.0, 39.0, 20.4), (20.0, 20.0, 20.0), (20.0, 20.0, 20.0), (26.5, 18.5, 10.0), 1.9, 20),
    "nccl-ampere": Generation((87.7, 22.5, 19.0), (20.0, 20.0, 20.0), (20.0, 20.0, 20.0), (24.0, 23.6, 17.8), 1.4, 20),
    "nccl-hopper": Generation((141.0, 39.0, 20.4), (36.7, 36.7, 36.7), (36.7, 36.7, 29.0), (38.7, 41.4, 36.0), 1.4, 30, (0.0, 57.7, 45.5)),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm and a protocol that NCCL may choose for one collective, with their latency and rate."""

    method: Method
    protocol: Protocol
    latency_ns: int
    gbps: Fraction
    """Rate in GB/s: the collective's bytes over its time without latency."""

    def total_ns(self, nbytes: int) -> Fraction:
        """Return the time of ``nbytes`` in ns, latency and transfer together."""
        return self.latency_ns + nbytes / self.gbps


class Nccl:
    """One kind of collective among some ranks, as NCCL carries it out on one GPU generation."""

    def __init__(self, generation: Generation, kind: Collective, ranks: Ranks, links: Links, *, rows: bool = False) -> None:
        self._generation, self._kind, self._size = generation, kind, len(ranks)
        self._scale = len(ranks) if rows else 1  # NCCL counts the bytes that every rank has in the end
        members: dict[int, list[int]] = {}
        for rank in ranks:
            members.setdefault(links.node(rank), []).append(rank)
        by_node = {node: len({links.local_rank(rank) % links.nics_per_node for rank in own}) for node, own in members.items()}
        interfaces = min(by_node.values())
        self.nodes = len(members)
        self._work = Work(links).traffic(*_counts(members, by_node, links))
        self._bus_gbps = self._work.bits_per_s / (8 * 10**9)
        others = (rank for own in list(members.values())[1:] for rank in own)
        self._added_ns = max((links.hop(rank, ranks[0]).latency_ns for rank in others), default=0)
        declared = [] if self.nodes == 1 else [links.between(node).simple_latency for node in members]
        self._simple_ns = max((own for own in declared if own is not None), default=None)
        self._inside_gbps = Fraction(0)
        if len(ranks) > self.nodes:
            rates = [links.bits_per_s(("intra", own[0], "out")) for own in members.values() if len(own) > 1]
            self._inside_gbps = Fraction(min(rates)) / (8 * 10**9)
        if self.nodes == 1:
            self._channels = max(1, int(self._bus_gbps / generation.channel_gbps))
        else:
            self._channels = interfaces * max(1, -(-self._bus_gbps // (interfaces * INTER_CHANNEL_GBPS)))
        is_switched = links.trainers_per_node > DIRECT and self._inside_gbps > NVLINK_GBPS
        self._methods = _methods(kind, links.environment, self.nodes, is_switched=is_switched and generation.nvls_tree is not None)
        self._protocols = _left(links.environment.get("NCCL_PROTO", ""), PROTOCOLS)

    def choices(self, nbytes: int) -> list[Choice]:
        """Return all choices for ``nbytes`` in every rank's buffer, with the latencies and rates that NCCL expects."""
        bus = self._bus_gbps if self.nodes == 1 else BELIEVED * self._bus_gbps
        pairs = [(method, protocol) for method in self._methods for protocol in self._protocols if _has(method, protocol)]
        return [self._of(method, protocol, nbytes, bus) for method, protocol in pairs or [("ring", "Simple")]]

    def choice(self, nbytes: int) -> Choice:
        """Return the choice that NCCL expects to be the fastest for ``nbytes``."""
        return min(self.choices(self._scale * nbytes), key=lambda choice: choice.total_ns(self._scale * nbytes))

    def cost(self, nbytes: int) -> Cost:
        """Return the time of a collective of ``nbytes`` that has its links to itself."""
        return self._cost(self.choice(nbytes), self._scale * nbytes)

    def route(self, nbytes: int, cost: Cost | None = None) -> Route:
        """Return the time and ports of a collective of ``nbytes``.

        ``cost``: its measured time; by default, the model's time is used.
        """
        choice, total = self.choice(nbytes), self._scale * nbytes
        cost = cost or self._cost(choice, total)
        passes = {"ring": Fraction(self.steps, self._size), "nvls": Fraction(1)}.get(choice.method, 2)
        messages = self.steps if choice.method == "ring" else 0
        return self._work.routed(
            cost, total * passes * WIRE[choice.protocol], taken_in_turns(cost.latency_ns, half_up(cost.transfer_ns), messages)
        )

    @property
    def steps(self) -> int:
        """Number of a ring's steps, in each of which a rank sends a P-th of the buffer."""
        if self._kind == "all_reduce":
            return 2 * (self._size - 1)
        return self._size if self._kind in ("reduce", "broadcast") else self._size - 1

    @property
    def levels(self) -> int:
        """Number of levels of a tree of nodes; 0 for one node."""
        return self.nodes.bit_length() - 1

    def _cost(self, choice: Choice, nbytes: int) -> Cost:
        own = self._of(choice.method, choice.protocol, nbytes, self._bus_gbps)
        latency_ns, transfer_ns = own.latency_ns, nbytes / own.gbps
        if self.nodes > 1 and choice.protocol == "Simple":
            if choice.method == "ring" and self._kind not in ("reduce", "broadcast"):
                base_ns = BASE_NS["ring"][-1]
                own_ns = max(latency_ns - base_ns, self.steps * STEP_NS)
                steps_ns = own_ns if self._simple_ns is None else self.steps * self._simple_ns
                latency_ns = base_ns + max(0, steps_ns - half_up(transfer_ns))
            elif choice.method == "tree" and self._simple_ns is not None:
                latency_ns += 2 * self.levels * max(0, self._simple_ns - self._hop_ns("tree", "Simple"))
        return Cost(latency_ns, transfer_ns)

    def _of(self, method: Method, protocol: Protocol, nbytes: int, bus: Fraction) -> Choice:
        """Return the choice of this method and protocol if ``bus`` GB/s pass between nodes, or inside the only one."""
        if method == "ring":
            return self._ring(protocol, nbytes, bus)
        if method == "tree":
            return self._tree(protocol, nbytes, bus)
        switch = NVLS_SHARE * self._inside_gbps
        if method == "nvls" or self._generation.nvls_tree is None:
            return Choice(method, protocol, NVLS_NS, switch)
        between = min(bus * (2 if self.nodes == 2 else 1), self._channels * _exact(self._generation.nvls_tree[min(self.nodes, 3) - 1]))
        latency_ns = NVLS_NS + 2 * self.levels * (NVLS_NET_NS + 2 * self._added_ns)
        return Choice(method, protocol, latency_ns, min(switch, between * Fraction(self._size, self.steps)))

    def _hop_ns(self, method: Literal["tree", "ring"], protocol: Protocol) -> int:
        """Return the latency in ns of a message between nodes; with one rank per node, a ring has a tree's."""
        own = NET_NS["tree" if self._size == self.nodes else method][PROTOCOLS.index(protocol)]
        return own + (2 if protocol == "Simple" else 1) * self._added_ns

    def _ring(self, protocol: Protocol, nbytes: int, bus: Fraction) -> Choice:
        generation, scale = self._generation, min(self.nodes, 3) - 1
        if protocol == "LL":
            bus = min(_exact(generation.ll_max[scale]), bus / 2)
        elif protocol == "LL128":
            bus = min(bus * _exact(0.92), self._channels * _exact(generation.ring_ll128[scale]))
        return Choice("ring", protocol, self._ring_latency_ns(protocol, nbytes), bus * Fraction(self._size, self.steps))

    def _ring_latency_ns(self, protocol: Protocol, nbytes: int) -> int:
        column = PROTOCOLS.index(protocol)
        is_simple = protocol == "Simple"
        inside_ns, between_ns, base_ns = NVLINK_NS["ring"][column], self._hop_ns("ring", protocol), BASE_NS["ring"][column]
        if self._kind in ("reduce", "broadcast"):
            return base_ns + (inside_ns if self.nodes == 1 else between_ns)
        crossings = 0 if self.nodes == 1 else (2 if self._kind == "all_reduce" else 1) * (self.nodes - 1)
        if self.nodes > 1:
            inside_ns = max(inside_ns, POST_NS * (3 if is_simple else 1))
        latency_ns = base_ns + (self.steps - crossings) * inside_ns + crossings * between_ns
        is_plateau = is_simple and self.nodes > 1 and self._kind == "all_reduce"
        if is_plateau and nbytes >= PLATEAU_BYTES * self._channels * self._size:
            return round(latency_ns * _exact(self._generation.plateau))
        return latency_ns

    def _tree(self, protocol: Protocol, nbytes: int, bus: Fraction) -> Choice:
        generation, scale, column = self._generation, min(self.nodes, 3) - 1, PROTOCOLS.index(protocol)
        twice = 2 if self.nodes == 2 else 1  # each of two nodes is a leaf of one tree and the root of the other
        bus = twice * min(bus * _exact(0.92), self._channels * _exact(generation.tree[scale]))
        if protocol == "LL":
            bus = min(bus / _exact(3.8), _exact(generation.ll_max[scale]))
        elif protocol == "LL128":
            kept = Fraction(7, 9) if self.nodes == 1 else Fraction(120, 128)
            bus = min(bus * kept, twice * self._channels * _exact(generation.tree_ll128[scale]))
        power = max((nbytes >> 6).bit_length() - 1, 0)
        correction = TREE_CORRECTION[protocol]
        if power < len(correction):
            bus *= _exact(correction[power])
        chain = self._size // self.nodes - 1
        latency_ns = BASE_NS["tree"][column] + 2 * (chain * NVLINK_NS["tree"][column] + self.levels * self._hop_ns("tree", protocol))
        return Choice("tree", protocol, latency_ns, bus / 2)


def _methods(kind: Collective, environment: Mapping[str, str], nodes: int, *, is_switched: bool) -> tuple[Method, ...]:
    """Return the methods that NCCL may use for this kind of collective.

    NCCL takes the first of those that are equally fast.
    """
    asked = environment.get("NCCL_ALGO", "")
    nvls = ["nvls" if nodes == 1 else "nvlstree"] if is_switched and environment.get("NCCL_NVLS_ENABLE") != "0" else []
    own = ["ring", "tree", *nvls] if kind == "all_reduce" else ["ring"]
    left = _left(asked, METHODS)
    return tuple(method for method in METHODS if method in own and method in left)


def _left(asked: str, names: tuple[_Name, ...]) -> tuple[_Name, ...]:
    """Return those of ``names`` that ``asked`` allows: those that it lists, or after ``^`` all others.

    ``asked`` is the value of ``NCCL_ALGO`` or ``NCCL_PROTO``. With a list per function (``allreduce:ring``),
    it allows all.
    """
    words = asked.lower().removeprefix("^").split(",")
    if not asked or ":" in asked:
        return names
    return tuple(name for name in names if (name.lower() in words) != asked.startswith("^"))


def _has(method: Method, protocol: Protocol) -> bool:
    """Whether NCCL has this method with this protocol."""
    return method in ("ring", "tree") or protocol == "Simple"


def _counts(members: Mapping[int, list[int]], interfaces: Mapping[int, int], links: Links) -> tuple[dict[Port, int], Fraction]:
    """Return how often a share of the collective's bytes passes each port, and that share.

    All bytes pass every rank, node and rack once. ``members``: ranks of each node. ``interfaces``: number of
    interfaces that each node's ranks use; they carry equal parts.
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
    for kind in links.areas:
        areas = {links.area(kind, node) for node in members}
        if len(areas) > 1:
            found |= {(kind, area, way): parts for area in areas for way in ("out", "in")}
    return found, Fraction(1, parts)


def _exact(value: float) -> Fraction:
    """Return the decimal as which a constant above is written, not the double next to it."""
    return Fraction(repr(value))
