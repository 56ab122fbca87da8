"""Folded ranks: the law of all ranks' steps, from two lanes a class; and the refusal of what is not exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats
from sim_cases import layered, link

from fleetbench.cluster import NodeOverride
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.quantities import PerStep, Steps
from fleetbench.stragglers import Empirical, Episode, Jitter, NodeShock, SlowNode, SlowRank, Straggler
from sim.draws import Draws
from sim.run import simulate
from sim.scenario import Scenario
from sim.vector.folded import Classes

LAYERS = [(250, 20_000, 30_000), (500, 10_000, 40_000)]


def experiment(*stragglers: Straggler, steps: int = 3_000, seed: int = 0, **options: Any) -> Experiment:
    """Sixty trainers on twenty nodes."""
    options = {"nodes": 20, "trainers_per_node": 3, "intra": link(80), "inter": link(8, 10)} | options
    return layered(LAYERS, stragglers=stragglers, steps=steps, seed=seed, **options)


def step_times_ns(what: Experiment) -> np.ndarray[Any, Any]:
    """Every step's time by all ranks."""
    table = simulate(what, engine="vector", timeline=False).steps
    return np.diff(table[table["rank"] == 0]["start_s"].to_numpy() * 1e9)


def folded_times_ns(what: Experiment) -> np.ndarray[Any, Any]:
    """Every step's time by classes."""
    from sim.vector import folded

    ends = np.asarray(list(folded.execute(Scenario.of(what)).step_ends_ns.values()))
    return np.diff(ends)


@pytest.mark.parametrize(
    "stragglers",
    [
        (Jitter(mean=0.3, cv=1.5),),
        (Jitter(distribution="exponential", mean=0.4), SlowRank(ranks=(3, 17), factor=1.4)),
        (Empirical(values=(0.0, 0.1, 0.2, 0.5, 0.9)), SlowNode(nodes=(2,), factor=1.2), SlowRank(ranks=(6,), factor=1.5)),
        (NodeShock(scope="cluster", rate=PerStep(0.3), mean=0.5), Jitter(distribution="gamma", mean=0.2, cv=0.7)),
    ],
)
def test_step_times_have_the_law_of_all_ranks(stragglers: tuple[Straggler, ...]) -> None:
    """Two samples of 3000 steps, by all ranks and by classes under another seed, are no further apart than one law allows."""
    every, folded = step_times_ns(experiment(*stragglers)), folded_times_ns(experiment(*stragglers, seed=1))
    assert stats.ks_2samp(every, folded).pvalue > 0.001
    wrong = folded_times_ns(experiment(*stragglers, seed=1, nodes=60))
    assert stats.ks_2samp(every, wrong).pvalue < 1e-6


def test_figures_are_right_in_expectation() -> None:
    """Means over all ranks and steps: compute, waiting and the rest, within what 3000 steps of few lanes allow."""
    stragglers = (Jitter(mean=0.3), SlowRank(ranks=tuple(range(20)), factor=1.3))
    every = simulate(experiment(*stragglers), engine="vector", timeline=False, table=False).summary
    folded = simulate(experiment(*stragglers, seed=5), engine="folded").summary
    assert folded.engine == "folded"
    assert folded.compute_s == pytest.approx(every.compute_s, rel=0.03)
    assert folded.wait_s == pytest.approx(every.wait_s, rel=0.03)
    assert folded.step_s["mean"] == pytest.approx(every.step_s["mean"], rel=0.02)
    assert folded.step_s["p95"] == pytest.approx(every.step_s["p95"], rel=0.06)
    assert (folded.bytes_sent_per_trainer, folded.num_syncs) == (every.bytes_sent_per_trainer, every.num_syncs)
    assert {entry["what"]: entry["why"].split(",")[0] for entry in folded.skipped} == dict.fromkeys(
        ("timeline.json.gz", "steps.parquet"), "ranks are folded into classes"
    )


