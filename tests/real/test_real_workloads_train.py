"""An experiment's own workload as a script: what ``fleetbench launch --print`` starts where there is no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from processes import run_python
from torch.nn.functional import cross_entropy

from fleetbench.experiment import Experiment
from fleetbench.recommended import VARIABLE
from fleetbench.strategy import DistributedStrategy
from fleetbench.workloads.data.data import num_training_samples, open_batches, prepare
from fleetbench.workloads.data.reader import Sampler
from fleetbench.workloads.models.registry import build_model
from tuner.recommendation import Recommendation
from tuner.tune import store

EXPERIMENT = """\
schema = 1

[workload]
model = "digits_mlp"
steps = 21
steps_per_epoch = 20
lr = 0.1
lr_decay = [{ step = 5, factor = 0.1 }]

[run]
warmup_steps = 2
"""
EMULATED = """\
schema = 1

[workload]
model = "layers"
steps = 3
layers = [{ name = "a", params = 100, forward = "2 ms", backward = "4 ms", repeat = 2 }]

[cluster]
stragglers = [{ kind = "slow_rank", ranks = [0], factor = 3.0 }]

[run]
device = "emulated"
warmup_steps = 1
"""


def test_it_trains_the_experiment(tmp_path: Path) -> None:
    """Its log equals the losses of the same training written out: warm-up, batches, epochs and the learning rate's decay."""
    path = tmp_path / "e.toml"
    path.write_text(EXPERIMENT)
    done = run_python(["-m", "real.workloads.train", path], tmp_path)
    assert done.code == 0, done.out
    found = re.findall(r"^\[Epoch (\d), batch (\d+)\] loss: ([\d.]+)$", done.out, re.MULTILINE)
    experiment = Experiment.load(path)
    workload = experiment.workload
    prepare(workload, 0, tmp_path / "data")
    sampler = Sampler(
        num_samples=num_training_samples(tmp_path / "data"),
        batch_size=workload.batch_size,
        trainers=1,
        rank=0,
        seed=0,
        uneven="cut",
        wanted_steps=20,
    )
    batches = open_batches(workload, tmp_path / "data", sampler)
    model = build_model("digits_mlp", {}, workload.dtype, 0)
    losses = []
    for step in range(-1, 22):
        inputs, labels = batches.batch(step + 1)
        loss = cross_entropy(model(inputs), labels)
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_((0.1 if step < 5 else 0.01) * gradient)
    batches.close()
    assert [(int(epoch), int(batch)) for epoch, batch, _ in found] == [(0, 0), (1, 0)]
    for (_, _, text), expected in zip(found, (losses[2], losses[22]), strict=True):
        assert abs(float(text) - expected) < 2e-5


STORED = DistributedStrategy(nccl_comm_num=2)
FOUND = Recommendation(experiment="", name="e", verdict="USE", reason="", strategy=STORED, speedup=1.1, low=1.0, high=1.2)


def test_auto_trains_as_the_tuning_of_the_experiment_has_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of declared layers, on an emulated device."""
    path = tmp_path / "e.toml"
    path.write_text(EMULATED)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "named"))
    store(Experiment.load(path), FOUND, tmp_path / "runs")
    done = run_python(["-m", "real.workloads.train", path, "strategy.auto=true"], tmp_path)
    assert done.code == 0, done.out
    assert re.search("nccl_comm_num +2", done.out), done.out
