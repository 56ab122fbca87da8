"""Testbed: the driver's side. Builds a cluster's network, verifies it, and says how a worker enters its host."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from fleetbench.cluster import Cluster
from fleetbench.errors import EnvironmentLacks
from real.testbed import commands, noise
from real.testbed.json_lines import Child, Ended, Silent, answers
from real.testbed.keeper import TOOL_PATH
from real.testbed.topology import INTERFACE, Topology, Wire, topology_of, unrealised, wire_s
from real.testbed.verify import SECONDS, SKIP_S, Flow, LinkRate, verify

_SENTINEL_ROUND_S = 0.1
_SENTINEL_ROUNDS = 9
_START_S = 20.0
_END_S = 5.0


class Keeper:
    """A running keeper. States: running, from the constructor on; ended, after ``close``.

    Raises ``EnvironmentLacks`` where this machine has no namespaces for us, or lacks the tools.
    """

    def __init__(self, log: Path, *, rootless: bool | None = None) -> None:
        """``rootless``: in a user namespace; by default only where it does not go without."""
        self._log = log
        tools = {tool: shutil.which(tool, path=TOOL_PATH) for tool in ("ip", "tc", "unshare")}
        for tool, path in tools.items():
            if path is None:
                raise _lacking(f"the testbed needs {tool}, and it is not installed")
        tries = [rootless] if rootless is not None else [False, True] if os.geteuid() == 0 else [True]
        reason = ""
        for without in tries:
            self.rootless = bool(without)
            user = ["--user", "--map-root-user"] if without else []
            program = [sys.executable, "-P", "-m", "real.testbed.keeper"]
            self._child = Child([str(tools["unshare"]), *user, "--mount", "--net", *program], log)
            self.pid = self._child.process.pid
            try:
                self._reply(_START_S)
            except EnvironmentLacks as error:
                reason = error.what  # the log has what was said before, too
                self.close()
            except BaseException:
                self.close()
                raise
            else:
                return
        raise _lacking(f"no network namespace can be made: {reason}")

    def ask(self, request: str, *, within_s: float = 60.0, **arguments: Any) -> Any:
        """Have ``Network`` do something, and wait for what it returns. Raises ``EnvironmentLacks`` where it was refused."""
        self._child.tell({"do": request, **arguments})
        reply = self._reply(within_s)
        if "error" in reply:
            raise _lacking(reply["error"])
        return reply["answer"]

    def close(self) -> None:
        """End the keeper, and with it all that it holds; returns when it is gone."""
        self._child.end(_END_S)

    def _reply(self, within_s: float) -> dict[str, Any]:
        try:
            (reply,) = answers([self._child], within_s)
        except Silent:
            what = "the testbed's keeper does not answer"
            raise EnvironmentLacks(what, "run.launcher", "'testbed'", f"its log: {self._log}") from None
        except Ended:
            said = self._log.read_text(encoding="utf-8", errors="replace").strip()[-500:]
            raise _lacking(f"the testbed's keeper has ended: {said or 'it said nothing'}") from None
        assert isinstance(reply, dict)
        return reply


def _lacking(what: str) -> EnvironmentLacks:
    hint = "needs Linux with network namespaces, as root or with user namespaces allowed, ip and tc of iproute2, and unshare of util-linux"
    return EnvironmentLacks(what, "run.launcher", "'testbed'", hint)


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
        return [sys.executable, "-P", "-m", "real.testbed.namespaces", str(path), *program]

    def verify(self) -> list[LinkRate]:
        """Measure every link each way and keep the findings. Raises ``EnvironmentLacks`` for one that is off."""
        self.links = verify(self.topology, self.rates)
        return self.links

    def rates(self, flows: Sequence[Flow]) -> list[float]:
        """Payload in bit/s of TCP flows that run at once."""
        skip_s = max(SKIP_S, 1.2 * commands.settling_s(self.topology.slowest_bps))
        plain = [list(flow) for flow in flows]
        found: list[float] = self._held.ask("rates", within_s=60.0 + skip_s, flows=plain, skip_s=skip_s, seconds=SECONDS)
        return found

    def reshape(self, rate_bps: int) -> None:
        """Give every link another rate; only connections that are made afterwards follow the model."""
        wires = tuple(Wire(lower=wire.lower, upper=wire.upper, rate_bps=rate_bps) for wire in self.topology.wires)
        self.topology = dataclasses.replace(self.topology, wires=wires)
        self.apply(commands.shape(wires))

    def apply(self, steps: Sequence[commands.Step]) -> list[dict[str, str]]:
        """Carry out steps; the optional ones that were refused. Raises ``EnvironmentLacks`` for one that is not optional."""
        refused: list[dict[str, str]] = self._held.ask("apply", steps=[dataclasses.asdict(step) for step in steps])
        return refused

    def sentinel(self) -> float:
        """Seconds of a fixed ring over all hosts, about a tenth: the median of nine."""
        hosts = self.topology.hosts
        nbytes = _SENTINEL_ROUND_S / wire_s(1_000_000, len(hosts), self.topology.slowest_bps) * 1_000_000
        places = [[host, self.topology.address(host)] for host in hosts]
        times: list[float] = self._held.ask("ring", hosts=places, chunk_bytes=round(nbytes / len(hosts)), rounds=_SENTINEL_ROUNDS)
        return statistics.median(times)

    def read(self) -> noise.Reading:
        """The machine's load and the hosts' TCP counters now."""
        return noise.read(self._held.ask("counters"))

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
        self._files = keeper.ask("add", names=[*self.topology.switches, *self.topology.hosts])
        entries = self.apply([*commands.steer(self.topology, os.cpu_count() or 1), *commands.build(self.topology)])
        undelayed = self.apply(commands.delay(self.topology.wires))
        self._delays = not undelayed
        self._refused = _gathered([*entries, *undelayed])
        self._congestion_control = keeper.ask("congestion_control")


def _gathered(refused: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """One entry a reason, however many namespaces met it."""
    found: dict[tuple[str, str], list[str]] = {}
    for entry in refused:
        found.setdefault((entry["what"], entry["why"]), []).append(entry["namespace"])
    return [{"what": what, "why": why, "namespaces": " ".join(dict.fromkeys(names))} for (what, why), names in found.items()]
