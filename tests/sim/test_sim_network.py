"""Links: closed forms of the ring, and transfers that share a bandwidth."""

from __future__ import annotations

from collections.abc import Generator
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from fleetbench.cluster import Link
from fleetbench.plan.operations import Collective
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from sim.arrays.event_loop import Meetings
from sim.clock import Clock
from sim.network.algorithms import ring
from sim.network.links import Links, Port
from sim.network.sharing import SharedPorts, fair_speeds
from sim.network.work import Cost

LIMITED = Link(bandwidth=BitsPerSecond(10**10), latency=Nanoseconds(1_000), flow_limit=BitsPerSecond(4 * 10**9), payload=True)
WIRE: tuple[Port, ...] = (("inter", 0, "out"), ("inter", 1, "in"))


def ends(transfers: list[tuple[int, Fraction]]) -> list[int]:
    """When transfers, each given by its start and its length alone, end."""
    clock = Clock()
    ports = SharedPorts(clock)
    found = [-1] * len(transfers)

    def one(index: int) -> Generator[object, object, None]:
        start_ns, alone_ns = transfers[index]
        yield clock.until(start_ns)
        yield ports.transfer(WIRE, alone_ns)
        found[index] = clock.now

    for index in range(len(transfers)):
        clock.process(one(index))
    clock.run()
    return found


def cost_of(kind: Collective, ranks: int, nbytes: int, wire: Link, *, rows: bool = False) -> Cost:
    """A ring of nodes of one trainer."""
    return ring(kind, range(ranks), Links(trainers_per_node=1, intra=None, inter=wire), rows=rows).route(nbytes).cost


def wire(bits_per_s: int, latency_ns: int = 0) -> Link:
    """A link between nodes."""
    return Link(bandwidth=BitsPerSecond(bits_per_s), latency=Nanoseconds(latency_ns))


SIZES = (st.integers(2, 64), st.integers(0, 10**9), st.integers(10**6, 10**12), st.integers(0, 10**6))


@given(*SIZES)
def test_a_ring_alone_is_the_closed_form(ranks: int, nbytes: int, bits_per_s: int, latency_ns: int) -> None:
    """2 (P - 1) alpha + 2 ((P - 1) / P) S / B, before any rounding."""
    cost = cost_of("all_reduce", ranks, nbytes, wire(bits_per_s, latency_ns))
    bytes_per_ns = Fraction(bits_per_s, 8 * 10**9)
    assert cost.latency_ns + cost.transfer_ns == 2 * (ranks - 1) * latency_ns + Fraction(2 * (ranks - 1), ranks) * nbytes / bytes_per_ns


@given(*SIZES)
def test_the_other_collectives_are_their_closed_forms(ranks: int, nbytes: int, bits_per_s: int, latency_ns: int) -> None:
    """Halves of an all-reduce are (P - 1)(alpha + S / (P B)), rows (P - 1)(alpha + S / B), pipelines (P - 1) alpha + S / B."""
    link, whole_ns = wire(bits_per_s, latency_ns), Fraction(nbytes * 8 * 10**9, bits_per_s)
    halves: tuple[Collective, ...] = ("reduce_scatter", "all_gather")
    for kind in halves:
        cost = cost_of(kind, ranks, nbytes, link)
        assert cost.latency_ns + cost.transfer_ns == (ranks - 1) * (latency_ns + whole_ns / ranks)
    rows = cost_of("all_gather", ranks, nbytes, link, rows=True)
    assert rows.latency_ns + rows.transfer_ns == (ranks - 1) * (latency_ns + whole_ns)
    pipelines: tuple[Collective, ...] = ("reduce", "broadcast")
    for kind in pipelines:
        cost = cost_of(kind, ranks, nbytes, link)
        assert cost.latency_ns + cost.transfer_ns == (ranks - 1) * latency_ns + whole_ns


def test_fair_speeds_by_hand() -> None:
    """Transfers a and b share p, b, c and d share q: q's three get a third each, and a takes the two thirds that b leaves of p."""
    p, q = ("inter", 0, "out"), ("inter", 1, "out")
    third = Fraction(1, 3)
    assert fair_speeds({"a": [p], "b": [p, q], "c": [q], "d": [q]}) == {"a": 2 * third, "b": third, "c": third, "d": third}
    assert fair_speeds({"a": [p, q]}) == {"a": 1}
    assert fair_speeds({"a": [p], "b": [q]}) == {"a": 1, "b": 1}
    assert fair_speeds({}) == {}


def test_three_transfers_by_hand() -> None:
    """Ten ns each, started at 0, 1 and 2.

    At 2 they have 8.5, 9.5 and 10 to go. A third of the bandwidth: the first ends at 27.5, so 28,
    where the others have 5/6 and 4/3 to go. Half: the second ends at 29 2/3, so 30; 1/3 is left,
    which ends at 30 1/3, so 30.
    """
    assert ends([(0, Fraction(10)), (1, Fraction(10)), (2, Fraction(10))]) == [28, 30, 30]


def test_a_limited_connection_is_as_slow_as_its_limit() -> None:
    """10 Gbit/s of which a connection gets 4: two nodes take 2 (alpha + S / 2 / 4 Gbit/s)."""
    links = Links(trainers_per_node=1, intra=None, inter=LIMITED)
    found = ring("all_reduce", range(2), links).route(10**6)
    assert found.cost == Cost(2_000, Fraction(2 * 10**6 * 8, 2 * 4))
    assert Meetings([found] * 3, [[0], [1], [2]], links).carry([0] * 3)[1][-1] == 6 * 10**6 + 1_000  # three of one communicator
