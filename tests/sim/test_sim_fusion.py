"""MG-WFBP on the simulated clock: what merging by cost gains over every size of Fleet's pass, by hand.

Three gradients of 40 bytes, ready at 100, 1000 and 1050, which is the end of compute; among two
trainers an all-reduce takes 100 + S.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from sim_cases import carried_ns, in_ns, layered, link, profiled, with_profile

from fleetbench.experiment import Experiment
from fleetbench.plan.fusion import Cost
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import all_reduce_cost, table_for
from fleetbench.quantities import MIB, BitsPerSecond
from fleetbench.result import RunResult
from fleetbench.stragglers import SlowRank
from plan.transfers import end_ns, partitions
from sim.many.objective import StepTime
from sim.network.algorithms import ring
from sim.network.links import Links
from sim.run import Engine, simulate
from sim.scenario import setting_of

FUSE = {"fuse_all_reduce_ops": True}
LAYERS = [([10], [1_050], 0, 50), ([10], [1_000], 0, 900), ([10], [100], 0, 100)]


def run(strategy: dict[str, Any], **options: Any) -> RunResult:
    """The case of this file under a fusion."""
    experiment, profile = profiled(LAYERS, {}, inter=link(8, 50), strategy=strategy, **options)
    return simulate(with_profile(experiment, profile))


def test_merging_by_cost_sends_the_first_alone_and_the_others_together() -> None:
    """The second is not ready within the first one's latency, the third within the second's: 1050 to 1230."""
    result = run(FUSE | {"fusion": "merged_gradient"})
    assert [bucket.gradients for bucket in result.plan.buckets] == [("layer2.p0",), ("layer1.p0", "layer0.p0")]
    assert carried_ns(result) == {"all_reduce 0": (100, 240), "all_reduce 1": (1_050, 1_230)}
    assert in_ns(result, "exposed_comm_s") == [180, 180]


@pytest.mark.slow
def test_no_size_of_buckets_is_as_fast() -> None:
    """One each ends at 1280, the first two together at 1320, all together at 1270: every size and count is one of these."""
    stalls = set()
    for nbytes in range(0, 140, 20):
        for count in (0, 1, 2, 3):
            # A group closes when it has more than the count: two gradients need a count of 1, which means no cap.
            result = run(FUSE | {"fuse_grad_size_in_MB": nbytes / MIB, "fuse_grad_count": count})
            stalls.add(in_ns(result, "exposed_comm_s")[0])
    assert stalls == {230, 270, 220}
    assert in_ns(run({"fuse_all_reduce_ops": False}), "exposed_comm_s") == [230, 230]


@pytest.mark.sample(2)
@pytest.mark.parametrize("engine", ["reference", "vector"])
def test_the_best_partition_is_the_fastest_on_the_simulated_clock(engine: Engine) -> None:
    """Ten layers 70 ns apart at 100 + S: as fast as the best of all 512 partitions, which no size is, and MG-WFBP merges everything."""
    layers = [([10], [70 * (10 - number)], 0, 70) for number in range(10)]

    def ends_ns(fusion: dict[str, Any]) -> int:
        experiment, profile = profiled(layers, {}, inter=link(8, 50), strategy=FUSE | fusion)
        return 700 + in_ns(simulate(with_profile(experiment, profile), engine=engine), "exposed_comm_s")[0]

    best = ends_ns({"fusion": "optimal"})
    ready, sizes = [70 * (number + 1) for number in range(10)], [40] * 10
    assert best == min(end_ns(groups, (ready, sizes, 100.0, 1.0)) for groups in partitions(10))
    assert ends_ns({"fusion": "merged_gradient"}) == 700 + 100 + 10 * 40 > best
    assert min(ends_ns({"fuse_grad_size_in_MB": 40 * number / MIB, "fuse_grad_count": 0}) for number in range(11)) > best


@pytest.mark.parametrize(
    ("nodes", "per_node", "cost"),
    [
        (2, 2, Cost(latency_ns=3_030.0, ns_per_byte=1.5)),  # 6 of 8 hops, three of each; 6/4 of the bytes inside
        (2, 4, Cost(latency_ns=4_100.0, ns_per_byte=1.75)),  # 14 of 16: all four between nodes, ten of twelve inside
        (3, 1, Cost(latency_ns=4_000.0, ns_per_byte=0.4 / 3)),
        (1, 4, Cost(latency_ns=60.0, ns_per_byte=1.5)),
    ],
)
def test_the_cost_is_that_of_a_chunks_hops_and_of_the_slowest_port(nodes: int, per_node: int, cost: Cost) -> None:
    """Between nodes 1000 ns and 0.1 ns a byte; inside, 10 ns and 1 ns a byte."""
    four, profile = profiled(LAYERS, {}, nodes=nodes, trainers_per_node=per_node, intra=link(8, 10), inter=link(80, 1_000))
    found = all_reduce_cost(with_profile(four, profile), table_for(with_profile(four, profile)))
    assert (found.latency_ns, found.ns_per_byte) == (cost.latency_ns, pytest.approx(cost.ns_per_byte))
    limited = dataclasses.replace(link(80, 1_000), flow_limit=BitsPerSecond(10**9))
    slow, profile = profiled(LAYERS, {}, nodes=2, trainers_per_node=1, intra=link(8, 10), inter=limited)
    assert all_reduce_cost(with_profile(slow, profile), table_for(with_profile(slow, profile))).ns_per_byte == 8.0  # one connection's
    alone, profile = profiled(LAYERS, {}, nodes=1, trainers_per_node=1, intra=link(8, 10), inter=link(80, 1_000))
    assert all_reduce_cost(with_profile(alone, profile), table_for(with_profile(alone, profile))) == Cost(latency_ns=0.0, ns_per_byte=0.0)


def test_the_lines_of_the_cost_are_what_a_simulated_ring_takes() -> None:
    """At every size, where latencies of hops decide, where the slowest port does, and between."""
    four, profile = profiled(
        LAYERS, {}, strategy=FUSE | {"fusion": "optimal"}, nodes=3, trainers_per_node=4, intra=link(240, 3_000), inter=link(80, 20_000)
    )
    four = with_profile(four, profile)
    cost, links = all_reduce_cost(four, table_for(four)), Links.of(four)
    simulated = ring("all_reduce", range(12), links)
    assert len(cost.lines) > 2
    for nbytes in (0, 1, 10**4, 10**5, 3 * 10**5, 10**6, 10**7, 10**9):
        route = simulated.route(nbytes)
        took_ns = float(route.cost.latency_ns + route.cost.transfer_ns)
        assert max(latency + rate * nbytes for latency, rate in cost.lines) == pytest.approx(took_ns, rel=1e-12)


def drawn(draw: random.Random) -> Experiment:
    """Layers, links and trainers at random: latencies that decide, and none; gradients that are ready together, and far apart."""
    layers = [(draw.choice([1_000, 10**5, 10**6, 4 * 10**6]), 1, draw.randint(0, 3_000_000)) for _ in range(draw.randint(3, 25))]
    links = [link(draw.choice([1, 10, 100, 1000]), draw.choice([0, 3_000, 20_000, 200_000])) for _ in range(2)]
    nodes, per_node = draw.choice([1, 2, 4]), draw.choice([2, 4, 8])
    return layered(layers, nodes=nodes, trainers_per_node=per_node, intra=links[0], inter=links[1], strategy=FUSE)


@pytest.mark.parametrize("seed", range(12))
def test_no_fixed_size_is_faster_on_the_simulated_clock(seed: int) -> None:
    """Of ten sizes, and one bucket for each gradient or for all; each bucket's end is rounded to a nanosecond."""
    experiment = drawn(random.Random(seed))  # noqa: S311  # test cases, no secret
    step_s = StepTime(experiment)
    best = step_s(experiment.strategy.replace(fusion="optimal"))
    for size in (0, 0.01, 0.1, 0.5, 1, 2, 4, 8, 16, 32, 64):
        assert best <= step_s(experiment.strategy.replace(fuse_grad_size_in_MB=size, fuse_grad_count=0)) + 30e-9, size


