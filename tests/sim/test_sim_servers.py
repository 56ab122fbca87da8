"""Simulated parameter servers against closed forms of queueing theory, and against jobs worked out by hand."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable
from math import factorial
from typing import Any

import numpy as np
import pytest

from fleetbench.cluster import Link
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.plan.operations import Operation
from fleetbench.plan.servers.rules import ServerRules
from fleetbench.plan.servers.states import Role
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.result import steps_table
from fleetbench.staleness import counts_of, load_of, quantiles_of
from sim.servers.actor import Costs, Job, Linear
from sim.servers.ports import Hosts
from sim.servers.simulate import Seen, execute
from sim.servers.traffic import TouchedRows, Traffic, traffic_of

MS = 1_000_000
ONE = 2**24
FAST = Link(bandwidth=BitsPerSecond(8 * 10**9))  # a byte a nanosecond


def job(trainers: int = 1, *, think_ns: int = MS, steps: int = 10, **changes: Any) -> Job:
    """Trainers that think for a constant time, on hosts of their own, and messages without size."""
    rules = {name: changes.pop(name) for name in list(changes) if name in ServerRules.__slots__}
    mode, servers = rules.pop("mode", "asynchronous"), rules.pop("servers", 1)
    table = LayerTable(key="test", layers=(Layer(name="all", forward=Nanoseconds(0), backward=Nanoseconds(think_ns)),))
    fields: dict[str, Any] = {
        "rules": ServerRules(mode=mode, trainers=trainers, servers=servers, **rules),
        "table": table,
        "traffic": Traffic(servers=servers),
        "costs": Linear(),
        "hosts": Hosts(trainers=tuple(range(trainers)), servers=tuple(range(trainers, trainers + servers)), link=FAST),
        "steps": range(1, steps + 1),
        "draws": ((0,) * steps,) * trainers,
    }
    return Job(**(fields | changes))


def thinks(trainers: int, steps: int, seed: int = 0, law: str = "exponential") -> tuple[tuple[int, ...], ...]:
    """X such that compute takes its time multiplied by draws of mean 1."""
    generator = np.random.default_rng(seed)
    drawn = generator.exponential(1.0, (trainers, steps)) if law == "exponential" else generator.uniform(0.5, 1.5, (trainers, steps))
    return tuple(map(tuple, np.rint((drawn - 1) * ONE).astype(int).tolist()))


class ExponentialService:
    """A server's work on a push, drawn again for each."""

    def __init__(self, mean_ns: float, seed: int = 0) -> None:
        self._mean_ns = mean_ns
        self._generator = np.random.default_rng(seed)

    def took_ns(self, role: str, rank: int, operation: Operation, nbytes: int) -> int:
        """See ``Costs``; the other two are not asked for."""
        del rank, nbytes
        return round(self._generator.exponential(self._mean_ns)) if role == "server" and operation.kind == "update" else 0


@dataclasses.dataclass
class Watched:
    """Costs that tell ``watch`` of a role, its rank and an operation as that begins."""

    costs: Costs
    watch: Callable[[str, int, Operation], None]

    def took_ns(self, role: Role, rank: int, operation: Operation, nbytes: int) -> int:
        """See ``Costs``."""
        self.watch(role, rank, operation)
        return self.costs.took_ns(role, rank, operation, nbytes)


def watched(job: Job, watch: Callable[[str, int, Operation], None]) -> Job:
    """The same job, whose operations ``watch`` hears of."""
    return dataclasses.replace(job, costs=Watched(job.costs, watch))


def mean_staleness(execution: Seen) -> float:
    """Over all pushes."""
    found = quantiles_of(counts_of(execution.loads))
    assert found is not None
    return found["mean"]


def wall_ns(execution: Seen) -> int:
    """From the beginning to the last step's end."""
    return max(record.end_ns for record in execution.records)


