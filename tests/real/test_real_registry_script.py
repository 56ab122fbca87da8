"""An experiment's own workload as a script: what ``fleetbench launch --print`` starts where there is no other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from fleetbench.experiment import Experiment
from real.data.data import Sampler, num_training_samples, open_batches, prepare
from real.models.registry import build_model

EXPERIMENT = """\
schema = 1

[workload]
model = "digits_mlp"
steps = 21
steps_per_epoch = 20
lr = 0.1
lr_decay = [{ step = 5, factor = 0.1 }]
"""


def _run(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "real.registry_script", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_it_trains_the_experiment(tmp_path: Path) -> None:
    """Its log equals the losses of the same training written out: batches, epochs and the learning rate's decay."""
    path = tmp_path / "e.toml"
    path.write_text(EXPERIMENT)
    done = _run(path)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^\[Epoch (\d), batch (\d+)\] loss: ([\d.]+)$", done.stdout, re.MULTILINE)
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
    for step in range(1, 22):
        inputs, labels = batches.batch(step - 1)
        loss = cross_entropy(model(inputs), labels)
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_((0.1 if step < 5 else 0.01) * gradient)
    batches.close()
    assert [(int(epoch), int(batch)) for epoch, batch, _ in found] == [(0, 0), (1, 0)]
    for (_, _, text), expected in zip(found, (losses[0], losses[20]), strict=True):
        assert abs(float(text) - expected) < 2e-5


def test_a_table_of_layers_is_refused(tmp_path: Path) -> None:
    """Nothing is computed by it; exit code 2, without a traceback."""
    path = tmp_path / "e.toml"
    layers = '[{ name = "a", params = 1, forward = "1 ms", backward = "1 ms" }]'
    path.write_text(f'schema = 1\n[workload]\nmodel = "layers"\nlayers = {layers}\n')
    done = _run(path)
    assert done.returncode == 2
    assert "error: workload.model" in done.stderr
    assert "Traceback" not in done.stderr
