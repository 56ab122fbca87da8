"""MG-WFBP on the simulated clock: what merging by cost gains over every size of Fleet's pass, by hand.

Three gradients of 40 bytes, ready at 100, 1000 and 1050, which is the end of compute; among two
trainers an all-reduce takes 100 + S.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from sim_cases import in_ns, link, profiled, with_profile

from fleetbench.plan.fusion import Cost
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import all_reduce_cost, table_for
from fleetbench.quantities import MIB, BitsPerSecond
from fleetbench.result import RunResult
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
