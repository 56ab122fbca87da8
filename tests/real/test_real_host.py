"""Emulated real runs beside the simulator: measured steps that are replayed, and reading that falls behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fleetbench.experiment import Experiment
from real.job.session import measure
from real.supported import not_emulated
from sim.run import simulate

LATE_S = 0.008
"""What a sleep on a shared machine may be late by, in the median."""
FILE = """\
name = "host"
[workload]
model = "layers"
steps = 18
layers = [{ name = "a", params = 100, forward = "2 ms", backward = "4 ms", repeat = 2 }]
host = { load = "50 ms", loaders = 1, prefetch = 1 }
[cluster]
trainers_per_node = 2
intra = { bandwidth = "10 Gbit/s" }
[[cluster.stragglers]]
kind = "blocks"
values = [[0.0, 0.5, 0.0], [0.0, 0.0, 2.0]]
block_steps = 1000
[run]
device = "emulated"
warmup_steps = 3
"""


@pytest.mark.alone
def test_both_executors_replay_the_steps_and_wait_for_batches(tmp_path: Path) -> None:
    """Rank 1 takes 36 ms instead of 12 in every third step, and each batch 50: steps, and each rank's backward, are the simulator's."""
    (tmp_path / "e.toml").write_text(FILE, encoding="utf-8")
    experiment = Experiment.load(tmp_path / "e.toml")
    simulated, real = simulate(experiment), measure(experiment)
    backward = simulated.steps["backward_s"].to_numpy()
    assert sorted(set(np.round(backward * 1e3, 6))) == [8.0, 12.0, 24.0]
    for expected in np.unique(backward):
        taken = real.steps["backward_s"].to_numpy()[backward == expected]
        assert abs(np.median(taken) - expected) < LATE_S / 3
    first = simulated.steps[simulated.steps["rank"] == 0]
    begins = (first["start_s"] + first["other_s"]).diff().dropna().to_numpy()  # a real step starts with its forward
    really = real.steps.loc[real.steps["rank"] == 0, "start_s"].diff().dropna().to_numpy()
    assert np.median(begins) > 0.049
    assert abs(np.median(really - begins)) < LATE_S


def test_fetching_is_emulated_where_the_file_says_what_it_takes(tmp_path: Path) -> None:
    """With ``host.fetch`` a run realises ``fetch_every_n_steps``; without, it is listed as skipped."""
    for fetch, skipped in (("3 ms", []), ("0 ms", ["strategy.fetch_every_n_steps"])):
        text = FILE.replace("prefetch = 1", f'prefetch = 1, fetch = "{fetch}"') + "[strategy]\nfetch_every_n_steps = 3\n"
        (tmp_path / "e.toml").write_text(text, encoding="utf-8")
        experiment = Experiment.load(tmp_path / "e.toml")
        assert [entry["what"] for entry in not_emulated(experiment, experiment.strategy)] == skipped
