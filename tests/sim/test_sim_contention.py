"""Contention: compute that communication slows, worked out by hand.

b (2000 bytes) is ready at 800, a (1000 bytes) with the end of the compute of 1000 ns, as in
``test_sim_by_hand``; among two trainers T(S) = 2 latency + S at 1 ns a byte.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from sim_cases import in_ns, link, profiled, with_profile

from fleetbench.errors import ConfigError
from fleetbench.result import RunResult
from fleetbench.stragglers import Jitter
from sim.run import simulate

A_AND_B = [([250], [600], 100, 200), ([500], [400], 300, 400)]


def run(contention: float, layers: Any = A_AND_B, **options: Any) -> RunResult:
    """A simulated run whose compute slows by ``contention``."""
    experiment, profile = profiled(layers, {"contention": contention}, **options)
    return simulate(with_profile(experiment, profile))


def test_compute_slows_while_a_collective_is_in_flight() -> None:
    """Half as long again: b travels from 800 to 2820, so the last 200 ns of compute take 300, and a is ready at 1100."""
    result = run(0.5, inter=link(8, 10))
    assert in_ns(result, "forward_s") == [400, 400]
    assert in_ns(result, "backward_s") == [700, 700]
    assert in_ns(result, "arrival_s") == [1_100, 1_100]
    assert in_ns(result, "exposed_comm_s") == [2_740, 2_740]  # a: 2820 to 3840


def test_every_boundary_is_rounded_once_from_what_was_done() -> None:
    """Contention 0.2: a collective of t ns costs compute t - t / 1.2 = t / 6.

    c travels 31 ns from 500, which makes b ready at 805 1/6, so 805; b travels 38 ns, and compute
    ends at 1000 + 31/6 + 38/6 = 1011.5, so 1012. Counted from a b at 805 sharp it would be 1011.
    """
    layers = [([250], [600], 100, 200), ([450, 275], [400, 100], 300, 400)]
    result = run(0.2, layers, inter=link(800, 10))
    starts = {span.name: span.start_ns for span in result.spans if span.stream == "communication" and span.rank == 0}
    assert starts == {"all_reduce 0": 500, "all_reduce 1": 805, "all_reduce 2": 1_012}
    assert in_ns(result, "backward_s") == [612, 612]


def test_more_contention_never_helps() -> None:
    """Random delays on both sides of the link: step times grow with contention, and at 0 are those without it."""
    options: dict[str, Any] = {"nodes": 3, "inter": link(20, 10), "stragglers": (Jitter(mean=0.5),), "steps": 20}
    walls = [run(contention, **options).summary.wall_s for contention in (0.0, 0.1, 0.5, 2.0)]
    assert walls == sorted(walls)
    assert walls[0] < walls[-1]
    experiment, profile = profiled(A_AND_B, {}, **options)
    assert simulate(with_profile(experiment, profile)).summary.wall_s == walls[0]


def test_a_contention_below_zero_is_refused() -> None:
    """Communication that speeds compute up is a mistake in the profile."""
    _, profile = profiled(A_AND_B, {}, inter=link(8))
    for name in ("contention", "collective_contention"):
        with pytest.raises(ConfigError, match=name):
            dataclasses.replace(profile.tables[0], **{name: -0.1})
