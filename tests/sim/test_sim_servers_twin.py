"""The twin of asynchronous training against the strategy's own ``on`` on SimPy's clock: the same order, the same nanoseconds."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbench.cluster import Link
from fleetbench.errors import ConfigError
from fleetbench.plan.events import Message
from fleetbench.plan.layers import Layer, LayerTable
from fleetbench.plan.operations import Operation
from fleetbench.plan.servers.recording import RoleDecider
from fleetbench.plan.servers.rules import ServerRules
from fleetbench.plan.servers.server import staleness
from fleetbench.plan.servers.states import Role, ServerState
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from sim.servers.costs import Costs, Linear
from sim.servers.job import Execution, Job, execute
from sim.servers.traffic import TouchedRows, Traffic
from sim.servers.twin import execute_twin
from sim.servers.wires import Hosts

pytest.importorskip("numba")
FEW_NS = st.integers(0, 3)
"""Durations so short that many events fall together."""


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Asynchronous jobs of every kind: with and without dense parameters, rows, waiting, merging, a host that is shared."""
    trainers, servers, steps = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    ns = st.one_of(FEW_NS, st.integers(0, 1000))
    rules = ServerRules(
        mode="asynchronous",
        trainers=trainers,
        servers=servers,
        max_merge=draw(st.integers(1, 3)),
        queue_size=draw(st.integers(1, 4)),
        pushes_in_flight=draw(st.integers(1, 3)),
        idle_ns=draw(st.integers(1, 50)),
        independent_receive=draw(st.booleans()),
        sends_before_receive=draw(st.integers(1, 3)),
        has_dense=draw(st.booleans()),
    )
    rows = tuple(TouchedRows(rows=50, row_bytes=8 + table, draws=draw(st.floats(1, 60))) for table in range(draw(st.integers(0, 2))))
    first = draw(st.integers(-1, 1))
    x = st.one_of(st.integers(0, 2**25), st.just(2000 * 2**24))  # now and then a step so long that all before it settles
    drawn = st.tuples(*[x] * steps)
    return Job(
        rules=rules,
        table=LayerTable(
            key="test",
            layers=(Layer(name="all", forward=Nanoseconds(draw(ns)), backward=Nanoseconds(draw(ns))),),
            read=Nanoseconds(draw(FEW_NS)),
        ),
        traffic=Traffic(servers=servers, dense_bytes=draw(st.integers(0, 300)), tables=rows, header_bytes=draw(FEW_NS)),
        costs=Linear(
            push_ns=draw(ns),
            push_ns_per_byte=draw(st.sampled_from([0.0, 0.1, 1.0])),
            answer_ns=draw(FEW_NS),
            answer_ns_per_byte=draw(st.sampled_from([0.0, 0.1])),
            merge_ns=draw(ns),
            install_ns=draw(FEW_NS),
        ),
        hosts=Hosts(
            trainers=tuple(range(trainers)),
            servers=tuple(range(trainers, trainers + servers)) if draw(st.booleans()) else tuple(n % trainers for n in range(servers)),
            link=Link(bandwidth=BitsPerSecond(8 * 10**9), latency=Nanoseconds(draw(ns))),
            apart=True,
        ),
        steps=range(first, first + steps),
        draws=tuple(draw(drawn) for _ in range(trainers)),
        waits_each_step=draw(st.booleans()),
    )


def heard_pushes(execution: Execution) -> list[tuple[int, int, int, int, int]]:
    """Of every push, by server in the order in which it heard them: when, server, rank, count and staleness, by ``on`` replayed."""
    found = []
    for recording in execution.recordings:
        if recording.role != "server":
            continue
        decider = RoleDecider.start(recording.rules, "server", recording.rank, state=recording.initial)
        for now_ns, event, _ in recording.log:
            if isinstance(event, Message) and event.kind == "gradient":
                assert isinstance(decider.state, ServerState)
                found.append((now_ns, recording.rank, event.rank, event.count, staleness(decider.state, event)))
            decider.on(now_ns, event)
    return found


def same(job: Job) -> None:
    """Both executions agree in all that the twin knows."""
    order: list[tuple[int, int]] = []
    """Over all servers, of pushes in the order in which they were heard, which is that in which work on them began: server and rank."""

    class Noted(Linear):
        def took_ns(self, role: Role, rank: int, operation: Operation, nbytes: int) -> int:
            if operation.kind == "update":
                assert operation.rank is not None
                order.append((rank, operation.rank))
            return super().took_ns(role, rank, operation, nbytes)

    assert isinstance(job.costs, Linear)
    noted = Noted(**dataclasses.asdict(job.costs))
    execution, twin = execute(dataclasses.replace(job, costs=noted), record=True), execute_twin(job)
    assert [tuple(map(int, push[1:3])) for push in twin.pushes] == order
    heard = [tuple(map(int, push)) for server in range(job.rules.servers) for push in twin.pushes if push[1] == server]
    assert heard == heard_pushes(execution)
    for name, found in (("start_ns", twin.starts_ns), ("end_ns", twin.ends_ns), ("bytes_sent", twin.bytes_sent)):
        assert [getattr(record, name) for record in execution.records] == found.reshape(-1).tolist()
    for load, row in zip(execution.loads, twin.loads.tolist(), strict=True):
        assert row == [
            load.since_ns, load.until_ns, load.busy_ns, load.length, load.longest, load.length_ns, sum(load.waits_ns), len(load.waits_ns),
            load.staleness.total(), sum(stale * count for stale, count in load.staleness.items()),
        ]  # fmt: skip
    for server, load in enumerate(execution.loads):
        assert twin.waits_ns[twin.waits_ns[:, 0] == server, 1].tolist() == load.waits_ns
        assert {lag: count for lag, count in enumerate(twin.staleness[server].tolist()) if count} == load.staleness