@pytest.mark.parametrize("seed", range(6))
def test_no_fixed_size_is_faster_where_compute_and_exchange_disturb_each_other(seed: int) -> None:
    """As above, by 1 % at most: starting takes compute, and on the cores of a CPU both slow each other."""
    draw = random.Random(seed)  # noqa: S311  # test cases, no secret
    layers, ready = [], 0
    for _ in range(draw.randint(5, 40)):
        backward = draw.randint(10**5, 3 * 10**6)
        ready += backward
        layers.append(([draw.choice([1_000, 10**5, 10**6])], [ready], 1, backward))
    disturbs = {
        "host_per_collective": draw.choice([0, 10**5, 10**6]),
        "contention": draw.choice([0.0, 0.5, 2.0]),
        "collective_contention": draw.choice([0.0, 0.5, 2.0]),
    }
    case = profiled(layers[::-1], disturbs, nodes=2, trainers_per_node=1, inter=link(draw.choice([100, 1000]), 10**5), strategy=FUSE)
    step_s = StepTime(with_profile(*case))
    best = step_s(case[0].strategy.replace(fusion="optimal"))
    for size in (0, 0.01, 0.1, 0.5, 1, 2, 4, 8, 16, 32, 64):
        assert best <= 1.01 * step_s(case[0].strategy.replace(fuse_grad_size_in_MB=size, fuse_grad_count=0)), size


def test_stragglers_delay_what_it_plans_by() -> None:
    """Where every step takes twice as long, it plans for gradients that are ready twice as late, which need more buckets."""
    layers = [(40, 0, 100)] * 10
    plain = layered(layers, inter=link(8, 40), strategy=FUSE | {"fusion": "optimal"}, steps=2)
    late = plain.replace(cluster=dataclasses.replace(plain.cluster, stragglers=(SlowRank(ranks=(1,), factor=2.0),)))
    twice = layered([(40, 0, 200)] * 10, inter=link(8, 40), strategy=FUSE | {"fusion": "optimal"}, steps=2)
    groups = [[bucket.gradients for bucket in simulate(case).plan.buckets] for case in (plain, late, twice)]
    assert all_reduce_cost(late, table_for(late)).slowest == 2.0
    assert len(groups[0]) < len(groups[1])
    assert groups[1] == groups[2]


@pytest.mark.parametrize(("optimizer", "num_state_slots"), [("sgd", 0), ("momentum", 1), ("adagrad", 1), ("adam", 2)])
def test_the_setting_of_an_experiment(optimizer: str, num_state_slots: int) -> None:
    """Trainers, their nodes, the optimizer's tensors, the table's buffers, and a cost: of ten hops of a chunk five are between nodes."""
    experiment, profile = profiled(
        LAYERS, {"buffers_nbytes": 12}, nodes=3, trainers_per_node=2, intra=link(80), inter=link(8, 50), also={"optimizer": optimizer}
    )
    table: LayerTable = profile.tables[0]
    setting = setting_of(with_profile(experiment, profile), table)
    assert (setting.trainers, setting.trainers_per_node) == (6, 2)
    assert (setting.num_state_slots, setting.buffers_nbytes) == (num_state_slots, 12)
    assert setting.cost == Cost(latency_ns=250.0, ns_per_byte=pytest.approx(10 / 6))
