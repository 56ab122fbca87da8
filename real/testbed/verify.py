"""Verify: what every wire carries, each way, measured by a plain TCP transfer between its two ends.

All wires are measured at once, first upwards, then downwards, which is also what a collective asks of
the machine. Where one is off they are measured again, because something else may have run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fleetbench.errors import EnvironmentLacks
from fleetbench.quantities import format_bandwidth
from real.testbed.topology import PAYLOAD_SHARE, Topology
from real.testbed.traffic import Flow

TOLERANCE = 0.03
LATENCY_TOLERANCE, LATENCY_TOLERANCE_S = 0.02, 0.0003
"""Of a round trip: a part of it, and seconds in which processors wake up."""
ROUND_TRIPS = 15
SKIP_S = 0.5
SECONDS = 1.0
_AGAIN = 2
"""Where a wire is off, all are measured so often again before it is believed."""

Direction = Literal["up", "down"]
Measure = Callable[[Sequence[Flow]], Sequence[float]]
"""Payload in bit/s of flows that run at once."""


MeasureRoundTrips = Callable[[Flow, int], Sequence[float]]
"""Seconds of so many round trips of a byte."""


class LinkOff(EnvironmentLacks):
    """A link does not carry what was declared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """One direction of a wire, as declared and as measured."""

    link: str
    """The wire's lower end: a host, or a rack's switch."""
    direction: Direction
    """``up``: from the host towards the others."""
    declared_bps: int
    """Of Ethernet frames."""
    measured_bps: float
    """Of TCP payload."""

    @property
    def expected_bps(self) -> float:
        """Payload of the declared rate."""
        return self.declared_bps * PAYLOAD_SHARE

    @property
    def error(self) -> float:
        """Measured over expected, minus one."""
        return self.measured_bps / self.expected_bps - 1.0

    @property
    def is_off(self) -> bool:
        """Whether it is further from what was declared than the tolerance."""
        return abs(self.error) > TOLERANCE

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
        return {
            "link": self.link,
            "direction": self.direction,
            "declared_bps": self.declared_bps,
            "expected_payload_bps": round(self.expected_bps),
            "measured_payload_bps": round(self.measured_bps),
            "error": self.error,
        }


def verify(topology: Topology, measure: Measure) -> list[LinkRate]:
    """Every wire each way. Raises ``LinkOff`` for the one that is furthest off, with its declared and measured rate."""
    found = []
    for direction in ("up", "down"):
        for _ in range(1 + _AGAIN):
            rates = _measured(topology, direction, measure)
            worst = max(rates, key=lambda rate: abs(rate.error))
            if not worst.is_off:
                break
        else:
            raise LinkOff(
                f"the link of {worst.link} is not as declared: {direction}wards, {format_bandwidth(worst.declared_bps)} carry "
                f"{_spell(worst.expected_bps)} of payload, and it is off by {100 * worst.error:+.1f} % (at most {100 * TOLERANCE:.0f} %)",
                f"testbed link {worst.link}, {direction}",
                _spell(worst.measured_bps),
                f"is something else running? are {len(rates)} links at once more than this machine carries? "
                "else declare slower links and slower compute: only their ratio matters",
            )
        found += rates
    return sorted(found, key=lambda rate: [wire.lower for wire in topology.wires].index(rate.link))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """A byte there and back between two hosts."""

    source: str
    target: str
    declared_s: float
    """Twice the latency."""
    measured_s: float
    """The least of several."""


def verify_latency(topology: Topology, measure: MeasureRoundTrips) -> list[RoundTrip]:
    """From each host to the next, one after the other. Raises ``LinkOff`` for the first that is off."""
    found = []
    for source, target in zip(topology.hosts, (*topology.hosts[1:], topology.hosts[0]), strict=True):
        declared_s = 2e-9 * topology.latency_ns(source, target)
        if not declared_s:
            continue
        measured_s = min(measure((source, target, topology.address(target)), ROUND_TRIPS))
        if abs(measured_s - declared_s) > LATENCY_TOLERANCE * declared_s + LATENCY_TOLERANCE_S:
            raise LinkOff(
                f"the latency between {source} and {target} is not as declared: there and back takes {1e3 * declared_s:.4g} ms by it",
                f"testbed link {source}, {target}",
                f"{1e3 * measured_s:.4g} ms",
                "is something else running? a packet that is held needs a processor when it is due",
            )
        found.append(RoundTrip(source=source, target=target, declared_s=declared_s, measured_s=measured_s))
    return found


def _measured(topology: Topology, direction: Direction, measure: Measure) -> list[LinkRate]:
    """What the wires carry, all at once."""
    flows: list[Flow] = []
    for wire in topology.wires:
        source, target = (wire.lower, wire.upper) if direction == "up" else (wire.upper, wire.lower)
        flows.append((source, target, topology.address(target)))
    return [
        LinkRate(link=wire.lower, direction=direction, declared_bps=wire.rate_bps, measured_bps=measured)
        for wire, measured in zip(topology.wires, measure(flows), strict=True)
    ]


def _spell(bps: float) -> str:
    return f"{bps * 1e-6:.4g} Mbit/s"
