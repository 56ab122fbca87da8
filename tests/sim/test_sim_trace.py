"""Traces in the simulator: what a file recorded is what ranks take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from sim_cases import in_ns, layered, link

from fleetbench.quantities import Nanoseconds
from fleetbench.result import RunResult
from fleetbench.stragglers import Jitter, NodeShock, SlowRank, Trace
from sim.run import simulate

LAYERS = [(250, 10_000, 20_000)]


def compute_ns(result: RunResult) -> np.ndarray:
    """Forward and backward of every rank and step."""
    return np.array(in_ns(result, "forward_s")) + np.array(in_ns(result, "backward_s"))


def test_ranks_take_what_the_trace_says(tmp_path: Path) -> None:
    """Rank 1 takes 1.5 times as long in the trace's second step; longer than the trace, the run starts over."""
    pd.DataFrame({"rank": [0, 0, 1, 1], "step": [1, 2, 1, 2], "x": [0.0, 0.25, 0.0, 0.5]}).to_csv(tmp_path / "t.csv", index=False)
    result = simulate(layered(LAYERS, inter=link(8, 10), steps=3, stragglers=(Trace(path=str(tmp_path / "t.csv")),)))
    assert compute_ns(result).tolist() == [30_000, 37_500, 30_000, 30_000, 45_000, 30_000]
    assert in_ns(result, "wait_s") == [0, 7_500, 0, 0, 0, 0]


def test_a_runs_own_table_replays_the_run(tmp_path: Path) -> None:
    """Jitter, a shock and a slow rank are drawn; replayed from steps.parquet over the layers' own time they are the same, warm-up aside."""
    stragglers = (Jitter(mean=0.3), NodeShock(mean=0.2), SlowRank(ranks=(2,), factor=1.5))
    drawn = simulate(layered(LAYERS, nodes=4, inter=link(8, 10), steps=20, warmup_steps=3, stragglers=stragglers))
    drawn.steps.to_parquet(tmp_path / "steps.parquet")
    trace = Trace(path=str(tmp_path / "steps.parquet"), base=Nanoseconds(30_000))
    replayed = simulate(layered(LAYERS, nodes=4, inter=link(8, 10), steps=20, stragglers=(trace,)))
    counted = drawn.steps[drawn.steps["step"] >= 1].reset_index(drop=True)
    for column in ("forward_s", "backward_s", "wait_s", "exposed_comm_s"):
        difference = (replayed.steps[column] - counted[column]).abs().max()
        assert difference <= 2e-9  # of the table's whole nanoseconds
