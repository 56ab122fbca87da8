"""``fleetbench estimate`` of a published model, and what reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
PARAMETERS = 2 * 512 * 64 + 64 + 2 * (2 * 64 + 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A small config.json."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    return tmp_path / "config.json"


def test_a_config_json_is_estimated_and_simulated(command: Callable, config: Path, tmp_path: Path) -> None:
    """One utilisation in the estimate, in its run and in a sweep's row: nothing is added to the step of one GPU."""
    size = ("--set", "workload.data_options.length=64", "--out", tmp_path / "runs")
    arguments = ("estimate", "--model", config, "--gpu", "A100", "--precision", "bf16", *size)
    printed = command(*arguments).out
    assert f"parameters: {PARAMETERS:,}" in printed
    assert "of 312 TFLOP/s (dense bf16)" in printed
    found = json.loads(command(*arguments, "--json").out)
    one, path = found["per_trainer"], f"{found['folder']}/estimated.toml"
    assert one["tokens_per_s"] == pytest.approx(64 * one["samples_per_s"])
    assert one["mfu"] == pytest.approx(found["flops"]["per_step"] * one["samples_per_s"] / 16 / 312e12)
    ran = json.loads(command("sim", path, *size[2:], "--json").out)["per_trainer"]
    assert ran == pytest.approx(one)
    swept = json.loads(command("sim", path, *size[2:], "--sweep", "run.seed=0,1", "--json").out)["points"]
    assert [point["mfu"] for point in swept] == pytest.approx([one["mfu"]] * 2)
    assert "MFU" in command("sim", path, *size[2:], "--sweep", "run.seed=0,1").out
    assert "MFU" in command("sim", path, *size[2:], "--what-if").out
    assert "MFU" in command("sim", path, *size[2:], "--seeds", "2").out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--gpt", "124M"), "both name a model"),
        (("--gpu", "40 TFLOP/s, 24 GB"), "three figures"),
    ],
)
def test_two_models_and_half_a_gpu_are_refused(
    more: tuple[str, ...], message: str, command: Callable, config: Path, tmp_path: Path
) -> None:
    """With exit code 2, before anything is written."""
    ended = command("estimate", "--model", config, "--out", tmp_path / "runs", *more)
    assert ended.code == 2
    assert message in ended.err
    assert "HINT" in ended.err
    assert not (tmp_path / "runs").exists()
