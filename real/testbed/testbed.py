"""Testbed: a cluster's network, built on this machine, verified, and watched during measurements.

Verification measures the payload rate of every wire in each direction by a plain TCP transfer between its two
ends. All wires are measured at once, first upwards, then downwards, as a collective uses them. If one is off,
all are measured again, because something else may have run.
"""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar

from fleetbench.cluster import Cluster
from fleetbench.errors import ConfigError, EnvironmentLacks
from fleetbench.experiment import Experiment
from fleetbench.quantities import format_bandwidth
from fleetbench.result import skip
from real.testbed import latency_relay, link_shaping, noise, traffic
from real.testbed.network import Network
from real.testbed.topology import INTERFACE, PAYLOAD_SHARE, Topology, num_hosts, topology_of, unrealised
from real.testbed.traffic import Flow

T = TypeVar("T")
TOLERANCE = 0.03
LATENCY_TOLERANCE, LATENCY_TOLERANCE_S = 0.02, 0.0003
"""Tolerance of a round trip's time: a share of the declared time, plus seconds in which processors wake up."""
ROUND_TRIPS = 20
SKIP_S = 0.5
SECONDS = 1.0
_AGAIN = 2
"""Number of repeats if a wire is off."""
_SENTINEL_ROUND_S = 0.1
_SENTINEL_ROUNDS = 9
_OWN_VARIABLE = "GLOO_SOCKET_IFNAME"


