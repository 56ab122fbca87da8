"""An experiment's own workload as a script: what ``fleetbench launch --print`` starts where there is no other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from fleetbench.experiment import Experiment
from fleetbench.workloads.data.data import num_training_samples, open_batches, prepare
from fleetbench.workloads.data.reader import Sampler
from fleetbench.workloads.models.registry import build_model
from real.job.launcher import launch_script
from real.job.session import Session
from real.leg import Leg

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
SESSION = """\
schema = 1

[workload]
model = "digits_mlp"
steps = 12
batch_size = 16
optimizer = "momentum"
lr = 0.1
lr_decay = [{ step = 3, factor = 0.5 }]
eval_every = 4
target_loss = 0.01

[cluster]
trainers_per_node = 2

[strategy]
fuse_grad_size_in_MB = 0.05
gradient_merge = true
gradient_merge_configs = { k_steps = 2, lr_per = "update" }

[run]
warmup_steps = 3
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
TELL = """\
import json, os, sys
from pathlib import Path
from fleetbench.experiment import Experiment
from real.workloads.train import train
part = train(Experiment.load(sys.argv[1]), keep_times=True)
Path(f"{sys.argv[2]}.{os.environ.get('RANK', '0')}").write_text(json.dumps(part))
"""


def _run(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "real.workloads.train", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_it_trains_the_experiment(tmp_path: Path) -> None:
    """Its log equals the losses of the same training written out: warm-up, batches, epochs and the learning rate's decay."""
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


def test_it_is_one_leg_of_a_session_step_by_step(tmp_path: Path) -> None:
    """Losses of every rank and step, warm-up too, held-out loss, plan and parameters at the end: those of ``fleetbench real``."""
    path, script = tmp_path / "e.toml", tmp_path / "tell.py"
    path.write_text(SESSION)
    script.write_text(TELL)
    launch_script(2, [str(script), str(path), str(tmp_path / "part")], log_dir=tmp_path / "log", echo=lambda _: None)
    parts = [json.loads((tmp_path / f"part.{rank}").read_text()) for rank in range(2)]
    experiment = Experiment.load(path)
    leg = Leg(strategy=experiment.strategy, steps=12, warmup_steps=3, start="initial", evaluate=True)
    with Session(experiment) as session:
        expected = session.run(leg)
        other = session._parts(leg, None)
    found = {(step["record"]["rank"], step["record"]["step"]): step["record"]["loss"] for part in parts for step in part["steps"]}
    assert found == {(rank, step): loss for rank, step, loss in expected.steps[["rank", "step", "loss"]].itertuples(index=False)}
    assert len(found) == 2 * 15
    assert [part["final_loss"] for part in parts] == [expected.summary.final_loss] * 2
    assert [step for step, _ in parts[0]["held_out"]] == [4, 8, 12]
    assert parts[0]["plan"] == expected.plan.to_dict()
    assert len({part["parameters"] for part in (*parts, *other)}) == 1


def test_emulated_stragglers_are_carried_out(tmp_path: Path) -> None:
    """A trainer that is always three times as slow takes 36 ms for a step of 12 ms; deadlines are a step's, so a phase may lend another."""
    path = tmp_path / "e.toml"
    path.write_text(EMULATED)
    command = [sys.executable, "-P", "-c", TELL, str(path), str(tmp_path / "part")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    records = [step["record"] for step in json.loads((tmp_path / "part.0").read_text())["steps"]]
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert min(record["forward_ns"] + record["backward_ns"] for record in records) >= 35_000_000


def test_a_table_of_layers_is_refused(tmp_path: Path) -> None:
    """Nothing is computed by it; exit code 2, without a traceback."""
    path = tmp_path / "e.toml"
    layers = '[{ name = "a", params = 1, forward = "1 ms", backward = "1 ms" }]'
    path.write_text(f'schema = 1\n[workload]\nmodel = "layers"\nlayers = {layers}\n')
    done = _run(path)
    assert done.returncode == 2
    assert "error: workload.model" in done.stderr
    assert "Traceback" not in done.stderr
