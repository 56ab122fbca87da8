"""Engines: the reference, event by event, and the vector engine give the same nanoseconds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from engine_cases import Case, agree, case_of
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_cases import in_ns, layered, link, profiled, with_profile

from fleetbench.errors import ConfigError
from fleetbench.stragglers import Jitter, SlowRank
from sim.run import simulate


@pytest.mark.parametrize(
    "seeds",
    [range(20), pytest.param(range(20, 60), marks=pytest.mark.slow), pytest.param(range(60, 200), marks=pytest.mark.whole)],
    ids=str,
)
def test_engines_agree_on_whole_strategies(seeds: range) -> None:
    """Random strategies, clusters and workloads: each rank, step, span and figure is equal to the nanosecond, or both refuse alike."""
    ways: Counter[str] = Counter()
    for seed in seeds:
        try:
            ways[agree(case_of(seed)).partition(":")[0]] += 1
        except BaseException as error:
            error.add_note(f"experiment: case_of({seed})")
            raise
    assert ways["vector"] >= len(seeds) * 0.75
    assert ways["reference"] < len(seeds) * 0.15


def test_three_ways_to_one_step() -> None:
    """A closed form, order statistics, and both engines, for eight trainers whose all-reduce hides nothing.

    One bucket of 1000 bytes over 8 Gbit/s: 2 x 7 / 8 x 1000 = 1750 ns. Compute takes 100,000 (1 + X), X
    exponential of mean 0.5: its largest of 8 is 0.5 (1 + 1/2 + ... + 1/8) in the mean, and varies by
    0.25 (1 + 1/4 + ... + 1/64).
    """
    options: dict[str, Any] = {"nodes": 8, "inter": link(8)}
    still = layered([(250, 40_000, 60_000)], steps=3, **options)
    for engine in ("reference", "vector"):
        assert in_ns(simulate(still, engine=engine), "exposed_comm_s") == [1_750] * 24
        assert in_ns(simulate(still, engine=engine), "start_s")[:3] == [0, 101_750, 203_500]
    jitter = Jitter(distribution="exponential", mean=0.5)
    steps = 4_000
    random = layered([(250, 40_000, 60_000)], steps=steps, stragglers=(jitter,), **options)
    mean = 101_750 + 50_000 * sum(1 / rank for rank in range(1, 9))
    error = 50_000 * np.sqrt(sum(1 / rank**2 for rank in range(1, 9)) / steps)
    vector = simulate(random, engine="vector", timeline=False)
    assert abs(vector.summary.step_s["mean"] * 1e9 - mean) < 4 * error
    short = layered([(250, 40_000, 60_000)], steps=200, stragglers=(jitter,), **options)
    reference = simulate(short, engine="reference", timeline=False)
    assert reference.steps.equals(simulate(short, engine="vector", timeline=False).steps)


def test_auto_says_which_engine_it_took() -> None:
    """Arrays also where collectives share links; the reference for recordings, and where compute slows what shares."""
    plain = layered([(250, 10, 20)], inter=link(8))
    assert simulate(plain).summary.engine == "vector"
    assert simulate(plain, engine="reference").summary.engine == "reference"
    assert str(simulate(plain, record=True).summary.engine) == "reference: only the reference keeps recordings"
    groups = {"use_hierarchical_allreduce": True, "hierarchical_variant": "reduce_scatter"}
    apart = {"nccl_comm_num": 2, "sync_nccl_allreduce": False}
    several: dict[str, Any] = {"nodes": 2, "trainers_per_node": 2, "intra": link(8), "inter": link(8)}
    for strategy in (groups, groups | apart):
        assert simulate(layered([(250, 10, 20)] * 2, **several, strategy=strategy)).summary.engine == "vector"
    slowed, profile = profiled([([250], [10], 10, 20)] * 2, {"collective_contention": 0.3}, **several, strategy=groups | apart)
    for engine in ("auto", "vector"):
        shared = simulate(with_profile(slowed, profile), engine=engine)
        assert str(shared.summary.engine) == "reference: collectives in flight together share a link"


@given(st.data())
@settings(max_examples=5, deadline=None)
def test_several_communicators_within_a_hierarchy(data: st.DataObject) -> None:
    """Drawn hierarchies of both variants, whose chains of collectives share links: by arrays, equal to the reference."""
    draw, pick = data.draw, lambda *values: data.draw(st.sampled_from(values))
    nodes, per_node = pick((2, 2), (2, 3), (3, 2), (4, 2), (2, 4))
    layers = draw(st.lists(st.tuples(st.integers(20, 900), st.integers(1, 900), st.integers(0, 1500)), min_size=2, max_size=4))
    strategy: dict[str, Any] = {
        "use_hierarchical_allreduce": True,
        "hierarchical_variant": pick("leader", "reduce_scatter"),
        "nccl_comm_num": pick(2, 3),
        "sync_nccl_allreduce": False,
        "fuse_all_reduce_ops": False,
    }
    options: dict[str, Any] = {"nodes": nodes, "trainers_per_node": per_node, "steps": 3, "backend": pick("gloo", "nccl")}
    options |= {"intra": link(pick(80, 11), pick(0, 10)), "inter": link(pick(8.0, 7.3), pick(0, 100)), "nics_per_node": pick(1, 2)}
    experiment = layered(layers, strategy=strategy, stragglers=(Jitter(mean=0.5),), seed=draw(st.integers(0, 9)), **options)
    assert agree(Case(experiment=experiment)) == "vector"


@pytest.mark.sample(9)
@pytest.mark.parametrize("table", [{"contention": 0.3}, {"collective_contention": 0.7}, {"contention": 0.3, "collective_contention": 0.7}])
@pytest.mark.parametrize("strategy", [{}, {"use_hierarchical_allreduce": True}, {"localsgd": True, "localsgd_configs": {"k_steps": 2}}])
def test_compute_and_collectives_that_slow_each_other(table: dict[str, float], strategy: dict[str, Any]) -> None:
    """By arrays, equal to the reference in every nanosecond and span: collectives short and long beside compute, of nodes and of all."""
    layers = [([900], [700], 300, 300), ([3000], [500], 100, 200), ([50], [40], 200, 400)]
    for gbit_per_s in (2, 12, 90):
        experiment, profile = profiled(
            layers,
            table | {"host_per_collective": 7, "update": 30},
            nodes=3,
            trainers_per_node=2,
            intra=link(40, 20),
            inter=link(gbit_per_s, 70),
            steps=12,
            strategy=strategy,
            stragglers=(Jitter(mean=0.5),),
        )
        assert agree(Case(experiment=with_profile(experiment, profile))) == "vector"


def test_what_takes_hours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference counts the events of its clock before they begin, whoever asked for it."""
    monkeypatch.setattr("sim.reference.engine.MOST_EVENTS", 29)
    apart = {"nccl_comm_num": 2, "sync_nccl_allreduce": False, "use_hierarchical_allreduce": True, "hierarchical_variant": "reduce_scatter"}
    several: dict[str, Any] = {"nodes": 2, "trainers_per_node": 2, "intra": link(8), "inter": link(8)}
    slows = {"collective_contention": 0.3}
    experiment, profile = profiled([([250], [10], 10, 20)] * 2, slows, **several, strategy=apart, steps=2)
    for engine in ("auto", "vector", "reference"):
        with pytest.raises(ConfigError, match=r"29 at most \(got 56 events\)") as caught:
            simulate(with_profile(experiment, profile), engine=engine)
        assert "fewer steps" in str(caught.value.hint)


def test_trainers_that_end_steps_apart() -> None:
    """A backward that goes on after the last bucket: who is slow begins late, and may be late in the next step, too."""
    experiment, profile = profiled(
        [([500], [100], 100, 50_000), ([500], [50], 100, 10)],
        {"update": 300},
        inter=link(80),
        nodes=6,
        stragglers=(Jitter(mean=0.5), SlowRank(ranks=(2,), factor=1.5)),
        steps=60,
    )
    assert agree(Case(experiment=with_profile(experiment, profile))) == "vector"
    vector = simulate(with_profile(experiment, profile), engine="vector")
    starts = vector.steps.pivot_table(index="step", columns="rank", values="start_s")
    assert (starts.nunique(axis=1) > 1).sum() > 50


def test_steps_of_years_are_refused_by_both() -> None:
    """A step of 60 years that takes three times as long, twice: the same error, whoever simulates."""
    year_ns = 365 * 86_400 * 10**9
    slow = Jitter(distribution="constant", mean=2.0)
    experiment = layered([(250, 30 * year_ns, 30 * year_ns)], inter=link(8), steps=2, stragglers=(slow,))
    assert agree(Case(experiment=experiment)) == "refused"
