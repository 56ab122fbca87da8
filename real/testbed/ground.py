"""Testbed: the driver's side. Builds a cluster's network, verifies it, and says how a worker enters its host."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from fleetbench.cluster import Cluster
from real.testbed import commands, noise
from real.testbed.client import Keeper
from real.testbed.fit import wire_s
from real.testbed.topology import INTERFACE, Topology, Wire, topology_of, unrealised
from real.testbed.verify import SECONDS, SKIP_S, Flow, LinkRate, verify

_SENTINEL_ROUND_S = 0.1
_SENTINEL_ROUNDS = 9


class Testbed:
    """The hosts and links of one cluster, on this machine.

    A context manager. States: new; open, with everything built, inside the ``with``; gone, behind it,
    and just as well when this process dies. Raises ``ConfigError`` for a cluster without links,
    ``EnvironmentLacks`` where the machine has no namespaces or the keeper fails.
    """

    def __init__(self, cluster: Cluster, folder: Path, *, rootless: bool | None = None) -> None:
        """``folder``: where files of this testbed go; ``rootless``: in a user namespace, by default only where it must be."""
        self.topology: Topology = topology_of(cluster)
        self.links: list[LinkRate] = []
        """What ``verify`` has found."""
        self._cluster = cluster
        self._folder = folder
        self._wants_rootless = rootless
        self._keeper: Keeper | None = None
        self._files: dict[str, int] = {}
        self._commands = 0
        self._refused: list[dict[str, str]] = []
        self._delays = True
        self._congestion_control = ""

    def __enter__(self) -> Self:
        self._keeper = Keeper(self._folder / "keeper.log", rootless=self._wants_rootless)
        try:
            self._build(self._keeper)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take everything down."""
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None

    @property
    def rootless(self) -> bool:
        """Whether it lives in a user namespace."""
        return self._held.rootless

    @property
    def environment(self) -> dict[str, str]:
        """What the workers' environment must say."""
        return {"GLOO_SOCKET_IFNAME": INTERFACE}

    @property
    def _held(self) -> Keeper:
        assert self._keeper is not None, "the testbed is not open"
        return self._keeper

    def command(self, program: Sequence[str], hosts: Sequence[str] | None = None) -> list[str]:
        """A command that enters the host of its RANK and becomes ``program``; where ``hosts`` is one alone, that one.

        ``hosts`` by rank; by default the trainers are where the cluster places them.
        """
        if hosts is None:
            hosts = [self.topology.host_of(rank) for rank in range(self._cluster.trainers)]
        path = self._folder / f"hosts-{self._commands}.json"
        self._commands += 1
        plan = {"keeper": self._held.pid, "rootless": self.rootless, "files": [self._files[host] for host in hosts]}
        path.write_text(json.dumps(plan), encoding="utf-8")
        return [sys.executable, "-P", "-m", "real.testbed.enter", str(path), *program]

    def verify(self) -> list[LinkRate]:
        """Measure every link each way and keep the findings. Raises ``EnvironmentLacks`` for one that is off."""
        self.links = verify(self.topology, self.rates)
        return self.links

    def rates(self, flows: Sequence[Flow]) -> list[float]:
        """Payload in bit/s of TCP flows that run at once."""
        skip_s = max(SKIP_S, 1.2 * commands.settling_s(self.topology.slowest_bps))
        plain = [list(flow) for flow in flows]
        found: list[float] = self._held.ask("rates", within_s=60.0 + skip_s, flows=plain, skip_s=skip_s, seconds=SECONDS)["bps"]
        return found

    def reshape(self, rate_bps: int) -> None:
        """Give every link another rate; only connections that are made afterwards follow the model."""
        wires = tuple(Wire(lower=wire.lower, upper=wire.upper, rate_bps=rate_bps) for wire in self.topology.wires)
        self.topology = dataclasses.replace(self.topology, wires=wires)
        self._held.ask("apply", steps=[step.to_dict() for step in commands.shape(wires)])

    def sentinel(self) -> float:
        """Seconds of a fixed ring over all hosts, about a tenth: the median of nine."""
        hosts = self.topology.hosts
        nbytes = _SENTINEL_ROUND_S / wire_s(1_000_000, len(hosts), self.topology.slowest_bps) * 1_000_000
        places = [[host, self.topology.address(host)] for host in hosts]
        times: list[float] = self._held.ask("ring", hosts=places, chunk_bytes=round(nbytes / len(hosts)), rounds=_SENTINEL_ROUNDS)[
            "times_s"
        ]
        return statistics.median(times)

    def read(self) -> noise.Reading:
        """The machine's load and the hosts' TCP counters now."""
        return noise.read(self._held.ask("counters")["counters"])

    def skipped(self) -> list[dict[str, str]]:
        """What the cluster declares and this testbed does not have."""
        return unrealised(self._cluster, latency=self._delays)

    def record(self) -> dict[str, Any]:
        """What was built, and how it was verified: plain data."""
        return {
            "hosts": self.topology.num_hosts,
            "rootless": self.rootless,
            "shaping": {
                "tbf_burst_bytes": commands.BURST_BYTES,
                "tbf_limit": commands.LIMIT,
                "peak_over_rate": commands.PEAK,
                "gso_max_size": commands.SEGMENT_BYTES,
                "congestion_control": self._congestion_control,
            },
            "refused": self._refused,
            "links": [rate.to_dict() for rate in self.links],
        }

    def _build(self, keeper: Keeper) -> None:
        cores = os.cpu_count() or 1

        def refused(steps: Sequence[commands.Step]) -> list[dict[str, str]]:
            found: list[dict[str, str]] = keeper.ask("apply", steps=[step.to_dict() for step in steps])["refused"]
            return found

        self._files = keeper.ask("add", names=[*self.topology.switches, *self.topology.hosts])["files"]
        unsteered = refused(commands.steer(self.topology, cores))
        entries = refused(commands.build(self.topology))
        if unsteered:
            entries += refused(commands.steer_devices(self.topology, cores))
        undelayed = refused(commands.delay(self.topology.wires))
        self._delays = not undelayed
        self._refused = _gathered([*entries, *undelayed])
        self._congestion_control = keeper.ask("congestion_control")["congestion_control"]


def _gathered(refused: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """One entry a reason, however many namespaces met it."""
    found: dict[tuple[str, str], list[str]] = {}
    for entry in refused:
        found.setdefault((entry["what"], entry["why"]), []).append(entry["namespace"])
    return [{"what": what, "why": why, "namespaces": " ".join(dict.fromkeys(names))} for (what, why), names in found.items()]
