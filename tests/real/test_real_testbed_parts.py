"""The testbed's judgement: rates, noise and void measurements, each without a network."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import pytest

from fleetbench.cluster import Cluster, Link, NodeOverride
from fleetbench.errors import EnvironmentLacks
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from real.testbed import latency_relay, noise
from real.testbed.noise import quietly
from real.testbed.testbed import Testbed as Ground  # pytest would take a Test... for tests
from real.testbed.testbed import own_latency_ns, round_trips, verify, verify_latency
from real.testbed.topology import topology_of
from real.testbed.traffic import Flow

MBIT = 10**6
TOPOLOGY = topology_of(Cluster(nodes=3, inter=Link(bandwidth=BitsPerSecond(100 * MBIT))))
PAYLOAD_BPS = 100 * MBIT * 1448 / 1514


class Links:
    """Stands for the network: flows carry their payload, but for those that a test breaks."""

    def __init__(self, broken: Callable[[Flow, int, int], float]) -> None:
        """``broken``: factor of a flow's rate, by the flow, the number of flows at once, and the number of measurements before."""
        self.measured: list[list[Flow]] = []
        self._broken = broken

    def __call__(self, flows: Sequence[Flow]) -> list[float]:
        """Payload rates of flows that run at once."""
        self.measured.append(list(flows))
        return [PAYLOAD_BPS * self._broken(flow, len(flows), len(self.measured) - 1) for flow in flows]


def test_links_as_declared_are_measured_once_each_way() -> None:
    """All at once, up and then down; up is from the host to its switch."""
    links = Links(lambda *_: 0.98)
    rates = verify(TOPOLOGY, links)
    assert len(links.measured) == 2
    assert {flow[0] for flow in links.measured[0]} == {"host0", "host1", "host2"}
    assert {flow[1] for flow in links.measured[1]} == {"host0", "host1", "host2"}
    assert [(rate.link, rate.direction) for rate in rates[:2]] == [("host0", "up"), ("host0", "down")]
    assert all(rate.error == pytest.approx(-0.02) for rate in rates)


@pytest.mark.parametrize(("factor", "said"), [(0.96, "-4.0 %"), (1.04, r"\+4.0 %"), (0.0, "-100.0 %")])
def test_a_link_that_is_off_is_named(factor: float, said: str) -> None:
    """With what was declared and what was measured, slower or faster; after all were measured again, twice."""
    links = Links(lambda flow, *_: factor if flow[:2] == ("switch", "host1") else 1.0)
    with pytest.raises(EnvironmentLacks, match=f"link of host1 .* downwards, 100 Mbit/s .*{said}") as caught:
        verify(TOPOLOGY, links)
    assert [len(flows) for flows in links.measured] == [3, 3, 3, 3]
    assert caught.value.exit_code == 3
    assert caught.value.hint


def test_round_trips_are_twice_the_later_latency() -> None:
    """By the median of several; 0.6 ms off is too much at 10 ms, and says both times. A message takes half of what they take beside it."""
    late = Link(bandwidth=BitsPerSecond(MBIT), latency=Nanoseconds(5 * 10**6))
    topology = topology_of(
        Cluster(nodes=3, inter=Link(bandwidth=BitsPerSecond(MBIT)), node_overrides=(NodeOverride(nodes=(2,), inter=late),))
    )
    asked: list[Flow] = []

    def measure(flow: Flow, times: int) -> list[float]:
        asked.append(flow)
        return [9.0] * 3 + [0.0101] * (times - 3)

    trips = round_trips(topology, measure)
    assert verify_latency(trips) == trips
    assert own_latency_ns(trips) == 50_000
    assert [tuple(trip.values()) for trip in trips] == [
        ("host1", "host2", 0.01, 0.0101),
        ("host2", "host0", 0.01, 0.0101),
    ]
    assert asked[0] == ("host1", "host2", topology.address("host2"))
    for off in (0.0094, 0.0106):
        with pytest.raises(EnvironmentLacks, match=rf"between host1 and host2 .* round trip is 10 ms .*got {1e3 * off:g} ms"):
            verify_latency(round_trips(topology, lambda _, times, off=off: [off] * times))