class Testbed:
    """The hosts and links of one cluster, on this machine.

    It is a context manager. States: new; open, with everything built, inside the ``with``; gone after it, and
    also when this process dies. Raises ``ConfigError`` for a cluster without links, and ``EnvironmentLacks``
    if the machine does not allow namespaces.
    """

    environment: ClassVar = {_OWN_VARIABLE: INTERFACE}
    """Environment variables that workers need."""

    def __init__(self, cluster: Cluster) -> None:
        self.topology = topology_of(cluster)
        self.links: list[LinkRate] = []
        self.round_trips: list[dict[str, Any]] = []
        """Round trips that ``verify`` has measured."""
        self._cluster = cluster
        self._network: Network | None = None
        self._refused: list[dict[str, str]] = []
        self._relay: subprocess.Popen[bytes] | None = None
        self._delays = True
        self._trial: noise.Trial[Any] | None = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Build the network, and start the relay if links have a latency."""
        self._network = Network([*self.topology.switches, *self.topology.hosts])
        try:
            self._refused = self.apply([*link_shaping.steer(self.topology, os.cpu_count() or 1), *link_shaping.build(self.topology)])
            if delays := self.topology.delays():
                self._refused += self._delay(delays)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the relay, and remove the network."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
            self._relay = None
        if self._network is not None:
            self._network.close()
            self._network = None

    def _delay(self, delays: Mapping[str, Mapping[str, int]]) -> list[dict[str, str]]:
        """Start the relay that delays packets; return notes on what the kernel refused."""
        try:
            self._relay = latency_relay.start(self._built.inside, INTERFACE, delays)
        except OSError as error:
            self._delays = False
            return [{"what": "latency (/dev/net/tun)", "why": error.strerror or str(error)}]
        self.apply(link_shaping.delay(self.topology, latency_relay.DEVICE))
        try:
            os.sched_setscheduler(self._relay.pid, os.SCHED_RR, os.sched_param(1))
        except PermissionError as error:
            return [{"what": "packets in time (a real-time priority for the relay)", "why": str(error)}]
        return []

    @property
    def _built(self) -> Network:
        assert self._network is not None, "the testbed is not open"
        return self._network

    def command(self, program: Sequence[str], hosts: Sequence[str] | None = None) -> list[str]:
        """Return a command that enters the host of its RANK and becomes ``program``.

        ``hosts``: host of each rank, or a single one for all ranks. By default, trainers are where the cluster
        places them.
        """
        if hosts is None:
            hosts = [self.topology.host_of(rank) for rank in range(self._cluster.trainers)]
        return self._built.command(hosts, program)

    def run(self, measure: Callable[[], T]) -> T:
        """Measure, and repeat if the machine was not quiet.

        ``summary`` and ``record`` describe the last measurement.
        """
        self._trial = trial = noise.quietly(self, measure)
        return trial.value

    def verify(self) -> list[LinkRate]:
        """Measure every link in each direction and keep the results.

        Raises ``EnvironmentLacks`` for a link whose rate or latency differs from its declaration.
        """
        self.links = verify(self.topology, self.rates)
        if self._relay is not None:
            self.round_trips = self._latency_as_declared(self._relay)
        return self.links

    def _latency_as_declared(self, relay: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
        """Shorten the relay's delays by this machine's own latency, and check up to 1 + ``_AGAIN`` times."""
        measure = functools.partial(traffic.round_trips, self._built.inside)
        assert relay.stdin is not None
        trips = round_trips(self.topology, measure)
        for left in range(_AGAIN, -1, -1):
            relay.stdin.write(b"%d\n" % own_latency_ns(trips))
            relay.stdin.flush()
            trips = round_trips(self.topology, measure)
            try:
                return verify_latency(trips)
            except LinkOff:
                if not left:
                    raise
        raise AssertionError("the last look returns or raises")

    def rates(self, flows: Sequence[Flow]) -> list[float]:
        """Return the payload rate of each TCP flow in bit/s while all run at once."""
        # ten round trips: a thousand times TCP's first window
        slow_start_s = 20e-9 * max(wire.latency_ns for wire in self.topology.wires)
        skip_s = max(SKIP_S, 1.2 * link_shaping.settling_s(self.topology.slowest_bps)) + slow_start_s
        return traffic.rates(self._built.inside, flows, skip_s=skip_s, seconds=SECONDS, bounded=self._relay is None)

    def apply(self, steps: Sequence[link_shaping.Step]) -> list[dict[str, str]]:
        """Run steps, and return the optional ones that were refused.

        Raises ``EnvironmentLacks`` if any other step is refused.
        """
        return self._built.apply(steps)

    def sentinel(self) -> float:
        """Return the median time in s of nine rounds of fixed transfers over all hosts; each takes about 0.1 s."""
        nbytes = round(_SENTINEL_ROUND_S * self.topology.slowest_bps * PAYLOAD_SHARE / 8)
        places = [(host, self.topology.address(host)) for host in self.topology.hosts]
        return statistics.median(traffic.ring(self._built.inside, places, nbytes=nbytes, rounds=_SENTINEL_ROUNDS))

    def read(self) -> noise.Reading:
        """Return the machine's load and the hosts' TCP counters now.

        Raises ``EnvironmentLacks`` if the relay has ended, so packets no longer arrive.
        """
        if self._relay is not None and (code := self._relay.poll()) is not None:
            hint = "stderr shows the reason; is memory short?"
            raise EnvironmentLacks("the process that delays packets has ended", "testbed relay", f"exit code {code}", hint)
        return noise.read(self._built.counters())

    def skipped(self) -> list[dict[str, str]]:
        """Return entries of ``skipped``: missing features, and why the last measurement is void."""
        entries = unrealised(self._cluster, latency=self._delays)
        if self._trial is not None and not self._trial.counts:
            tries = len(self._trial.blocks)
            entries.append(skip("testbed.quiet", f"measured {tries} times, void each time: {'; '.join(self._trial.blocks[-1].void)}"))
        return entries

    def summary(self) -> dict[str, Any] | None:
        """Return the short record of the last measurement, for ``summary.json``."""
        if self._trial is None:
            return None
        block = self._trial.blocks[-1]
        return {
            "hosts": self.topology.num_hosts,
            "largest_link_error": max((abs(rate.error) for rate in self.links), default=None),
            "counts": self._trial.counts,
            "void_runs": self._trial.num_void,
            **asdict(block.noise),
            "sentinel_moved": block.moved,
        }

    def record(self) -> dict[str, Any]:
        """Return the verification and all tries of the last measurement, for ``testbed.json``."""
        return {
            "schema": 1,
            "refused": self._refused,
            "links": [asdict(rate) for rate in self.links],
            "round_trips": self.round_trips,
            **(self.summary() or {}),
            "blocks": [] if self._trial is None else [asdict(block) for block in self._trial.blocks],
        }


def testbed_of(experiment: Experiment) -> Testbed | None:
    """Return the testbed that the experiment's launcher asks for.

    Returns ``None`` for every other launcher, and for one host, which has no link. Raises ``ConfigError`` if
    no testbed can be built from the experiment.
    """
    run = experiment.run
    if run.launcher != "testbed":
        return None
    if run.backend != "gloo":
        raise ConfigError("the testbed's links carry gloo", "run.backend", repr(run.backend), 'set run.backend = "gloo"')
    if _OWN_VARIABLE in run.environment:
        where, value = f"run.environment.{_OWN_VARIABLE}", run.environment[_OWN_VARIABLE]
        raise ConfigError("is set by the testbed: every host has one interface", where, repr(value), "leave it out")
    return Testbed(experiment.cluster) if num_hosts(experiment.cluster) > 1 else None


Direction = Literal["up", "down"]
Measure = Callable[[Sequence[Flow]], Sequence[float]]
"""Function that returns the payload rate of each flow in bit/s while all run at once."""


class LinkOff(EnvironmentLacks):
    """A link differs from its declaration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """One direction of a wire, as declared and as measured."""

    link: str
    """Lower end of the wire: a host, or the switch of a rack or site."""
    direction: Direction
    """Direction: ``up`` is from the host towards the others."""
    declared_bps: int
    """Declared rate of Ethernet frames in bit/s."""
    expected_payload_bps: int
    """Payload in bit/s that the declared rate carries."""
    measured_payload_bps: int
    """Measured TCP payload in bit/s."""
    error: float
    """Measured over expected payload, minus one."""


