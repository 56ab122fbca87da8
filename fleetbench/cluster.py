"""Cluster: what the simulator believes about machines and links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fleetbench.config import Config
from fleetbench.errors import ConfigError
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.stragglers import Straggler


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Config):
    """One direction of a link. ``latency`` is per message."""

    bandwidth: BitsPerSecond
    latency: Nanoseconds = Nanoseconds(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Racks(Config):
    """Nodes share an uplink that carries 1 / ``oversubscription`` of their bandwidth."""

    nodes: int
    oversubscription: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOverride(Config):
    """What is different about some nodes."""

    nodes: tuple[int, ...]
    inter: Link | None = None
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Config):
    """Nodes of trainers, their links, and what makes trainers late.

    A link that is not declared is the one the profile measured in the training loop.
    """

    nodes: int = 1
    trainers_per_node: int = 1
    """One process (one GPU) each; node = rank // trainers_per_node."""
    servers: int = 0
    server_placement: Literal["own", "shared"] = "own"
    nics_per_node: int = 1
    """``inter`` is the bandwidth of one; a trainer uses the NIC local_rank % nics_per_node."""
    intra: Link | None = None
    """Per trainer, inside a node, each way."""
    inter: Link | None = None
    """Per node, between nodes, each way."""
    cores_per_node: int = 16
    racks: Racks | None = None
    node_overrides: tuple[NodeOverride, ...] = ()
    stragglers: tuple[Straggler, ...] = ()

    @property
    def trainers(self) -> int:
        """Number of trainers, the world size."""
        return self.nodes * self.trainers_per_node

    def _validate(self) -> None:
        for name in ("nodes", "trainers_per_node", "nics_per_node", "cores_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError("must be at least 1", name, repr(getattr(self, name)))
        if self.servers < 0:
            raise ConfigError("cannot be negative", "servers", repr(self.servers))
        for override in self.node_overrides:
            for node in override.nodes:
                if not 0 <= node < self.nodes:
                    raise ConfigError("no such node", "node_overrides", repr(node), f"nodes are 0 to {self.nodes - 1}")
        for index, entry in enumerate(self.stragglers):
            where = f"stragglers[{index}]"
            for rank in getattr(entry, "ranks", ()):
                if not 0 <= rank < self.trainers:
                    raise ConfigError("no such rank", where, repr(rank), f"ranks are 0 to {self.trainers - 1}")
            for node in getattr(entry, "nodes", ()):
                if not 0 <= node < self.nodes:
                    raise ConfigError("no such node", where, repr(node), f"nodes are 0 to {self.nodes - 1}")
