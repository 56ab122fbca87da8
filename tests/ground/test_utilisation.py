"""Utilisation: rates of one trainer and MFU, by hand."""

from __future__ import annotations

from pathlib import Path

from fleetbench.experiment import Experiment
from fleetbench.measurements import ModelFlops
from fleetbench.profile import Profile, name_profile
from fleetbench.utilisation import utilisation


def test_a_trainers_rates_and_mfu_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    """4 samples of 10 tokens in half a second; 2e12 FLOPs in it are 4e12 a second, of 16e12 a quarter."""
    experiment = Experiment.from_dict({"workload": {"model": "gpt", "data": "synthetic", "batch_size": 4, "data_options": {"length": 10}}})
    flops = ModelFlops(per_step=2e12, peak_s=16e12, precision="bf16")
    profile = Profile(machine="a GPU", created="now", tables=(), flops=flops)
    one = utilisation(name_profile(experiment, profile, tmp_path / "profile.toml"), 0.5, 3 * 10**9)
    assert (one.samples_per_s, one.tokens_per_s, one.mfu) == (8, 80, 0.25)
    assert one.line == "per GPU: 8 samples/s, 80 tokens/s, MFU 25.0 % of 16 TFLOP/s (dense bf16), 3.00 GB of memory"
    assert utilisation(Experiment(), 0.5).line == "per trainer: 64 samples/s"


def test_an_estimates_samples_have_its_tokens_where_no_length_is_named(tmp_path: Path) -> None:
    """4 samples of 128 tokens in half a second; a named length goes first."""
    workload = {"model": "gpt", "data": "synthetic", "batch_size": 4}
    profile = Profile(machine="a GPU", created="now", tables=(), sample_tokens=128)
    for options, tokens in (({}, 128), ({"length": 10}, 10)):
        experiment = Experiment.from_dict({"workload": {**workload, "data_options": options}})
        assert utilisation(name_profile(experiment, profile, tmp_path / "profile.toml"), 0.5).tokens_per_s == 8 * tokens
