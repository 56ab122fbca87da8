"""What stands before a forward: results read back, batches that loaders make ahead."""

from __future__ import annotations

from collections.abc import Generator
from itertools import pairwise
from typing import Any

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbench.plan.layers import LayerTable, StepHead


def begins(compute_ns: list[int], fetch_every: int = 1, begin_ns: int = 0, **host: Any) -> list[int]:
    """When each forward begins, where a step is its head and then ``compute_ns``."""
    head = StepHead(LayerTable(key="", layers=(), **host), fetch_every, begin_ns)
    now_ns, found = begin_ns, []
    for took_ns in compute_ns:
        found.append(head.forward_begins(now_ns))
        now_ns = found[-1] + took_ns
    return found


def test_a_loop_that_loads_by_itself_waits_for_every_batch() -> None:
    """No loaders: 7 to load and 2 of the loop's own, in front of each compute of 10."""
    assert begins([10] * 3, load=7, read=2) == [9, 28, 47]


def test_results_are_read_back_every_n_steps_and_not_before_the_first() -> None:
    """Every third step: in front of the steps 4 and 7, of 10 and 1 each."""
    assert begins([10] * 7, fetch_every=3, fetch=5, read=1) == [1, 12, 23, 39, 50, 61, 77]


def test_a_long_step_hides_loading() -> None:
    """A batch in 30 by one loader, beside steps of 40: only the first is waited for."""
    assert begins([40] * 4, load=30, loaders=1) == [30, 70, 110, 150]


@pytest.mark.parametrize(("loaders", "prefetch"), [(1, 2), (2, 1), (3, 2)])
def test_a_short_step_takes_what_loading_takes(loaders: int, prefetch: int) -> None:
    """Loaders make a batch each ``load`` / ``loaders`` together; once what was made ahead is gone, so does the loop."""
    found = begins([10] * 60, load=120, loaders=loaders, prefetch=prefetch)
    assert found[-1] - found[-1 - loaders] == 120
    assert found[0] == 120


def test_what_was_made_ahead_bridges_a_pause() -> None:
    """A pause of 1000 fills what two loaders of three batches may hold; six steps then wait for nothing, the seventh does."""
    found = begins([10, 10, 1000] + [10] * 8, load=100, loaders=2, prefetch=3)
    gaps = [after - before for before, after in pairwise(found)]
    assert gaps[2:9] == [1000, 10, 10, 10, 10, 10, 50]


def test_loading_begins_with_training() -> None:
    """The clock of a real run starts anywhere."""
    shifted = begins([10] * 5, begin_ns=1_000_000, load=35, loaders=2, read=3)
    assert [value - 1_000_000 for value in shifted] == begins([10] * 5, load=35, loaders=2, read=3)


def by_processes(compute_ns: list[int], load_ns: int, loaders: int, prefetch: int) -> list[int]:
    """The same by SimPy: loaders that take orders in turn, and a loop that orders one more batch for each that it takes."""
    clock = simpy.Environment()
    orders = [simpy.Store(clock) for _ in range(loaders)]
    made = [clock.event() for _ in compute_ns]
    found: list[int] = []

    def loader(own: simpy.Store) -> Generator[Any, Any, None]:
        while True:
            batch = yield own.get()
            yield clock.timeout(load_ns)
            made[batch].succeed()

    def order(batch: int) -> None:
        if batch < len(made):
            orders[batch % loaders].put(batch)

    def loop() -> Generator[Any, Any, None]:
        for batch in range(loaders * prefetch):
            order(batch)
        for batch, took_ns in enumerate(compute_ns):
            yield made[batch]
            order(batch + loaders * prefetch)
            found.append(int(clock.now))
            yield clock.timeout(took_ns)

    for own in orders:
        clock.process(loader(own))
    clock.run(clock.process(loop()))
    return found


@settings(deadline=None)
@given(
    compute=st.lists(st.integers(0, 300), min_size=1, max_size=40),
    load=st.integers(1, 200),
    loaders=st.integers(1, 4),
    prefetch=st.integers(1, 3),
)
def test_the_recursion_is_what_loaders_do(compute: list[int], load: int, loaders: int, prefetch: int) -> None:
    """Against processes that take orders and make batches, for steps of any length."""
    assert begins(compute, load=load, loaders=loaders, prefetch=prefetch) == by_processes(compute, load, loaders, prefetch)