@settings(max_examples=300, deadline=None)
@given(jobs())
def test_the_twin_is_the_strategy_on_simpys_clock(job: Job) -> None:
    """Every push is heard at the same nanosecond in the same order with the same staleness, every step begins and ends as there."""
    same(job)


def test_the_twin_agrees_on_a_longer_job() -> None:
    """Eight trainers, three servers, 300 steps of random times, queues that fill up."""
    generator = np.random.default_rng(0)
    steps = 300
    job = Job(
        rules=ServerRules(
            mode="asynchronous", trainers=8, servers=3, max_merge=4, queue_size=6, pushes_in_flight=2, sends_before_receive=3
        ),
        table=LayerTable(key="test", layers=(Layer(name="all", forward=Nanoseconds(3000), backward=Nanoseconds(7000)),)),
        traffic=Traffic(servers=3, dense_bytes=9000, header_bytes=40),
        costs=Linear(push_ns=900, push_ns_per_byte=0.2, answer_ns=300, merge_ns=500, install_ns=200),
        hosts=Hosts(
            trainers=tuple(range(8)),
            servers=(8, 9, 10),
            link=Link(bandwidth=BitsPerSecond(8 * 10**9), latency=Nanoseconds(1000)),
            apart=True,
        ),
        steps=range(-4, steps - 4),
        draws=tuple(map(tuple, generator.integers(0, 2**25, (8, steps)).tolist())),
    )
    same(job)


def test_the_twin_agrees_on_timers_that_are_set_back() -> None:
    """A gradient that has no push to wait for sets the timer back all the same: what two pushes leave goes out at 100 ns."""
    job = Job(
        rules=ServerRules(mode="asynchronous", trainers=1, servers=1, max_merge=2, queue_size=4, idle_ns=50, has_dense=False),
        table=LayerTable(key="test", layers=(Layer(name="all", forward=Nanoseconds(0), backward=Nanoseconds(10)),)),
        traffic=Traffic(servers=1),
        costs=Linear(push_ns=35),
        hosts=Hosts(trainers=(0,), servers=(1,), link=Link(bandwidth=BitsPerSecond(8)), apart=True),
        steps=range(1, 7),
        draws=((0, 0, 0, 0, 0, 44 * 2**24),),
    )
    same(job)
    assert execute_twin(job).pushes[:, [0, 3]].tolist() == [[20, 2], [55, 2], [100, 1], [500, 1]]


def test_the_twin_agrees_on_what_an_idle_push_leaves_over() -> None:
    """The timer runs out at 100 ns behind a push that takes 100: two of three gradients leave at 120, and the third behind them at 220."""
    job = Job(
        rules=ServerRules(mode="asynchronous", trainers=1, servers=1, max_merge=2, queue_size=4, idle_ns=50, has_dense=False),
        table=LayerTable(key="test", layers=(Layer(name="all", forward=Nanoseconds(0), backward=Nanoseconds(10)),)),
        traffic=Traffic(servers=1),
        costs=Linear(push_ns=100),
        hosts=Hosts(trainers=(0,), servers=(1,), link=Link(bandwidth=BitsPerSecond(8)), apart=True),
        steps=range(1, 7),
        draws=((0, 0, 0, 0, 0, 44 * 2**24),),
    )
    same(job)
    assert execute_twin(job).pushes[:, [0, 3]].tolist() == [[20, 2], [120, 2], [220, 1], [500, 1]]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rules": ServerRules(mode="geo_sgd", trainers=1, servers=1, k_steps=3)}, "asynchronous training alone, and this is GeoSGD"),
        ({"hosts": Hosts(trainers=(0,), servers=(1,), link=Link(bandwidth=BitsPerSecond(8)))}, "links that connections share"),
        ({"costs": type("Own", (), {"took_ns": lambda *_: 0})()}, "linear costs alone"),
    ],
)
def test_what_the_twin_does_not_know_is_refused(changes: dict[str, Any], match: str) -> None:
    """By name, with a hint."""
    costs: Costs = Linear()
    job = Job(
        rules=ServerRules(mode="asynchronous", trainers=1, servers=1),
        table=LayerTable(key="test", layers=(Layer(name="all", forward=Nanoseconds(1), backward=Nanoseconds(1)),)),
        traffic=Traffic(servers=1),
        costs=costs,
        hosts=Hosts(trainers=(0,), servers=(1,), link=Link(bandwidth=BitsPerSecond(8)), apart=True),
        steps=range(1, 3),
        draws=((0, 0),),
    )
    with pytest.raises(ConfigError, match=match) as caught:
        execute_twin(dataclasses.replace(job, **changes))
    assert caught.value.hint