def verify(topology: Topology, measure: Measure) -> list[LinkRate]:
    """Check every wire in each direction.

    Raises ``LinkOff`` for the one that is furthest off, with its declared and measured rate.
    """
    found = []
    for direction in ("up", "down"):
        for _ in range(1 + _AGAIN):
            rates = _measured(topology, direction, measure)
            worst = max(rates, key=lambda rate: abs(rate.error))
            if abs(worst.error) <= TOLERANCE:
                break
        else:
            raise LinkOff(
                f"the link of {worst.link} differs from its declaration: {direction}wards, {format_bandwidth(worst.declared_bps)} carry "
                f"{_spell(worst.expected_payload_bps)} of payload, and it is off by {100 * worst.error:+.1f} % "
                f"(at most {100 * TOLERANCE:.0f} %)",
                f"testbed link {worst.link}, {direction}",
                _spell(worst.measured_payload_bps),
                f"is something else running? are {len(rates)} links at once more than this machine carries? "
                "else declare slower links and slower compute: only their ratio matters",
            )
        found += rates
    return sorted(found, key=lambda rate: [wire.lower for wire in topology.wires].index(rate.link))


def round_trips(topology: Topology, measure: Callable[[Flow, int], Sequence[float]]) -> list[dict[str, Any]]:
    """Send a byte from each host to the next and back, one host after the other.

    ``measure``: returns the seconds of each of a number of round trips over a flow. Each result has the two hosts,
    ``declared_s``, which is the latency there and back, and ``measured_s``, the median.
    """
    found = []
    for source, target in zip(topology.hosts, (*topology.hosts[1:], topology.hosts[0]), strict=True):
        declared_s = 1e-9 * (topology.latency_ns(source, target) + topology.latency_ns(target, source))
        if declared_s:
            measured_s = statistics.median(measure((source, target, topology.address(target)), ROUND_TRIPS))
            found.append({"source": source, "target": target, "declared_s": declared_s, "measured_s": measured_s})
    return found


def own_latency_ns(trips: Sequence[Mapping[str, Any]]) -> int:
    """Return the ns that a message takes in addition to its latency, because processors have to wake up."""
    excess_s: list[float] = [trip["measured_s"] - trip["declared_s"] for trip in trips]
    return round(5e8 * statistics.median(excess_s))


def verify_latency(trips: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the round trips. Raises ``LinkOff`` for the first link that is off."""
    for trip in trips:
        declared_s, measured_s = trip["declared_s"], trip["measured_s"]
        if abs(measured_s - declared_s) > LATENCY_TOLERANCE * declared_s + LATENCY_TOLERANCE_S:
            raise LinkOff(
                f"the latency between {trip['source']} and {trip['target']} differs from its declaration: the declared round trip is "
                f"{1e3 * declared_s:.4g} ms",
                f"testbed link {trip['source']}, {trip['target']}",
                f"{1e3 * measured_s:.4g} ms",
                "is something else running? a delayed packet needs a processor when it is due",
            )
    return trips


def _measured(topology: Topology, direction: Direction, measure: Measure) -> list[LinkRate]:
    """Measure the rates of all wires at once."""
    ends = [(wire.lower, wire.upper) if direction == "up" else (wire.upper, wire.lower) for wire in topology.wires]
    found = []
    for wire, measured in zip(topology.wires, measure([(*end, topology.address(end[1])) for end in ends]), strict=True):
        declared = wire.rate_bps if direction == "up" else wire.down_bps
        expected = declared * PAYLOAD_SHARE
        found.append(
            LinkRate(
                link=wire.lower,
                direction=direction,
                declared_bps=declared,
                expected_payload_bps=round(expected),
                measured_payload_bps=round(measured),
                error=measured / expected - 1.0,
            )
        )
    return found


def _spell(bps: float) -> str:
    return f"{bps * 1e-6:.4g} Mbit/s"
