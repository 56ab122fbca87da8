"""What a run gains without its stragglers, without one rank, and with infinite bandwidth."""

from __future__ import annotations

import dataclasses

import pytest
from sim_cases import layered, link

from fleetbench.quantities import BitsPerSecond
from fleetbench.stragglers import Jitter, SlowNode, SlowRank
from sim.many.what_if import what_if, with_infinite_bandwidth
from sim.run import simulate

# 100 + 200 ns, then 1000 bytes among two trainers: 20 + 1000 ns after the backward.
LAYER = [(250, 100, 200)]


def gains(*args: object, **options: object) -> dict[str, float]:
    """Every case's gain by its name."""
    return {case.name: case.gain for case in what_if(*args, **options)}  # type: ignore[arg-type]  # passed on


def test_every_gain_by_hand() -> None:
    """Rank 1 takes 600 and rank 2 450 of 300: 2160 ns a step as it is; each case takes away its part, to the nanosecond."""
    stragglers = (SlowRank(ranks=(1,), factor=2.0), SlowRank(ranks=(2,), factor=1.5))
    experiment = layered(LAYER, nodes=4, inter=link(8, 10), steps=3, stragglers=stragglers)
    network = 6 * 10 + 1500
    assert gains(experiment) == {
        "as it is": 1.0,
        "without stragglers": pytest.approx((600 + network) / (300 + network)),
        "without rank 1": pytest.approx((600 + network) / (450 + network)),
        "with infinite bandwidth": pytest.approx((600 + network) / (600 + 60)),
        "with neither": pytest.approx((600 + network) / (300 + 60)),
    }


def test_a_slow_node_is_a_row() -> None:
    """Both ranks of node 1 take 450 of 300: sparing one of them gains nothing, sparing the node all of the 150."""
    network = 2 * 5 * 10 + 2 * 5 / 6 * 1000
    gained = pytest.approx((450 + network) / (300 + network), abs=1e-3)
    several = {"nodes": 3, "trainers_per_node": 2, "inter": link(8, 10), "intra": link(8, 10)}
    by_straggler = gains(layered(LAYER, **several, stragglers=(SlowNode(nodes=(1,), factor=1.5),)))
    assert by_straggler["without rank 2"] == 1.0
    assert by_straggler["without node 1"] == by_straggler["without stragglers"] == gained


def test_without_a_rank_all_others_keep_their_draws() -> None:
    """A step is as long as the slowest of the others, step by step, and the spared rank computes undelayed."""
    experiment = layered([(1, 250_000, 750_000)], nodes=5, inter=link(10**9), stragglers=(Jitter(mean=0.4),), steps=50)
    whole = simulate(experiment).steps.assign(compute_s=lambda rows: rows["forward_s"] + rows["backward_s"])
    spared = simulate(experiment, spared=(3,)).steps.assign(compute_s=lambda rows: rows["forward_s"] + rows["backward_s"])
    by_rank, by_rank_spared = (table.pivot_table(index="rank", columns="step", values="compute_s") for table in (whole, spared))
    assert by_rank.drop(3).equals(by_rank_spared.drop(3))
    assert by_rank_spared.loc[3].to_numpy() == pytest.approx([0.001] * 50)
    lengths = spared[spared["rank"] == 0][["compute_s", "wait_s", "exposed_comm_s"]].sum(axis=1)
    assert lengths.to_numpy() == pytest.approx(by_rank.drop(3).max().to_numpy(), abs=1e-7)


def test_infinite_bandwidth_has_no_limit_of_a_connection() -> None:
    """The links carry any number of bytes in their latency, a connection of them too."""
    limited = dataclasses.replace(link(8, 10), flow_limit=BitsPerSecond(10**9))
    given = layered(LAYER, inter=limited)
    unlimited = layered(LAYER, inter=link(8, 10))
    assert with_infinite_bandwidth(given).cluster.inter == with_infinite_bandwidth(unlimited).cluster.inter
