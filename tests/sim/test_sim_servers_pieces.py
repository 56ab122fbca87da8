"""Synchronous servers: buckets that are pushed beside the backward, and nodes that reduce first, against recursions written here."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from fleetbench.cluster import Link
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.layers import Layer, LayerTable
from fleetbench.plan.servers.rules import ServerRules, refuse_unserved
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.strategy import DistributedStrategy
from sim.run import simulate
from sim.servers.actor import Job, Linear, NodeCosts, Piece
from sim.servers.ports import Hosts
from sim.servers.server import staleness_summary
from sim.servers.simulate import execute
from sim.servers.traffic import Traffic

LATENCY_NS = 700
FORWARD_NS, BACKWARD_NS = 3_000, 10_000
ONE = 2**24
PIECES = ((1_000, 4_000), (2_500, 400), (2_600, 8_000), (9_000, 800), (10_000, 1_200))
"""When each is ready, in ns of the backward, and its bytes: some wait for the one before, some find the link idle."""


def job(trainers: int, servers: int, pieces: Sequence[tuple[int, int]], *, draws: Sequence[int] = (), **changes: Any) -> Job:
    """Trainers on hosts of their own at a byte a nanosecond, two steps."""
    layer = Layer(name="all", forward=Nanoseconds(FORWARD_NS), backward=Nanoseconds(BACKWARD_NS))
    fields: dict[str, Any] = {
        "rules": ServerRules(mode="synchronous", trainers=trainers, servers=servers),
        "table": LayerTable(key="test", layers=(layer,)),
        "traffic": Traffic(servers=servers, dense_bytes=sum(nbytes for _, nbytes in pieces)),
        "costs": Linear(push_ns_per_byte=0.5),
        "hosts": Hosts(
            trainers=tuple(range(trainers)),
            servers=tuple(range(trainers, trainers + servers)),
            link=Link(bandwidth=BitsPerSecond(8 * 10**9), latency=Nanoseconds(LATENCY_NS)),
        ),
        "steps": range(1, 3),
        "draws": tuple((x, x) for x in draws or (0,) * trainers),
        "pieces": tuple(Piece(ready, Traffic(servers=servers, dense_bytes=nbytes)) for ready, nbytes in pieces),
    }
    return Job(**(fields | changes))


def pulled_ns(ready: Sequence[tuple[int, int]], trainers: int, servers: int, ns_per_byte: float = 0.5) -> list[int]:
    """When each piece is back at trainers that are alike: three queues in a row, the way there, the server, the way back.

    Of N trainers and k servers, N S / k bytes of a piece pass a server's port, and S a trainer's: the fuller one decides.
    """
    there = server = back = 0
    found = []
    for ready_ns, nbytes in ready:
        wire_ns = max(nbytes, trainers * nbytes // servers)
        there = max(ready_ns, there) + wire_ns
        server = max(there + LATENCY_NS, server) + round(trainers * nbytes // servers * ns_per_byte)
        back = max(server, back) + wire_ns
        found.append(back + LATENCY_NS)
    return found


@pytest.mark.parametrize(("trainers", "servers"), [(1, 1), (3, 1), (2, 4), (4, 2)])
def test_pushes_beside_the_backward_are_three_queues_in_a_row(trainers: int, servers: int) -> None:
    """A step ends when its last piece is pulled, to the nanosecond, and the next begins then; no gradient is stale."""
    seen = execute(job(trainers, servers, PIECES))
    step_ns = max(pulled_ns([(FORWARD_NS + ready, nbytes) for ready, nbytes in PIECES], trainers, servers))
    assert {(record.step, record.start_ns, record.end_ns) for record in seen.records} == {(1, 0, step_ns), (2, step_ns, 2 * step_ns)}
    assert {record.stall_ns for record in seen.records} == {step_ns - FORWARD_NS - BACKWARD_NS}
    stale = staleness_summary(seen.loads)
    assert stale is not None
    assert stale["max"] == 0


def test_one_piece_that_is_ready_at_the_end_is_a_push_after_the_backward() -> None:
    """The whole job is the same, with its stragglers and its bytes."""
    draws = (0, ONE // 2, ONE)
    made = job(3, 2, [(BACKWARD_NS, 6_000)], draws=draws)
    one = execute(made)
    assert one == execute(dataclasses.replace(made, pieces=()))
    assert {record.bytes_sent for record in one.records} == {6_000}


def in_turn_ns(ready: Sequence[tuple[int, int]], reduce_ns: int, broadcast_ns: int) -> int:
    """One node, whose server answers at once: reduces and broadcasts on one communicator, in the order in which they are asked for."""
    asked = [(ready_ns, number, True) for number, (ready_ns, _) in enumerate(ready)]
    heapq.heapify(asked)
    free = 0
    while asked:
        asked_ns, number, reduces = heapq.heappop(asked)
        free = max(free, asked_ns) + (reduce_ns if reduces else broadcast_ns)
        if reduces:
            heapq.heappush(asked, (free, number, False))
    return free


def test_a_node_reduces_and_broadcasts_in_turn() -> None:
    """Three trainers of which the slowest has its gradients in twice the time: its pieces are all that the node waits for."""
    costs = NodeCosts(reduce_ns=(900,) * 5, broadcast_ns=(2_000,) * 5, nbytes=tuple(2 * nbytes // 3 for _, nbytes in PIECES))
    node = Hosts(trainers=(0,), servers=(0,), link=Link(bandwidth=BitsPerSecond(8)))
    seen = execute(job(1, 1, PIECES, draws=(0, ONE, ONE // 2), node=costs, hosts=node, costs=Linear()))
    step_ns = in_turn_ns([(2 * (FORWARD_NS + ready), nbytes) for ready, nbytes in PIECES], 900, 2_000)
    assert [record.end_ns for record in seen.records] == [step_ns, 2 * step_ns] * 3
    own = sum(nbytes for _, nbytes in PIECES)
    assert [record.bytes_sent for record in seen.records if record.step == 1] == [2 * sum(costs.nbytes) + own, *[2 * sum(costs.nbytes)] * 2]


FILE: dict[str, Any] = {
    "workload": {
        "model": "layers",
        "layers": [{"name": "block", "params": 50_000, "forward": "20 us", "backward": "40 us", "repeat": 6}],
        "steps": 3,
    },
    "cluster": {
        "nodes": 4,
        "trainers_per_node": 2,
        "servers": 2,
        "intra": {"bandwidth": "4 GB/s", "latency": "3 us", "payload": True},
        "inter": {"bandwidth": "1 GB/s", "latency": "700 ns", "payload": True},
    },
    "strategy": {"mode": "ps"},
    "run": {"warmup_steps": 0},
}


def step_ns(**strategy: Any) -> int:
    """Of the file, by the simulator."""
    return round(simulate(Experiment.from_dict(FILE | {"strategy": {"mode": "ps", **strategy}})).summary.step_s["mean"] * 1e9)


def test_a_files_servers_overlap_and_reduce_in_nodes() -> None:
    """Six layers of 200 kB, of 8 trainers or 4 nodes at 2 servers: each of the four ways against the recursion.

    Two trainers of a host share its link, which half a server's port for each of them does not fill.
    """
    size, inside = 200_000, 50_000 + 3_000  # a node's reduce, and its broadcast, of one layer
    backward = [(120_000 + 40_000 * (number + 1), size) for number in range(6)]
    whole = [(360_000, 6 * size)]
    assert step_ns() == pulled_ns(whole, 8, 2, 0)[0]
    assert step_ns(overlap_push=True, fuse_all_reduce_ops=False) == max(pulled_ns(backward, 8, 2, 0))
    assert step_ns(overlap_push=True, fuse_grad_size_in_MB=0) == step_ns()
    node = 6 * 50_000 + 3_000
    assert step_ns(reduce_in_node=True) == pulled_ns([(360_000 + node, 6 * size)], 4, 2, 0)[0] + node
    reduced = [0]
    for ready, _ in backward:
        reduced.append(max(reduced[-1], ready) + inside)
    back = pulled_ns([(ready, size) for ready in reduced[1:]], 4, 2, 0)
    assert all(later - sooner > inside for sooner, later in pairwise(back))  # so that no broadcast waits for another
    assert back[0] > reduced[-1]  # nor for a reduce
    assert step_ns(overlap_push=True, reduce_in_node=True, fuse_all_reduce_ops=False) == back[-1] + inside


@pytest.mark.parametrize("field", ["overlap_push", "reduce_in_node"])
def test_real_trainers_and_other_modes_refuse_them_by_name(field: str) -> None:
    """Each names the field; asynchronous trainers and collectives have no such choice."""
    with pytest.raises(ConfigError, match=f"strategy.{field}"):
        refuse_unserved(DistributedStrategy.from_dict({"mode": "ps", field: True}))
    for strategy in ({}, {"mode": "ps", "a_sync": True}):
        with pytest.raises(ConfigError, match=field):
            DistributedStrategy.from_dict({**strategy, field: True})


def test_what_is_not_simulated_of_them_is_refused() -> None:
    """Fusion without buckets to fuse, and recordings of a role that is many."""
    with pytest.raises(ConfigError, match="fuse_grad_count"):
        step_ns(fuse_grad_count=7)
    with pytest.raises(ConfigError, match="recordings"):
        simulate(Experiment.from_dict(FILE | {"strategy": {"mode": "ps", "overlap_push": True}}), record=True)
