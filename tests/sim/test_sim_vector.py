"""The vector engine's parts: rounding, groups, shared links, blocks side by side."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_cases import layered, link

from fleetbench.plan.operations import Operation
from fleetbench.result import step_s_of, summarise
from fleetbench.stragglers import Jitter
from sim.arrays.layout import Layout
from sim.arrays.program import script_of
from sim.arrays.shared_links import Wires
from sim.clock import Clock
from sim.many.objective import StepTime
from sim.reference.network import Collectives, Network
from sim.run import simulate
from sim.scenario import Scenario


@given(st.data())
def test_shared_links_carry_as_the_reference_does(data: st.DataObject) -> None:
    """Random all-reduces on up to three communicators of depth one or two: starts and ends of SimPy's queues and ports, block by block."""
    count, communicators = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    strategy = {"sync_nccl_allreduce": False, "nccl_comm_num": communicators}
    options: dict[str, Any] = {"inter": link(data.draw(st.sampled_from([8.0, 7.3])), data.draw(st.sampled_from([0, 40]))), "nodes": 3}
    sizes = data.draw(st.lists(st.integers(1, 700), min_size=count, max_size=count))
    backend = data.draw(st.sampled_from(["gloo", "nccl"]))
    scenario = Scenario.of(layered([(size, 10, 10) for size in sizes], strategy=strategy, backend=backend, **options))
    script = script_of(scenario)
    from sim.network.routes import Routes

    layout = Layout(scenario.plan, Routes(scenario.links))
    operations = [join.operation for join in script.programs[0].joins]
    gaps = data.draw(st.lists(st.lists(st.integers(0, 900), min_size=count, max_size=count), min_size=1, max_size=3))
    ready = np.cumsum(np.asarray(gaps), axis=1).T
    starts, ends = Wires(layout, operations).carry(ready)
    for block in range(ready.shape[1]):
        found = reference(scenario, operations, ready[:, block].tolist())
        assert found == [(int(start), int(end)) for start, end in zip(starts[:, block], ends[:, block], strict=True)]


def reference(scenario: Scenario, operations: list[Operation], ready_ns: list[int]) -> list[tuple[int, int]]:
    """Starts and ends of collectives that all trainers join at these times, by the reference engine's queues and network."""
    clock = Clock()
    found: dict[int, tuple[int, int]] = {}

    def tell(operation: Operation, _ranks: tuple[int, ...], start_ns: int, end_ns: int) -> None:
        found[operation.id] = (start_ns, end_ns)

    collectives = Collectives(clock, Network(clock, scenario.links), scenario.plan.queue_depth, tell)
    ranks = tuple(range(scenario.plan.trainers))

    def joins() -> Any:
        ends: dict[int, Any] = {}
        for operation, then in zip(operations, ready_ns, strict=True):
            yield clock.until(then)
            meetings = [collectives.join(operation, ranks, [ends[other] for other in operation.after]) for _ in ranks]
            ends[operation.id] = meetings[0].end
        yield clock.all_of(ends.values())

    clock.run(clock.process(joins()))
    return [found[operation.id] for operation in operations]


@pytest.mark.parametrize(
    ("strategy", "rounds"),
    [
        ({}, 1),
        ({"localsgd": True, "localsgd_configs": {"k_steps": 16}}, 16),
        ({"localsgd": True, "localsgd_configs": {"k_steps": 16, "outer_lr": 0.7, "outer_momentum": 0.9}}, 16),
        ({"localsgd": True, "localsgd_configs": {"k_steps": 4}, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 4}}, 16),
        ({"gradient_merge": True, "gradient_merge_configs": {"k_steps": 8}}, 8),
    ],
)
def test_a_step_of_whole_rounds_costs_the_same_in_runs_of_any_length(strategy: dict[str, Any], rounds: int) -> None:
    """Its compute, and that share of the exchange that a synchronous step pays; though a run also begins and ends with one."""
    compute_s, layers = 60e-6, [(25_000, 20_000, 40_000)]
    synchronous = layered(layers, nodes=2, inter=link(8, 10))
    exchange_s = StepTime(synchronous)(synchronous.strategy) - compute_s
    for steps in (rounds + 2, rounds + 9, 3 * rounds + 2):
        experiment = layered(layers, nodes=2, inter=link(8, 10), steps=steps, strategy=strategy)
        assert step_s_of(simulate(experiment)) == pytest.approx(compute_s + exchange_s / rounds, rel=1e-6), steps


