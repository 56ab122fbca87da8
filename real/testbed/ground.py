"""Testbed: a cluster's network, built on this machine and verified; and how a worker enters its host."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from fleetbench.cluster import Cluster
from real.testbed import link_shaping, noise, traffic
from real.testbed.network import Network, is_rootless
from real.testbed.topology import INTERFACE, topology_of, unrealised, wire_s
from real.testbed.verify import SECONDS, SKIP_S, Flow, LinkRate, verify

_SENTINEL_ROUND_S = 0.1
_SENTINEL_ROUNDS = 9


class Testbed:
    """The hosts and links of one cluster, on this machine.

    A context manager. States: new; open, with everything built, inside the ``with``; gone, after it,
    and just as well when this process dies. Raises ``ConfigError`` for a cluster without links,
    ``EnvironmentLacks`` where the machine has no namespaces for us.
    """

    environment: ClassVar = {"GLOO_SOCKET_IFNAME": INTERFACE}
    """What the workers' environment must say."""

    def __init__(self, cluster: Cluster) -> None:
        self.topology = topology_of(cluster)
        self.links: list[LinkRate] = []
        """What ``verify`` has found."""
        self._cluster = cluster
        self._network: Network | None = None
        self._refused: list[dict[str, str]] = []
        self._delays = True

    def __enter__(self) -> Self:
        self._network = Network([*self.topology.switches, *self.topology.hosts])
        try:
            entries = self.apply([*link_shaping.steer(self.topology, os.cpu_count() or 1), *link_shaping.build(self.topology)])
            undelayed = self.apply(link_shaping.delay(self.topology.wires))
        except BaseException:
            self.close()
            raise
        self._delays = not undelayed
        self._refused = _gathered([*entries, *undelayed])
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take everything down."""
        if self._network is not None:
            self._network.close()
            self._network = None

    @property
    def _open(self) -> Network:
        assert self._network is not None, "the testbed is not open"
        return self._network

    def command(self, program: Sequence[str], hosts: Sequence[str] | None = None) -> list[str]:
        """A command that enters the host of its RANK and becomes ``program``; where ``hosts`` is one alone, that one.

        ``hosts`` by rank; by default the trainers are where the cluster places them.
        """
        if hosts is None:
            hosts = [self.topology.host_of(rank) for rank in range(self._cluster.trainers)]
        return [sys.executable, "-P", "-m", "real.testbed.network", ",".join(map(self._open.path, hosts)), *program]

    def verify(self) -> list[LinkRate]:
        """Measure every link each way and keep the findings. Raises ``EnvironmentLacks`` for one that is off."""
        self.links = verify(self.topology, self.rates)
        return self.links

    def rates(self, flows: Sequence[Flow]) -> list[float]:
        """Payload in bit/s of TCP flows that run at once."""
        skip_s = max(SKIP_S, 1.2 * link_shaping.settling_s(self.topology.slowest_bps))
        return traffic.rates(self._open.inside, flows, skip_s=skip_s, seconds=SECONDS)

    def apply(self, steps: Sequence[link_shaping.Step]) -> list[dict[str, str]]:
        """Carry out steps; the optional ones that were refused. Raises ``EnvironmentLacks`` for one that is not optional."""
        return self._open.apply(steps)

    def sentinel(self) -> float:
        """Seconds of a fixed ring over all hosts, about a tenth: the median of nine."""
        hosts = self.topology.hosts
        nbytes = _SENTINEL_ROUND_S / wire_s(1_000_000, len(hosts), self.topology.slowest_bps) * 1_000_000
        places = [(host, self.topology.address(host)) for host in hosts]
        times = traffic.ring(self._open.inside, places, chunk_bytes=round(nbytes / len(hosts)), rounds=_SENTINEL_ROUNDS)
        return statistics.median(times)

    def read(self) -> noise.Reading:
        """The machine's load and the hosts' TCP counters now."""
        return noise.read(self._open.counters())

    def skipped(self) -> list[dict[str, str]]:
        """What the cluster declares and this testbed does not have."""
        return unrealised(self._cluster, latency=self._delays)

    def record(self) -> dict[str, Any]:
        """What was built, and how it was verified: plain data."""
        return {
            "hosts": self.topology.num_hosts,
            "rootless": is_rootless(),
            "shaping": {
                "tbf_burst_bytes": link_shaping.BURST_BYTES,
                "tbf_limit": link_shaping.LIMIT,
                "peak_over_rate": link_shaping.PEAK,
                "gso_max_size": link_shaping.SEGMENT_BYTES,
                "congestion_control": self._open.congestion_control(),
            },
            "refused": self._refused,
            "links": [rate.to_dict() for rate in self.links],
        }


def _gathered(refused: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """One entry a reason, however many namespaces met it."""
    found: dict[tuple[str, str], list[str]] = {}
    for entry in refused:
        found.setdefault((entry["what"], entry["why"]), []).append(entry["namespace"])
    return [{"what": what, "why": why, "namespaces": " ".join(dict.fromkeys(names))} for (what, why), names in found.items()]
