"""Engines: the reference, event by event, and the vector engine give the same nanoseconds."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_cases import Case, agree, cases
from hypothesis import HealthCheck, given, settings
from sim_cases import in_ns, layered, link, profiled

from fleetbench.errors import ConfigError
from fleetbench.stragglers import Jitter, SlowRank
from sim.engines import Engine
from sim.run import simulate
from sim.vector.walk import Walkers

MANY = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@MANY
@given(cases())
def test_engines_agree_where_steps_are_max_plus(case: Case) -> None:
    """One collective in flight, and nothing slows anything: every rank and step, every span and every figure are the same."""
    assert agree(case).summary.engine == "vector"


@MANY
@given(cases(free=True))
def test_engines_agree_where_collectives_share_links(case: Case) -> None:
    """Several in flight on one communicator, on two, or in groups side by side: an event loop over arrays gives the same steps."""
    engine = str(agree(case).summary.engine)
    assert engine.startswith("vector") or "; and " in engine


@MANY
@given(cases(slows=True, loads=False))
def test_engines_agree_where_compute_and_collectives_slow_each_other(case: Case) -> None:
    """Progress integrated piecewise, by ranks side by side, rounds as it does rank by rank."""
    engine = str(agree(case).summary.engine)
    assert engine.startswith("vector") or "; and " in engine


def test_four_ways_to_one_step() -> None:
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
    folded = simulate(random, engine="folded")
    assert abs(folded.summary.step_s["mean"] * 1e9 - mean) < 4 * error


def test_auto_says_which_engine_it_took() -> None:
    """Arrays where steps are max-plus; the reference for recordings, and for few trainers whose collectives share a link in groups."""
    plain = layered([(250, 10, 20)], inter=link(8))
    assert simulate(plain).summary.engine == "vector"
    assert simulate(plain, engine="reference").summary.engine == "reference"
    assert str(simulate(plain, record=True).summary.engine) == "reference: it records what every rank is told"
    groups = {"use_hierarchical_allreduce": True, "hierarchical_variant": "reduce_scatter"}
    shared = layered([(250, 10, 20)], nodes=2, trainers_per_node=2, intra=link(8), inter=link(8), strategy=groups)
    assert str(simulate(shared).summary.engine) == "reference: collectives in flight together share a link"
    assert str(simulate(shared, engine="vector").summary.engine).startswith("vector, event by event: ")


@pytest.mark.parametrize("engine", ["auto", "vector"])
def test_what_overlaps_and_does_not_fit_memory_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that needs more memory still is not taken in its place, unless it is asked for by name."""
    monkeypatch.setattr("sim.vector.execute.MOST_CELLS", 9)
    experiment, profile = profiled([([100], [50], 100, 50)] * 2, {"contention": 0.5}, inter=link(8), steps=5)
    with pytest.raises(ConfigError, match=r"no more than 9 steps of ranks .*\(got 10\)") as caught:
        simulate(experiment, profile=profile, engine=engine)
    assert "--engine reference" in str(caught.value.hint)
    assert simulate(experiment, profile=profile, engine="reference").summary.steps == 5