@pytest.mark.parametrize("cut", [range(1, 3), range(30, 34), range(57, 59)])
@pytest.mark.parametrize("k_steps", [1, 16])
def test_a_run_with_steps_left_out_is_priced_from_end_to_end(k_steps: int, cut: range) -> None:
    """As steps beside a script's evaluations are: where an exchange was among them, rounds cannot be told by their numbers."""
    strategy = {"localsgd": True, "localsgd_configs": {"k_steps": k_steps}} if k_steps > 1 else {}
    experiment = layered([(25_000, 20_000, 40_000)], nodes=2, inter=link(8, 10), steps=60, strategy=strategy)
    whole = simulate(experiment)
    kept = whole.steps[~whole.steps["step"].isin(cut)]
    run = dataclasses.replace(whole, steps=kept, summary=summarise(experiment, kept, executor="real", run_id="cut"))
    assert step_s_of(run) == pytest.approx(run.summary.wall_s / (60 - len(cut)))


@pytest.mark.parametrize(
    "strategy",
    [
        {},
        {"sync_nccl_allreduce": False, "nccl_comm_num": 2},
        {"localsgd": True, "localsgd_configs": {"k_steps": 3}},
        {"use_hierarchical_allreduce": True, "hierarchical_variant": "reduce_scatter"},
    ],
)
def test_the_objective_is_what_a_run_takes(strategy: dict[str, Any]) -> None:
    """The same seconds a step as by ``simulate``, strategy after strategy, also where the reference engine has to run it."""
    options: dict[str, Any] = {"nodes": 2, "trainers_per_node": 2, "intra": link(16, 5), "inter": link(8, 10)}
    experiment = layered([(250, 900, 700), (900, 10, 1_500)], steps=20, warmup_steps=2, stragglers=(Jitter(mean=0.5),), **options)
    step_s = StepTime(experiment)
    for _ in range(2):
        asked = experiment.strategy.replace(
            **{name: value for name, value in strategy.items() if not isinstance(value, dict)},
        )
        if "localsgd_configs" in strategy:
            asked = layered([(250, 900, 700)], strategy=strategy).strategy
        assert step_s(asked) == pytest.approx(step_s_of(simulate(experiment.replace(strategy=asked), timeline=False)), rel=1e-12)
        assert step_s(experiment.strategy) > 0


@pytest.mark.parametrize(
    "strategy",
    [
        {},
        {"nccl_comm_num": 2, "sync_nccl_allreduce": False},
        {"fuse_all_reduce_ops": True, "sharding": True, "sharding_configs": {"stage": 3, "sharding_degree": 2}},
    ],
    ids=["even", "shared", "uneven"],
)
def test_runs_of_several_seeds_side_by_side_are_those_alone(strategy: dict[str, Any]) -> None:
    """Steps that end together, links that collectives share, and steps that each replica of a shard group ends by itself."""
    options: dict[str, Any] = {"nodes": 2, "trainers_per_node": 2, "intra": link(16, 5), "inter": link(8, 10), "backend": "nccl"}
    layers = [(250, 900, 700), (900, 10, 1_500)]
    experiment = layered(layers, steps=20, stragglers=(Jitter(mean=0.5),), strategy=strategy, **options)
    alone = [simulate(experiment.replace(run=dataclasses.replace(experiment.run, seed=seed)), timeline=False) for seed in (3, 1, 7)]
    found = StepTime(experiment, seeds=(3, 1, 7)).by_seed(experiment.strategy)
    assert len(set(found)) == 3
    assert found == pytest.approx([step_s_of(run) for run in alone], rel=1e-12)
