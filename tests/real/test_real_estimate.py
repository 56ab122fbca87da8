"""Estimated layer times: operations against closed forms and published counts, prices by hand, and what cannot be estimated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.hardware import catalogue
from fleetbench.profile import profile_of
from fleetbench.workloads.models.registry import MODELS
from real.estimate.operations import Operation, Recorder, nothing_computed
from real.estimate.step import Efficiencies, Roofline, estimate, estimated

GPT = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 512, "positions": 32}
LENGTH, BATCH = 32, 4


def _experiment(model: str = "gpt", strategy: dict[str, Any] | None = None, **workload: Any) -> Experiment:
    own = {"model_options": GPT, "data_options": {"length": LENGTH}} if model == "gpt" else {}
    what = {"model": model, "data": "synthetic", "batch_size": BATCH, "optimizer": "adam", **own, **workload}
    return Experiment.from_dict({"schema": 1, "name": "x", "workload": what, "strategy": strategy or {}, "run": {"device": "cuda"}})


def _flops(model: nn.Module, inputs: torch.Tensor, *, backward: bool) -> int:
    """Of a forward, or of the backward after it."""
    recorder = Recorder(lambda _: 0.0)
    with recorder:
        loss = model(inputs).sum()
        begin = len(recorder.operations)
        if backward:
            loss.backward()
    return sum(operation.flops for operation in recorder.operations[begin if backward else 0 :])


def test_a_perceptrons_products_are_counted() -> None:
    """Of b samples, m to n numbers take 2 b m n FLOPs, and twice as many backward, but once where the input needs no gradient."""
    with nothing_computed():
        model, inputs = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.zeros(5, 8)
        assert _flops(model, inputs, backward=False) == 2 * 5 * (8 * 16 + 16 * 4)
        assert _flops(model, inputs, backward=True) == 2 * 5 * (8 * 16 + 2 * 16 * 4)


def test_resnet_50_has_its_published_operations() -> None:
    """4.09 billion multiplications and additions an image of 224 pixels (torchvision's documentation of its weights)."""
    with nothing_computed():
        model = MODELS["resnet50"]()
        assert _flops(model, torch.zeros(2, 3, 224, 224), backward=False) / 4 == pytest.approx(4.09e9, rel=2e-3)


def test_gpt_2_has_its_published_parameters_and_operations() -> None:
    """124,439,808 parameters; 24 h^2 FLOPs a token and layer, half of 4 s h for attention, the head's 2 V h a predicted token."""
    with nothing_computed():
        assert sum(parameter.numel() for parameter in MODELS["gpt"]().parameters()) == 124_439_808
        found = _flops(MODELS["gpt"](**GPT), torch.zeros(BATCH, LENGTH, dtype=torch.int64), backward=False)
    layers = 2 * (24 * 64**2 + 2 * LENGTH * 64) * LENGTH * BATCH
    assert found == layers + 2 * 512 * 64 * (LENGTH - 1) * BATCH


BF16 = {"amp": True, "amp_configs": {"dtype": "bf16"}}
SMALL_GPT2 = {"layers": 12, "hidden": 768, "heads": 12, "vocab": 50257, "positions": 1024}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "options", "recompute", "parameters"),
    [
        ("gpt", SMALL_GPT2, [], 124_439_808),
        ("gpt", SMALL_GPT2, ["blocks.0", "blocks.11"], 124_439_808),
        ("llama", {"layers": 4, "tied": True}, [], 4 * 60_821_504 + 128256 * 2048 + 2048),
        ("llama", {"layers": 4, "tied": False}, [], 4 * 60_821_504 + 128256 * 2048 + 2048),  # an embedding of its own computes nothing
    ],
)
def test_model_flops_are_palms(model: str, options: dict[str, Any], recompute: list[str], parameters: int) -> None:
    """6 N + 12 L H Q T a token (PaLM, appendix B): nothing for recomputing, all of causal attention, no mark-up for 50,257 words."""
    strategy: dict[str, Any] = {**BF16, "recompute": bool(recompute), "recompute_configs": {"checkpoints": recompute}}
    workload = {"model_options": options, "data_options": {"length": 512}}
    flops = estimate(_experiment(model, strategy if recompute else BF16, **workload), "H100").flops
    assert flops is not None
    width = {"gpt": 768, "llama": 32 * 64}[model]
    assert flops.per_step / (BATCH * 512) == pytest.approx(6 * parameters + 12 * options["layers"] * width * 512, rel=0.01)
    assert (flops.peak_s, flops.precision) == (989.5e12, "bf16")


OWN = Efficiencies(
    matmul=0.5,
    convolution=0.25,
    attention=0.4,
    memory=0.5,
    vector=0.8,
    vector_convolution=0.9,
    vector_attention=0.2,
    launch_s=1e-6,
    balance=1.0,
)


