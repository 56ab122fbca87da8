"""Queues: several all-reduces on one communicator, worked out by hand.

Links of 8 Gbit/s carry one byte a nanosecond; among two trainers T(S) = 2 latency + S there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from sim_cases import carried_ns, layered, link

from sim.run import simulate

FREE = {"sync_nccl_allreduce": False}
Times = list[tuple[int, int]]


def queue(sizes: Sequence[int], apart_ns: Sequence[int], strategy: dict[str, Any], **options: Any) -> Times:
    """Begin and end of buckets of so many bytes, each ready so long after the one before; the first so long after 100 ns."""
    layers = [(nbytes // 4, 0, apart) for nbytes, apart in zip(sizes, apart_ns, strict=True)][::-1]
    layers[0] = (layers[0][0], 100, layers[0][2])
    times = carried_ns(simulate(layered(layers, strategy=strategy, **options)))
    return [times[name] for name in sorted(times, key=lambda name: int(name.split()[1]))]


def test_two_share_the_link() -> None:
    """T = 20 + S alone, half of it a message. b has 2000 bytes and is ready at 300, a has 1000 at 500.

    b's first message is on the wire until 1300, a's until 1800, b's second, which had come back at 1310, until 2800, and
    a's until 3300: 3000 bytes in 3000 ns, and one latency.
    """
    assert queue([2_000, 1_000], [200, 200], FREE, inter=link(8, 10)) == [(300, 2_810), (500, 3_310)]


@pytest.mark.parametrize(("strategy", "backend"), [({}, "gloo"), ({}, "nccl"), (FREE, "nccl")])
def test_one_by_one_where_there_is_no_room_for_two(strategy: dict[str, Any], backend: Literal["gloo", "nccl"]) -> None:
    """With ``sync_nccl_allreduce``, or where a communicator is a stream: b from 300 to 2320, a from there to 3340."""
    assert queue([2_000, 1_000], [200, 200], strategy, inter=link(8, 10), backend=backend) == [(300, 2_320), (2_320, 3_340)]


@pytest.mark.parametrize("fields", [{"use_hierarchical_allreduce": True}, {"bf16_allreduce": True}])
def test_what_is_no_plain_all_reduce_stays_alone(fields: dict[str, Any]) -> None:
    """Nothing of a hierarchy, and nothing that is cast, goes beside another on its communicator."""
    options: dict[str, Any] = {"inter": link(8, 10), "intra": link(8, 10), "trainers_per_node": 2}
    times = queue([2_000, 1_000, 400], [200, 200, 100], FREE | fields, **options)
    assert all(begin >= end for (_, end), (begin, _) in itertools.pairwise(times))
