"""Overlap: worked out by hand, compared with the simulator, and found again from its times."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_cases import in_ns, link, profiled, with_profile

from fleetbench.fitting.overlap import fit_slowdowns
from fleetbench.plan.overlap import Exchange, Overlapped, overlap
from sim.run import simulate

TWO = Exchange(ready_s=(4.0, 10.0), takes_s=(3.0, 2.0), backward_s=10.0, start_s=(0.0, 0.0))
"""A bucket of 3 s is ready at 4, one of 2 s with the backward's end."""


def test_undisturbed_buckets_travel_beside_the_backward() -> None:
    """The first has ended at 7; the second takes its 2 s after the backward."""
    assert overlap(TWO, 0.0, 0.0) == Overlapped(backward_s=10.0, stall_s=2.0)


def test_compute_slows_while_one_is_in_flight() -> None:
    """Half as fast from 4 to 7: 1.5 of 6 s are done then, and the backward ends at 11.5."""
    assert overlap(TWO, 1.0, 0.0) == Overlapped(backward_s=11.5, stall_s=2.0)


def test_a_transfer_slows_until_the_backward_ends() -> None:
    """At half the speed 3 s of the first take 6, to the backward's end, after which the second goes at full speed."""
    assert overlap(TWO, 0.0, 1.0) == Overlapped(backward_s=10.0, stall_s=2.0)
    late = dataclasses.replace(TWO, ready_s=(8.0, 10.0))
    assert overlap(late, 0.0, 1.0) == Overlapped(backward_s=10.0, stall_s=2.0 + 2.0)  # 1 of 3 s is done at 10


def test_latency_counts_as_transfer_does_and_a_start_holds_compute_up() -> None:
    """1 s of start and 1 s of latency a bucket: the first's 4 s would take 8 at half speed, from 5 on; the backward ends at 12."""
    exchange = dataclasses.replace(TWO, start_s=(1.0, 1.0), takes_s=(4.0, 3.0))
    went = overlap(exchange, 0.0, 1.0)  # compute from 5 to 11, start to 12: 3.5 of 4 s are done
    assert went.backward_s == pytest.approx(12.0)
    assert went.stall_s == pytest.approx(0.5 + 3.0)


@given(
    st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 3000)), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.25, 1.5]),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.integers(0, 200),
    st.integers(0, 100),
    st.integers(0, 100),
)
def test_the_simulator_integrates_the_same_rules(
    layers: list[tuple[int, int]], compute: float, collective: float, latency: int, host: int, pack: int
) -> None:
    """Any buckets, slowdowns, latency and cost of starting: backward and stall are the simulator's, but for its rounding."""
    numels = [numel for numel, _ in layers]
    total = sum(4 * numel for numel in numels)
    specs = []
    ready = 0
    readies = []
    for _, backward in layers:
        ready += backward
        readies.append(ready)
    for (numel, backward), at in reversed(list(zip(layers, readies, strict=True))):
        specs.append(([numel], [at], 100, backward))
    table: dict[str, Any] = {"contention": compute, "collective_contention": collective, "host_per_collective": host, "pack": pack}
    experiment, profile = profiled(specs, table, inter=link(8, latency))
    result = simulate(with_profile(experiment, profile))
    exchange = Exchange(
        ready_s=tuple(float(at) for at in readies),
        takes_s=tuple(2.0 * latency + 4 * numel for numel in numels),
        backward_s=float(ready),
        start_s=tuple(host + pack * 4 * numel / total for numel in numels),
    )
    went = overlap(exchange, compute, collective)
    (backward_ns, *_), (wait_ns, *_), (exposed_ns, *_) = (in_ns(result, name) for name in ("backward_s", "wait_s", "exposed_comm_s"))
    assert backward_ns == pytest.approx(went.backward_s, abs=2 * len(layers) + 2)
    assert wait_ns is not None
    assert exposed_ns is not None
    assert wait_ns + exposed_ns == pytest.approx(went.stall_s, abs=4 * len(layers) + 4)


BUCKETS = Exchange(
    ready_s=(0.010, 0.030, 0.055, 0.080, 0.100),
    takes_s=(0.0485, 0.0245, 0.0365, 0.0365, 0.0065),
    backward_s=0.100,
    start_s=(0.001,) * 5,
)
"""150 ms of transfers beside and after a backward of 100."""


@pytest.mark.parametrize(("compute", "collective"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.6), (0.5, 0.5), (1.0, 2.0)])
def test_slowdowns_are_found_again(compute: float, collective: float) -> None:
    """From the two durations alone, within 2 % of a slowdown of 1."""
    found = fit_slowdowns(BUCKETS, overlap(BUCKETS, compute, collective))
    assert found.compute == pytest.approx(compute, abs=0.02)
    assert found.collective == pytest.approx(collective, abs=0.02)
    assert found.error < 1e-3
    assert found.statement is None