@pytest.mark.sample(3)
@pytest.mark.parametrize("trainers", [1, 2, 5, 9])
def test_in_the_closed_loop_a_push_misses_the_others_updates(trainers: int) -> None:
    """N symmetric trainers that wait for their own push and pull: N - 1 updates of others lie between, in the mean (within 2 %)."""
    steps = 400
    execution = execute(job(trainers, steps=steps, draws=thinks(trainers, steps, law="uniform"), waits_each_step=True))
    assert execution.loads[0].staleness.total() == trainers * steps
    assert mean_staleness(execution) == pytest.approx(trainers - 1, rel=0.02)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("trainers", "think_ms", "latency_ms"), [(2, 3, 1), (6, 3, 1), (6, 1, 2)])
def test_staleness_follows_littles_law_with_think_times(trainers: int, think_ms: int, latency_ms: int) -> None:
    """Trainers that do not disturb each other: of a cycle of think + 4 latencies, parameters are under way or in use for think + 2.

    By Little's law (N - 1)(Z + 2L) / (Z + 4L) of the others' updates fall into it, within 2 %.
    """
    steps = 600
    link = dataclasses.replace(FAST, latency=Nanoseconds(latency_ms * MS))
    hosts = Hosts(trainers=tuple(range(trainers)), servers=(trainers,), link=link)
    draws = thinks(trainers, steps)
    execution = execute(job(trainers, think_ns=think_ms * MS, steps=steps, draws=draws, hosts=hosts, waits_each_step=True))
    expected = (trainers - 1) * (think_ms + 2 * latency_ms) / (think_ms + 4 * latency_ms)
    assert mean_staleness(execution) == pytest.approx(expected, rel=0.02)
    cycles = wall_ns(execution) / steps / MS
    assert cycles == pytest.approx(think_ms + 4 * latency_ms, rel=0.06)  # the longest of N sums of exponential times