def test_an_event_loop_forgets_the_updates_of_steps_that_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied to look ahead does not grow with steps: of two buckets, the updates of the two steps at most that ranks are in."""
    held: list[int] = []
    copy = Walkers.copy

    def watched(self: Walkers) -> Walkers:
        held.append(len(self.told))
        return copy(self)

    monkeypatch.setattr(Walkers, "copy", watched)
    strategy = {"build_strategy": {"enable_backward_optimizer_op_deps": False}}
    experiment, profile = profiled(
        [([100], [50], 100, 50), ([100], [100], 0, 50)],
        {"contention": 0.5, "update": 30},
        inter=link(8),
        steps=40,
        strategy=strategy,
        stragglers=(Jitter(mean=0.5),),
    )
    simulate(experiment, profile=profile, engine="vector")
    assert 1 <= max(held) <= 4


def test_an_engine_that_there_is_not_is_refused() -> None:
    """By name, with those that there are."""
    with pytest.raises(ConfigError, match="no such engine") as caught:
        simulate(layered([(250, 10, 20)], inter=link(8)), engine="warp")  # type: ignore[arg-type]  # that is the test
    assert "reference" in str(caught.value.hint)


def test_progress_is_told_of_every_run() -> None:
    """Whoever simulates, the last word is that all steps are done."""
    told: list[tuple[int, int]] = []
    experiment = layered([(250, 10, 20)], inter=link(8), steps=7, warmup_steps=2)
    for engine in ("reference", "vector"):
        told.clear()
        simulate(experiment, engine=engine, progress=lambda done, total: told.append((done, total)))
        assert told[-1] == (9, 9)
        assert told == sorted(told)


def test_trainers_that_end_steps_apart() -> None:
    """A backward that goes on behind the last bucket: who is slow begins late, and may be behind in the next step, too."""
    experiment, profile = profiled(
        [([500], [100], 100, 50_000), ([500], [50], 100, 10)],
        {"update": 300},
        inter=link(80),
        nodes=6,
        stragglers=(Jitter(mean=0.5), SlowRank(ranks=(2,), factor=1.5)),
        steps=60,
    )
    vector = agree((experiment, profile))
    starts = vector.steps.pivot_table(index="step", columns="rank", values="start_s")
    assert (starts.nunique(axis=1) > 1).sum() > 50


def test_a_collective_that_starts_beside_compute_goes_faster_behind_it() -> None:
    """By hand: 4 bytes start at 1, beside compute until 2: 1 / 1.3 of them are through, and the rest takes 3.23 ns; the end is at 5."""
    experiment, profile = profiled([([1], [0], 1, 1)], {"collective_contention": 0.3}, inter=link(8), steps=2)
    for engine in ("reference", "vector"):
        assert in_ns(simulate(experiment, profile=profile, engine=engine), "start_s") == [0, 5] * 2


def test_times_beyond_64_bits_are_refused_by_both() -> None:
    """A step of 60 years that takes three times as long, twice: the same error, whoever simulates."""
    year_ns = 365 * 86_400 * 10**9
    slow = Jitter(distribution="constant", mean=2.0)
    experiment = layered([(250, 30 * year_ns, 30 * year_ns)], inter=link(8), steps=2, stragglers=(slow,))
    for engine in ("reference", "vector"):
        with pytest.raises(ConfigError, match="64 bits"):
            simulate(experiment, engine=engine)


def test_long_steps_do_not_overflow_on_the_way() -> None:
    """Minutes of compute with X near a hundred: (1 + X) base 2^24 leaves 64 bits, and the result does not."""
    experiment = layered([(250, 2 * 10**10, 8 * 10**10)], inter=link(8), steps=3, stragglers=(Jitter(mean=90.0),))
    vector = simulate(experiment, engine="vector", timeline=False).steps
    assert vector.equals(simulate(experiment, engine="reference", timeline=False).steps)


def test_vector_runs_are_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    """Two processes with different hash seeds write equal tables and, but for the run's id, equal summaries."""
    script = """
import dataclasses, sys
from sim_cases import layered, link
from fleetbench.stragglers import Jitter
from sim.run import simulate
local = {"localsgd": True, "localsgd_configs": {"k_steps": 3}}
free = {"sync_nccl_allreduce": False, "nccl_comm_num": 2}
for name, strategy in (("local", local), ("free", free)):
    experiment = layered([(250, 10_000, 20_000)] * 3, inter=link(8), nodes=5, steps=20, stragglers=(Jitter(mean=0.4),), strategy=strategy)
    result = simulate(experiment, engine="vector")
    result.steps.to_parquet(f"{sys.argv[1]}-{name}.parquet", index=False)
    print(dataclasses.replace(result.summary, run_id="").to_json())
"""
    outputs = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([*sys.path])}
        command = [sys.executable, "-c", script, str(tmp_path / seed)]
        outputs.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert outputs[0] == outputs[1]
    for name in ("local", "free"):
        assert (tmp_path / f"1-{name}.parquet").read_bytes() == (tmp_path / f"2-{name}.parquet").read_bytes()
    assert json.loads(outputs[0].split("\n}\n")[0] + "}")["engine"] == "vector"


def test_a_table_is_kept_when_asked_or_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit the summary says that it was left out; asked for, it is there, whoever simulates."""
    monkeypatch.setattr("sim.run.MOST_ROWS", 5)
    experiment = layered([(250, 10, 20)], inter=link(8), steps=3)
    for engine in ("reference", "vector"):
        left_out = simulate(experiment, engine=engine)
        assert left_out.steps.empty
        assert list(left_out.steps.columns) == list(simulate(experiment, engine=engine, table=True).steps.columns)
        assert [entry["what"] for entry in left_out.summary.skipped] == ["steps.parquet"]
        asked = simulate(experiment, engine=engine, table=True)
        assert len(asked.steps) == 6
        assert asked.summary.skipped == ()
        changes = {"skipped": (), "run_id": ""}
        close = {"step_s": {}, "wall_s": 0.0, "samples_per_s": 0.0, "wait_s": 0.0, "exposed_comm_s": 0.0, "other_s": 0.0, "compute_s": 0.0}
        assert dataclasses.replace(left_out.summary, **changes, **close) == dataclasses.replace(asked.summary, **changes, **close)
        assert left_out.summary.wall_s == pytest.approx(asked.summary.wall_s, rel=1e-12)
        assert left_out.summary.step_s == pytest.approx(asked.summary.step_s, rel=1e-12)
