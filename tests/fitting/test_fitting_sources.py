"""Stragglers of what ran already: runs, tables of steps, traces of operations."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sim_cases import layered, link

from fleetbench.errors import ConfigError
from fleetbench.fitting.sources import compute_times, fit_source
from fleetbench.store import save_run
from fleetbench.stragglers import Jitter, SlowRank
from sim.run import simulate


def operations(times: np.ndarray, *, microbatches: int = 4, stages: int = 2) -> pd.DataFrame:
    """A trace of operations in which stage s of rank r takes (s + 1) times ``times[r, step]``, two thirds of it backward."""
    rows: list[dict[str, Any]] = []
    for rank, step, stage in itertools.product(range(times.shape[0]), range(times.shape[1]), range(stages)):
        where = {"dp_rank": rank, "stage": stage, "rank": rank * stages + stage, "step": 10 + 7 * step, "start_ts": 0.0}
        for batch, (kind, share) in itertools.product(range(microbatches), (("forward-compute", 1 / 3), ("backward-compute", 2 / 3))):
            duration = (stage + 1) * times[rank, step] * share / microbatches
            rows.append(where | {"optype": kind, "duration": duration, "seq_id": batch, "mb_id": batch})
        rows.append(where | {"optype": "grads-reduce-scatter", "duration": 99.0, "seq_id": 0, "mb_id": -1})
    return pd.DataFrame(rows)


@pytest.fixture
def times() -> np.ndarray:
    """Three ranks, forty steps, the second rank twice as slow."""
    generator = np.random.default_rng(4)
    return np.array([[1.0], [2.0], [1.0]]) * (1 + 0.05 * generator.gamma(2.0, 1.0, (3, 40)))


def test_a_stage_of_a_trace_is_its_computes(times: np.ndarray, tmp_path: Path) -> None:
    """Forward and backward of all micro-batches, in the order of steps; what is communicated does not count."""
    operations(times).sample(frac=1.0, random_state=1).to_parquet(tmp_path / "t.parquet")
    for stage in (0, 1):
        found = compute_times(tmp_path / "t.parquet", stage)
        assert found.times_s == pytest.approx((stage + 1) * times)
        assert found.steps == tuple(range(10, 10 + 7 * 40, 7))
        assert (found.stage, found.nodes) == (stage, (0, 1, 2))


def test_the_slow_worker_of_a_trace_is_fitted(times: np.ndarray, tmp_path: Path) -> None:
    """Rank 1, by its factor, in either stage."""
    operations(times).to_csv(tmp_path / "t.csv", index=False)
    found = fit_source(tmp_path / "t.csv", stage=1)
    slow = next(entry for entry in found.entries if isinstance(entry, SlowRank))
    assert (slow.ranks, slow.factor) == ((1,), pytest.approx(2.0, rel=0.03))
    assert found.base * 1e-9 == pytest.approx(2.0, rel=0.05)


def test_one_stage_needs_no_choice_and_several_do(times: np.ndarray, tmp_path: Path) -> None:
    """Stages compute different layers, so they are never mixed."""
    operations(times, stages=1).to_parquet(tmp_path / "one.parquet")
    assert compute_times(tmp_path / "one.parquet").stage == 0
    operations(times).to_parquet(tmp_path / "two.parquet")
    with pytest.raises(ConfigError, match=r"2 pipeline stages(.|\n)*--stage 0"):
        compute_times(tmp_path / "two.parquet")
    with pytest.raises(ConfigError, match=r"no such stage(.|\n)*\[0, 1\]"):
        compute_times(tmp_path / "two.parquet", 2)


def test_a_run_is_fitted_by_its_folder_or_its_table(tmp_path: Path) -> None:
    """A simulated run of two nodes: its warm-up does not count, its slow rank is found, and its nodes are its experiment's."""
    stragglers = (Jitter(distribution="exponential", mean=0.1), SlowRank(ranks=(3,), factor=1.4))
    links = {"intra": link(80), "inter": link(80)}
    experiment = layered([(1, 1_000_000, 2_000_000)], trainers_per_node=2, **links, stragglers=stragglers, steps=80, warmup_steps=4)
    run = save_run(simulate(experiment, timeline=False), tmp_path)
    assert run.path is not None
    found = compute_times(run.path)
    assert found.times_s.shape == (4, 80)
    assert found.nodes == (0, 0, 1, 1)
    fit = fit_source(run.path)
    assert [entry.kind for entry in fit.entries] == ["slow_rank", "jitter"]
    assert fit.base * 1e-9 == pytest.approx(0.003, rel=0.02)
    table = compute_times(run.path / "steps.parquet")
    assert (table.times_s == found.times_s).all()
    assert table.nodes == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows.drop(columns="duration"), "has the columns"),
        (lambda rows: rows[~((rows["dp_rank"] == 1) & (rows["step"] == 17))], "rank 1 in step 17"),
        (lambda rows: rows.iloc[1:], "rank 0 has 7 operations in step 10, others 8"),
        (lambda rows: rows.assign(duration=0.0), "not above 0"),
        (lambda rows: rows.assign(duration=["", *rows["duration"].iloc[1:].astype(str)]), "a duration that is no number"),
        (lambda rows: rows.assign(stage=["first", *["0"] * (len(rows) - 1)]), "a stage that is no number"),
        (lambda rows: rows.assign(stage=[None, *[0.0] * (len(rows) - 1)]), "a stage that is no number"),
    ],
)
def test_a_trace_that_lacks_something_is_refused(change: Any, said: str, times: np.ndarray, tmp_path: Path) -> None:
    """A column, a rank of a step, an operation of a step, time itself, or a number where one belongs."""
    change(operations(times, stages=1)).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(ConfigError, match=rf"--from: .*{said}(.|\n)*HINT"):
        compute_times(tmp_path / "t.parquet")


def test_a_stage_of_what_has_none_is_refused(tmp_path: Path) -> None:
    """A table of steps has no pipeline; nor is a folder without a run one."""
    pd.DataFrame({"rank": [0], "step": [1], "compute_s": [1.0]}).to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(ConfigError, match="no pipeline stages"):
        compute_times(tmp_path / "t.csv", 0)
    with pytest.raises(ConfigError, match="no run folder"):
        compute_times(tmp_path)