def test_staleness_is_what_a_plain_count_gives() -> None:
    """Whatever queues build up, the histogram is that of the updates between the answer to a trainer's pull and its next update."""
    trainers, steps = 5, 200
    version, read, counted = 0, [0] * trainers, Counter[int]()

    def watch(role: str, _rank: int, operation: Operation) -> None:
        nonlocal version
        if role == "server" and operation.kind == "update":
            assert operation.rank is not None
            counted[version - read[operation.rank]] += 1
            version += 1
        elif role == "server" and operation.payload == "parameters":
            assert operation.rank is not None
            read[operation.rank] = version

    closed = job(
        trainers, steps=steps, draws=thinks(trainers, steps), costs=Linear(push_ns=MS // 3, answer_ns=MS // 10), waits_each_step=True
    )
    execution = execute(watched(closed, watch))
    assert execution.loads[0].staleness == counted
    assert 0 < mean_staleness(execution) < trainers - 1


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(("trainers", "service_ms"), [(1, 3), (4, 3), (4, 12)])
def test_the_queue_is_the_machine_repairmans(trainers: int, service_ms: int) -> None:
    """Exponential think (10 ms) and service, no pulls: M/M/1//N's throughput and utilisation within 3 %."""
    think_ms, steps = 10, 1500 if trainers == 4 else 6000
    execution = execute(
        job(
            trainers,
            think_ns=think_ms * MS,
            steps=steps,
            draws=thinks(trainers, steps),
            costs=ExponentialService(service_ms * MS),
            has_dense=False,
            waits_each_step=True,
        )
    )
    ratio = service_ms / think_ms
    idle = 1 / sum(factorial(trainers) / factorial(trainers - n) * ratio**n for n in range(trainers + 1))
    throughput = (1 - idle) / (service_ms / 1000)
    found: Any = load_of(execution.loads)
    assert found["gradients_per_s"] == pytest.approx(throughput, rel=0.03)
    assert found["utilisation"] == pytest.approx(1 - idle, rel=0.03)


def arrivals(made: Job) -> list[tuple[int, int]]:
    """When each push has arrived whole, in ns, by trainer; servers work on it in no time."""
    made = dataclasses.replace(made, costs=Linear())
    execution = execute(made, record=True)
    return sorted(
        (now_ns, event.rank)
        for recording in execution.recordings
        if recording.role == "server"
        for now_ns, event, _ in recording.log
        if getattr(event, "kind", None) in ("gradient", "delta") and now_ns > 0
    )


def test_trainers_that_push_at_once_share_the_servers_link() -> None:
    """Incast by hand: three pushes of 3 MB on a link of 1 byte/ns end together after 9 ms, after a millisecond of thinking."""
    traffic = Traffic(servers=1, dense_bytes=3 * MS)
    assert arrivals(job(3, steps=1, traffic=traffic)) == [(10 * MS, rank) for rank in range(3)]
    late = ((0,), (ONE,))  # trainer 1 pushes a millisecond later
    first, second = arrivals(job(2, steps=1, traffic=traffic, draws=late))
    assert first == (6 * MS, 0)  # 1 ms alone, then half of the link for 2 MB: 1 + 1 + 4
    assert second == (7 * MS, 1)  # 2 MB in 4 ms, then 1 MB alone


def test_two_servers_double_the_link_but_not_a_trainers_own() -> None:
    """Shards of 1.5 MB to each of two servers: one trainer's link is the limit, 3 ms; for three the servers' are, 4.5 ms."""
    traffic = Traffic(servers=2, dense_bytes=3 * MS)
    assert {now for now, _ in arrivals(job(1, servers=2, steps=1, traffic=traffic))} == {4 * MS}
    assert {now for now, _ in arrivals(job(3, servers=2, steps=1, traffic=traffic))} == {MS + 4_500_000}


def test_servers_on_the_trainers_nodes_share_their_links() -> None:
    """Server 0 on node 0: its own trainer's push arrives at once, the other node's crosses the link alone."""
    hosts = Hosts(trainers=(0, 1), servers=(0,), link=dataclasses.replace(FAST, latency=Nanoseconds(500)))
    found = arrivals(job(2, steps=1, traffic=Traffic(servers=1, dense_bytes=3 * MS), hosts=hosts))
    assert found == [(MS, 0), (4 * MS + 500, 1)]


def test_a_full_queue_slows_the_trainer_to_the_servers_pace() -> None:
    """Thinking takes 1 ms and an update 5: a trainer is three steps ahead when its queue of two is full, then has the server's pace.

    Its last step ends with the last of 20 updates, which follow each other from the first push on.
    """
    execution = execute(job(1, steps=20, costs=Linear(push_ns=5 * MS), has_dense=False, queue_size=2))
    steps = [record.end_ns - record.start_ns for record in execution.records]
    assert steps[:3] == [MS, MS, MS]
    assert set(steps[5:-1]) == {5 * MS}
    assert [record.stall_ns for record in execution.records[5:-1]] == [4 * MS] * 14
    assert wall_ns(execution) == MS + 20 * 5 * MS


def test_synchronous_steps_are_as_long_as_their_parts() -> None:
    """The slowest trainer's compute, pushes and answers that share the server's link, one update: 2 + 6 + 4 + 6 ms, nothing stale."""
    traffic = Traffic(servers=1, dense_bytes=3 * MS)
    execution = execute(job(2, mode="synchronous", steps=3, traffic=traffic, costs=Linear(push_ns=4 * MS), draws=((ONE,) * 3, (ONE,) * 3)))
    assert [record.end_ns for record in execution.records if record.rank == 0] == [18 * MS, 36 * MS, 54 * MS]
    assert set(execution.loads[0].staleness) == {0}


@pytest.mark.parametrize(("tables", "looks_up_ms"), [((), 0), ((TouchedRows(rows=9, row_bytes=8, draws=0.0),), 2)], ids=["dense", "rows"])
def test_synchronous_trainers_wait_for_the_slowest_and_for_their_servers(tables: tuple[TouchedRows, ...], looks_up_ms: int) -> None:
    """Over 1 ms of latency: rank 0 is ready after 1 ms of compute and waits 2 for rank 1; both then wait 2 for push and answer.

    So long do rows take that are looked up before the forward. Waiting for a trainer and for a server are told apart.
    """
    link = Link(bandwidth=FAST.bandwidth, latency=Nanoseconds(MS))
    hosts = Hosts(trainers=(0, 1), servers=(2,), link=link)
    steps = 4
    made = job(
        2, mode="synchronous", steps=steps, hosts=hosts, traffic=Traffic(servers=1, tables=tables), draws=((0,) * steps, (2 * ONE,) * steps)
    )
    table = steps_table(execute(made).records)
    for rank, wait_ms in ((0, 2), (1, 0)):
        own = table[table["rank"] == rank]
        assert (own["wait_s"] * 1e3).tolist() == pytest.approx([wait_ms] * steps)
        assert (own["exposed_comm_s"] * 1e3).tolist() == pytest.approx([2 + looks_up_ms] * steps)
        assert (own["arrival_s"] * 1e3).tolist() == pytest.approx(
            [(5 + looks_up_ms) * step + looks_up_ms + 3 - wait_ms for step in range(steps)]
        )


def test_geo_sgd_pulls_what_others_have_changed() -> None:
    """An answer to a pull carries dense parameters whole, and the rows of the steps that others have pushed since the last one."""
    table = TouchedRows(rows=1000, row_bytes=8, draws=10.0, number_bytes=8)
    traffic = Traffic(servers=1, dense_bytes=160, tables=(table,))
    seen: dict[str, list[int]] = defaultdict(list)

    class Sizes(Linear):
        def took_ns(self, role: Any, rank: int, operation: Operation, nbytes: int) -> int:
            del rank
            if role == "server" and operation.kind in ("accumulate", "send") and nbytes:
                seen[operation.kind].append(nbytes)
            return 0

    hosts = Hosts(trainers=(0, 1, 2), servers=(3,), link=dataclasses.replace(FAST, latency=Nanoseconds(1000)))
    execute(job(3, mode="geo_sgd", k_steps=4, steps=8, traffic=traffic, costs=Sizes(), hosts=hosts))
    one = 160 + round(16 * 1000 * (1 - 0.999**40))
    assert seen["accumulate"] == [one] * 6
    two = 160 + round(16 * 1000 * (1 - 0.999**80))  # the four steps of each of the two others, after each of two exchanges
    assert seen["send"] == [two] * 6


def test_a_layer_tables_sparse_gradients_are_touched_in_part() -> None:
    """Dense gradients whole; of 1,000 sparse numbers a step touches 100, two steps 190; touched numbers that nobody knows are all."""
    gradients = [
        Gradient(name="a.weight", numel=50, ready=Nanoseconds(0)),
        Gradient(name="b.weight", numel=1000, sparse=True, touched=100, ready=Nanoseconds(0)),
        Gradient(name="c.weight", numel=30, sparse=True, ready=Nanoseconds(0)),
    ]
    traffic = traffic_of(gradients, 1)
    assert [traffic.push(steps) for steps in (1, 2)] == [4 * (50 + 100 + 30), 4 * (50 + 190 + 30)]
    assert traffic.push(0) == 200
    assert traffic_of(gradients, 2).push(1) == 360


def test_rows_are_looked_up_before_the_forward() -> None:
    """A step waits for its rows, there and back, before it computes; pushes then carry the rows that were touched."""
    table = TouchedRows(rows=10**6, row_bytes=900, draws=1000.0, number_bytes=100)
    link = dataclasses.replace(FAST, latency=Nanoseconds(1000))
    hosts = Hosts(trainers=(0,), servers=(1,), link=link)
    made = job(1, steps=3, traffic=Traffic(servers=1, tables=(table,)), has_dense=False, hosts=hosts, waits_each_step=True)
    execution = execute(made)
    rows = table.distinct(1)
    look_up_ns = 1000 + round(rows * 100) + 1000 + round(rows * 900)
    push_ns = 1000 + round(rows * 1000) + 1000
    assert [record.end_ns for record in execution.records] == [n * (look_up_ns + MS + push_ns) for n in (1, 2, 3)]
    assert {record.stall_ns for record in execution.records} == {look_up_ns + push_ns}
    assert {record.bytes_sent for record in execution.records} == {round(rows * 100) + round(rows * 1000)}
    assert execution.loads[0].staleness == Counter({0: 3})
