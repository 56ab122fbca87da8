"""Max-min fair sharing: the textbook's condition."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from sim.network.links import Port
from sim.network.sharing import fair_speeds

PORTS: tuple[Port, ...] = tuple(("inter", number, "out") for number in range(5))
PATHS = st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=7)


@given(PATHS)
def test_speeds_are_max_min_fair(paths: list[set[int]]) -> None:
    """Bertsekas and Gallager: speeds are max-min fair where they are possible and each has a bottleneck.

    That is a full port on its way on which no other flow has more.
    """
    speeds = fair_speeds({index: [PORTS[port] for port in sorted(path)] for index, path in enumerate(paths)})
    used = {port: sum((speeds[index] for index, path in enumerate(paths) if port in path), Fraction(0)) for port in range(5)}
    assert all(used[port] <= 1 for port in range(5))
    for index, path in enumerate(paths):
        largest = {port: max(speeds[other] for other, own in enumerate(paths) if port in own) for port in path}
        assert any(used[port] == 1 and speeds[index] == largest[port] for port in path)
