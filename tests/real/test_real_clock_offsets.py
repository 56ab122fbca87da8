"""Offsets of clocks, from exchanges whose true offset is known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from real.communication.clock_offsets import Offset, fastest

DELAYS_NS = st.integers(min_value=0, max_value=10**9)


def test_an_even_exchange_gives_the_offset() -> None:
    """Asked at 100, heard at 160, answered in the middle by a clock that is 1000 ahead."""
    assert fastest([(100, 1130, 160)]) == Offset(1000, 30)


def test_the_fastest_exchange_counts() -> None:
    """A slow exchange, whose answer lay long on the way, does not."""
    assert fastest([(0, 5, 1000), (2000, 2107, 2010), (3000, 3900, 4000)]) == Offset(102, 5)


@given(st.integers(min_value=-(10**15), max_value=10**15), st.lists(st.tuples(DELAYS_NS, DELAYS_NS), min_size=1, max_size=20))
def test_the_error_is_a_bound(offset_ns: int, delays_ns: list[tuple[int, int]]) -> None:
    """Whatever the two ways take, the true offset lies within the stated error."""
    exchanges = []
    for number, (there, back) in enumerate(delays_ns):
        asked = number * 10**10
        exchanges.append((asked, asked + there + offset_ns, asked + there + back))
    found = fastest(exchanges)
    assert abs(found.offset_ns - offset_ns) <= found.error_ns
    assert found.error_ns == min((there + back + 1) // 2 for there, back in delays_ns)
