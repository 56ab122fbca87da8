"""Links: closed forms of the ring, and transfers that share a bandwidth."""

from __future__ import annotations

import math
from collections.abc import Generator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbench.cluster import Link
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from sim.clock import Clock, half_up
from sim.network import Ring, SharedBandwidth


def ends(transfers: list[tuple[int, Fraction]]) -> list[int]:
    """When transfers, each given by its start and its length alone, end."""
    clock = Clock()
    bandwidth = SharedBandwidth(clock)
    found = [-1] * len(transfers)

    def one(index: int) -> Generator[object, object, None]:
        start_ns, alone_ns = transfers[index]
        yield clock.until(start_ns)
        yield bandwidth.transfer(alone_ns)
        found[index] = clock.now

    for index in range(len(transfers)):
        clock.process(one(index))
    clock.run()
    return found


@given(st.integers(2, 64), st.integers(0, 10**9), st.integers(10**6, 10**12), st.integers(0, 10**6))
def test_a_ring_alone_is_the_closed_form(ranks: int, nbytes: int, bits_per_s: int, latency_ns: int) -> None:
    """2 (P - 1) alpha + 2 ((P - 1) / P) S / B, before any rounding."""
    inter = Link(bandwidth=BitsPerSecond(bits_per_s), latency=Nanoseconds(latency_ns))
    cost = Ring(tuple(range(ranks)), 1, None, inter).all_reduce(nbytes)
    bytes_per_ns = Fraction(bits_per_s, 8 * 10**9)
    assert cost.latency_ns + cost.transfer_ns == 2 * (ranks - 1) * latency_ns + Fraction(2 * (ranks - 1), ranks) * nbytes / bytes_per_ns


def test_three_transfers_by_hand() -> None:
    """Ten ns each, started at 0, 1 and 2.

    At 2 they have 8.5, 9.5 and 10 to go. A third of the bandwidth: the first ends at 27.5, so 28,
    where the others have 5/6 and 4/3 to go. Half: the second ends at 29 2/3, so 30; 1/3 is left,
    which ends at 30 1/3, so 30.
    """
    assert ends([(0, Fraction(10)), (1, Fraction(10)), (2, Fraction(10))]) == [28, 30, 30]


def test_a_short_transfer_overtakes_a_long_one() -> None:
    """100 alone until 20, then half beside one of 10 until 40; 70 are left and end at 110."""
    assert ends([(0, Fraction(100)), (20, Fraction(10))]) == [110, 40]


def test_transfers_apart_do_not_know_of_each_other() -> None:
    """One that starts where another ends has the bandwidth for itself."""
    assert ends([(5, Fraction(7)), (12, Fraction(9)), (100, Fraction(0))]) == [12, 21, 100]


@given(st.fractions(0, 10**12))
def test_alone_a_transfer_is_rounded_once(alone_ns: Fraction) -> None:
    """The end of a transfer alone is its length rounded half up."""
    assert ends([(3, alone_ns)]) == [3 + math.floor(alone_ns + Fraction(1, 2))]
    assert half_up(alone_ns) == math.floor(alone_ns + Fraction(1, 2))


@given(st.lists(st.tuples(st.integers(0, 1000), st.fractions(0, 1000)), min_size=1, max_size=6))
def test_no_bandwidth_is_lost_or_made(transfers: list[tuple[int, Fraction]]) -> None:
    """The link works whenever there is work: its last end is that of one server, up to a nanosecond a rounding."""
    free = Fraction(0)
    for start_ns, alone_ns in sorted(transfers):
        free = max(free, Fraction(start_ns)) + alone_ns
    assert abs(max(ends(transfers)) - free) <= len(transfers)
    for (start_ns, alone_ns), end in zip(transfers, ends(transfers), strict=True):
        assert end >= start_ns + alone_ns - len(transfers)


def test_the_clock_stays_in_the_integers() -> None:
    """A duration that nobody rounded is a bug of ours, and is found."""
    clock = Clock()
    clock.timeout(0.5)
    clock.run()
    with pytest.raises(AssertionError, match="not rounded"):
        _ = clock.now
