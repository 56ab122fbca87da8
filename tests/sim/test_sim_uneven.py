"""Nodes with different numbers of trainers and different links, against closed forms."""

from __future__ import annotations

from typing import Any

import pytest

from fleetbench.cluster import Cluster, NodeOverride
from fleetbench.experiment import Experiment
from fleetbench.profile import all_reduce_cost, table_for
from fleetbench.stragglers import ONE, SlowNode, draws
from sim.network.links import Links
from sim.run import Engine, simulate

PARAMS = 250_000
NBYTES = 4 * PARAMS
COMPUTE_NS = 3_000_000
ENGINES: tuple[Engine, ...] = ("reference", "vector")


def experiment(overrides: list[dict[str, Any]], strategy: dict[str, Any] | None = None, **cluster: Any) -> Experiment:
    """Two nodes of two trainers, 80 Gbit/s inside and 1 Gbit/s between, but for the overrides; one layer, one bucket."""
    base = {
        "nodes": 2,
        "trainers_per_node": 2,
        "intra": {"bandwidth": "80 Gbit/s", "payload": True, "latency": "1 us"},
        "inter": {"bandwidth": "1 Gbit/s", "payload": True, "latency": "50 us"},
        "node_overrides": overrides,
    }
    layer = {"name": "block", "params": PARAMS, "forward": "1 ms", "backward": "2 ms"}
    workload = {"model": "layers", "steps": 3, "layers": [layer]}
    return Experiment.from_dict({"name": "x", "workload": workload, "cluster": base | cluster, "strategy": strategy or {}})


def step_ns(found: Experiment, engine: Engine) -> float:
    """Of a step."""
    return simulate(found, engine=engine).summary.step_s["mean"] * 1e9


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("trainers", "ranks", "latency_us", "planned_us"), [(1, 3, 100, 2 * 101 - 51), (4, 6, 50, 2 * 104 - 2)])
def test_a_ring_has_as_many_ranks_as_trainers(engine: Engine, trainers: int, ranks: int, latency_us: int, planned_us: int) -> None:
    """2 + n trainers: 2 (P - 1) messages of S / P, all between nodes.

    By hand: the longest chain stays at a slow hop; where the next hop is as slow, it moves there once and has its latency, too.
    The planned cost has every hop's latency twice, but for two in a row.
    """
    found = experiment([{"nodes": [1], "trainers": trainers}])
    assert found.cluster.trainers == ranks
    transfer_ns = 2 * (ranks - 1) / ranks * NBYTES * 8
    assert step_ns(found, engine) == pytest.approx(COMPUTE_NS + 1000 * latency_us + transfer_ns, abs=2)
    cost = all_reduce_cost(found, table_for(found))
    assert cost.latency_ns + cost.ns_per_byte * NBYTES == pytest.approx(1000 * planned_us + transfer_ns)


def test_ranks_are_counted_through_the_nodes() -> None:
    """Nodes of 2, 3, 1 and 2 trainers, and two interfaces each; the last override counts."""
    overrides = (NodeOverride(nodes=(1, 2), trainers=3), NodeOverride(nodes=(2,), trainers=1))
    cluster = Cluster(nodes=4, trainers_per_node=2, node_overrides=overrides)
    assert (cluster.trainers, cluster.trainers_by_node, cluster.node_by_rank) == (8, (2, 3, 1, 2), (0, 0, 1, 1, 1, 2, 3, 3))
    links = Links.of(experiment([{"nodes": [1, 2], "trainers": 3}, {"nodes": [2], "trainers": 1}], nodes=4, nics_per_node=2))
    assert [links.node(rank) for rank in range(8)] == [0, 0, 1, 1, 1, 2, 3, 3]
    assert [links.local_rank(rank) for rank in range(8)] == [0, 1, 0, 1, 2, 0, 0, 1]
    assert [links.hop(rank, 7 if rank < 6 else 0).ports[0][1] for rank in range(8)] == [0, 1, 2, 3, 2, 4, 6, 7]
    drawn = draws((SlowNode(nodes=(1,), factor=2.0),), 0, 8, cluster.node_by_rank, 1, 1)
    assert (drawn[:, 0] // ONE).tolist() == [0, 0, 1, 1, 1, 0, 0, 0]