def test_the_relay_holds_packets_less_when_it_is_told() -> None:
    """30 ms for one receiver, none for another; 20 ms less; never less than nothing; it ends with its input."""
    late, near = bytes(5) + b"\1", bytes(5) + b"\2"
    with ExitStack() as opened:
        (host, device), (out, arrived) = (
            [opened.enter_context(end) for end in socket.socketpair(type=socket.SOCK_DGRAM)] for _ in range(2)
        )
        reads, writes = os.pipe()
        opened.callback(os.close, reads)
        tell = opened.enter_context(os.fdopen(writes, "w"))
        held = {late: 30_000_000}
        thread = threading.Thread(target=latency_relay.relay, args=([(device.fileno(), out.fileno(), held)], reads))
        thread.start()

        def took_s(address: bytes) -> float:
            begin = time.perf_counter()
            host.send(bytes(10) + address + b"data")
            assert arrived.recv(100)[10:16] == address
            return time.perf_counter() - begin

        def say(ns: int) -> None:
            tell.write(f"{ns}\n")
            tell.flush()
            time.sleep(0.02)

        assert took_s(late) >= 0.030
        assert min(took_s(near) for _ in range(5)) < 0.010
        say(20_000_000)
        assert 0.010 <= min(took_s(late) for _ in range(5)) < 0.030
        say(-90_000_000)
        assert took_s(late) >= 0.030
        tell.close()
        thread.join(10)
        assert not thread.is_alive()


def _noise(**changes: Any) -> noise.Noise:
    return noise.Noise(**{"seconds": 1.0, "foreign_cores": 0.01, "retransmits": 3, **changes})


@pytest.mark.parametrize(
    ("happened", "after_s", "reasons"),
    [
        ({}, 1.019, []),
        ({}, 1.021, ["sentinel"]),
        ({}, 0.97, ["sentinel"]),
        ({"timeouts": 1}, 1.0, ["TCP timeouts"]),
        ({"foreign_cores": 0.16}, 1.0, ["other processes"]),
    ],
)
def test_what_makes_a_measurement_void(happened: dict[str, Any], after_s: float, reasons: list[str]) -> None:
    """A timeout, more than 15 % of a core for others, a sentinel that moved by more than 2 %; retransmits do not."""
    found = noise.why_void(_noise(**happened), 1.0, after_s)
    assert len(found) == len(reasons)
    assert all(word in text for word, text in zip(reasons, found, strict=True))


def test_noise_is_the_difference_of_two_readings() -> None:
    """By hand: 3 s of user time in 2 s, of which 1 s is ours, is one foreign core."""
    before = noise.Reading(at_s=10.0, user_s=100.0, own_user_s=50.0, counters={"retransmits": 1, "timeouts": 2})
    after = noise.Reading(at_s=12.0, user_s=103.0, own_user_s=51.0, counters={"retransmits": 5, "timeouts": 3})
    assert noise.between(before, after) == noise.Noise(seconds=2.0, foreign_cores=1.0, retransmits=4, timeouts=1)


class FakeTestbed:
    """Sentinels as listed, and a machine that is quiet."""

    def __init__(self, sentinels_s: Sequence[float], *, pace_s: float = 1.0, busy: float = 0.0) -> None:
        """``pace_s``: between two readings; ``busy``: cores of foreign load."""
        self._sentinels_s = iter(sentinels_s)
        self._clock_s = 0.0
        self._pace_s, self._busy = pace_s, busy

    def sentinel(self) -> float:
        """The next of the list."""
        return next(self._sentinels_s)

    def read(self) -> noise.Reading:
        """Always later."""
        self._clock_s += self._pace_s
        return noise.Reading(at_s=self._clock_s, user_s=self._clock_s * self._busy, own_user_s=0.0, counters={})


@pytest.mark.parametrize(
    ("sentinels_s", "value", "num_void", "counts"),
    [([1, 1], 0, 0, True), ([1, 1.1, 1, 1.01], 1, 1, True), ([1, 1.1, 1, 0.9, 1, 2], 2, 3, False)],
)
def test_a_void_measurement_is_repeated_and_counted(sentinels_s: list[float], value: int, num_void: int, counts: bool) -> None:
    """Until one counts, twice at most; the last value is kept, and it is said whether it counts."""
    values = iter(range(9))
    trial = quietly(cast("Ground", FakeTestbed(sentinels_s)), lambda: next(values), tries=3)
    assert (trial.value, trial.num_void, trial.counts) == (value, num_void, counts)
    assert len(trial.blocks) == len(sentinels_s) // 2