def test_an_operation_computes_and_moves() -> None:
    """On an A100, half of 312 TFLOP/s and of 2039 GB/s; in float32, four fifths of 19.5; on an H100 in half as its balance is worse."""
    a100, h100 = (Roofline(gpu=catalogue().gpus[name], efficiencies=OWN) for name in ("A100", "H100"))
    product = Operation("matmul", 10**12, 10**9, torch.float16)
    moving = 1e9 / (0.5 * 2039e9)
    assert a100.seconds(product) == pytest.approx(1e12 / (0.5 * 312e12) + moving)
    assert a100.seconds(Operation("matmul", 10**12, 10**9, torch.float32)) == pytest.approx(1e12 / (0.8 * 19.5e12) + moving)
    assert a100.seconds(Operation("memory", 0, 100, torch.float32)) == 1e-6
    worse = (989.5 / 3350) / (312 / 2039)
    assert h100.seconds(product) == pytest.approx(1e12 * worse / (0.5 * 989.5e12) + 1e9 / (0.5 * 3350e9))


def test_a_table_holds_the_whole_step() -> None:
    """Layers add up to the step, every parameter has a gradient, and Adam holds 8 bytes and moves 28 of each parameter."""
    profile = estimate(_experiment(), "A100")
    table, memory = profile.tables[0], profile.memory
    assert memory is not None
    parameters = sum(gradient.numel for layer in table.layers for gradient in layer.gradients)
    assert parameters == 2 * (12 * 64**2 + 13 * 64) + (512 + 32 + 2) * 64
    assert memory.parameters == memory.gradients == 4 * parameters
    assert memory.optimizer_state == pytest.approx(8 * parameters, rel=0.01)
    assert memory.activations > 2 * 30 * 64 * LENGTH * BATCH
    assert max(gradient.ready for layer in table.layers for gradient in layer.gradients) == table.backward_ns
    efficiency = Roofline(gpu=catalogue().gpus["A100"]).efficiencies.memory
    assert table.update == pytest.approx(28 * parameters / (efficiency * 2039), rel=0.02)
    assert profile.estimated == 0.25
    assert estimate(_experiment(), "H100").estimated == 0.3  # few published runs


def test_recompute_runs_blocks_again() -> None:
    """Its backward is longer by the blocks' forwards, without what they compute after the last tensor that is needed, and it keeps less."""
    plain = estimate(_experiment(), "A100")
    blocks = {"recompute": True, "recompute_configs": {"checkpoints": ["blocks.0", "blocks.1"]}}
    again = estimate(_experiment(strategy=blocks), "A100")
    forward = sum(layer.forward for layer in plain.tables[0].layers if layer.name.startswith("blocks."))
    assert 0.75 * forward < again.tables[0].backward_ns - plain.tables[0].backward_ns < forward
    assert plain.memory is not None
    assert again.memory is not None
    assert again.memory.activations < plain.memory.activations


@pytest.mark.parametrize(
    ("experiment", "gpu", "what"),
    [
        (_experiment(strategy={"amp": True, "amp_configs": {"dtype": "bf16"}}), "V100", "V100 has no bf16"),
        (_experiment("word2vec", optimizer="sgd"), "A100", "sparse gradients"),
        (_experiment(strategy={"build_strategy": {"fuse_elewise_add_act_ops": True}}), "A100", "compiled code"),
        (_experiment(), "K80", "no such GPU"),
    ],
)
def test_what_cannot_be_estimated_is_refused(experiment: Experiment, gpu: str, what: str) -> None:
    """Never a wrong table."""
    with pytest.raises(ConfigError, match=what):
        estimate(experiment, gpu)


def test_an_estimate_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time it is read, and each GPU has its own; an experiment that is saved elsewhere finds it."""
    monkeypatch.chdir(tmp_path)
    relative = estimated(_experiment(), "A100", Path("runs"))
    (tmp_path / "elsewhere").mkdir()
    relative.save(tmp_path / "elsewhere" / "experiment.toml")
    assert profile_of(Experiment.load(tmp_path / "elsewhere" / "experiment.toml")) == profile_of(relative)
    first = estimated(_experiment(), "A100", tmp_path)
    assert profile_of(estimated(_experiment(), "A100", tmp_path)) == profile_of(first)
    other = estimated(_experiment(), "H100", tmp_path)
    assert len(list((tmp_path / "estimates").iterdir())) == 2
    ours, theirs = profile_of(first), profile_of(other)
    assert ours is not None
    assert theirs is not None
    assert theirs.tables[0].update < ours.tables[0].update
