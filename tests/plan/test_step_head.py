"""What stands before a forward: results read back, batches that loaders make ahead."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

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