def test_folded_ranks_are_not_recorded() -> None:
    """Nobody is told what a class does: asked for, that is an error, and not an empty recording."""
    with pytest.raises(ConfigError, match="record: folded ranks are told nothing") as caught:
        simulate(experiment(Jitter(mean=0.1), steps=3), engine="folded", record=True)
    assert "reference" in str(caught.value.hint)


def test_what_a_caller_leaves_out_is_not_skipped() -> None:
    """No timeline and no table were asked for, so neither is missing."""
    folded = simulate(experiment(Jitter(mean=0.1), steps=3), engine="folded", timeline=False, table=False)
    assert folded.summary.skipped == ()


def test_the_first_rank_of_a_class_keeps_its_draws() -> None:
    """Its X is what it has among all ranks; a class of one rank has no other."""
    what = experiment(Jitter(mean=0.3), SlowRank(ranks=(7,), factor=2.0), steps=50)
    draws: Draws = Scenario.of(what).draws
    classes = Classes.of(draws)
    x, every = classes.rows(0, 50), draws.rows(0, 50)
    for index, rank in enumerate(classes.first.tolist()):
        assert (x[:, 2 * index] == every[:, rank]).all()
    assert sorted(zip(classes.first.tolist(), classes.sizes.tolist(), strict=True)) == [(0, 59), (7, 1)]
    alone = classes.first.tolist().index(7)
    assert (x[:, 2 * alone] == x[:, 2 * alone + 1]).all()


def test_spared_ranks_and_slow_nodes_are_classes() -> None:
    """Three kinds of rank: spared, on a node that takes twice as long, and all others."""
    what = experiment(Jitter(mean=0.3), steps=400, node_overrides=(NodeOverride(nodes=(1,), slowdown=2.0),))
    scenario = Scenario.of(what, spared=(0,))
    classes = Classes.of(scenario.draws)
    assert sorted(zip(classes.first.tolist(), classes.sizes.tolist(), strict=True)) == [(0, 1), (1, 56), (3, 3)]
    x = classes.rows(0, 400)
    assert (x[:, 2 * classes.first.tolist().index(0)] == 0).all()
    assert x[:, 2 * classes.first.tolist().index(3)].mean() == pytest.approx((2 * 1.3 - 1) * 2**24, rel=0.1)


@pytest.mark.parametrize(
    ("stragglers", "where"),
    [
        ((NodeShock(rate=PerStep(0.5), mean=0.5),), r"stragglers\[0\]"),
        ((Episode(rate=PerStep(0.1), length=Steps(3), factor=2.0),), r"stragglers\[0\]"),
        ((Jitter(mean=0.1), Jitter(mean=0.2)), r"stragglers\[1\]"),
    ],
)
def test_delays_that_do_not_fold_are_refused(stragglers: tuple[Straggler, ...], where: str) -> None:
    """By name, with the engine that runs them."""
    with pytest.raises(ConfigError, match=where) as caught:
        simulate(experiment(*stragglers, steps=3), engine="folded")
    assert "vector" in str(caught.value.hint)


@pytest.mark.parametrize(
    "strategy",
    [
        {"localsgd": True, "localsgd_configs": {"k_steps": 4}},
        {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
        {"use_hierarchical_allreduce": True},
    ],
)
def test_strategies_that_do_not_fold_are_refused(strategy: dict[str, Any]) -> None:
    """Several steps between two meetings, and groups that are not all trainers."""
    with pytest.raises(ConfigError, match="cannot be folded"):
        simulate(experiment(Jitter(mean=0.1), steps=9, strategy=strategy), engine="folded")


def test_constant_delays_beside_a_law_fold() -> None:
    """What does not vary has no largest of its own."""
    both = (Jitter(distribution="constant", mean=0.5, cv=0.0), Jitter(mean=0.2))
    every, folded = step_times_ns(experiment(*both)), folded_times_ns(experiment(*both, seed=3))
    assert stats.ks_2samp(every, folded).pvalue > 0.001
