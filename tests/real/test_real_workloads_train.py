"""An experiment's own workload as a script: what ``fleetbench launch --print`` starts where there is no other."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from processes import run_python
from torch.nn.functional import cross_entropy

from fleetbench.experiment import Experiment
from fleetbench.recommended import VARIABLE
from fleetbench.strategy import DistributedStrategy, LocalSGDConfigs
from fleetbench.workloads.data.data import num_training_samples, open_batches, prepare
from fleetbench.workloads.data.reader import Sampler
from fleetbench.workloads.models.registry import build_model
from real.job.script_session import RECORD, ScriptSession
from real.job.session import Session
from real.leg import Leg
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
FOUR_LINES = """\
import os, sys
from pathlib import Path
from fleetbench import fleet
from fleetbench.experiment import Experiment
from fleetbench.workloads.data.data import open_batches, prepare
from fleetbench.workloads.models.registry import build_model, loss_of
from fleetbench.workloads.training import make_optimizer, sampler_of
from real.training import checksum
experiment, told = Experiment.load(sys.argv[1]), Path(f"{sys.argv[2]}.{os.environ['RANK']}")
workload, data = experiment.workload, Path(f"{sys.argv[2]}.data{os.environ['RANK']}")
fleet.init(experiment.strategy)
prepare(workload, experiment.run.seed, data)
model = fleet.distributed_model(build_model(workload.model, workload.model_options, workload.dtype, experiment.run.seed))
optimizer = fleet.distributed_optimizer(make_optimizer(model, workload))
batches = open_batches(workload, data, sampler_of(experiment, data, fleet.worker_num(), fleet.worker_index()))
compare, seen = loss_of(workload.model), []
try:
    for step in range(10_000):
        inputs, labels = batches.batch(step)
        loss = compare(model(inputs), labels)
        fleet.report(loss=loss)
        loss.backward()
        try:
            optimizer.step()
        finally:
            seen.append(checksum(model))
        optimizer.zero_grad()
finally:
    batches.close()
    told.write_text(" ".join(seen))
"""
TELL = """\
import json, os, sys
from pathlib import Path
from fleetbench.experiment import Experiment
from real.workloads.train import train
part = train(Experiment.load(sys.argv[1]), keep_times=True)
Path(f"{sys.argv[2]}.{os.environ.get('RANK', '0')}").write_text(json.dumps(part))
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


@pytest.mark.slow
@pytest.mark.usefixtures("forked_launches")
def test_a_leg_of_an_experiment_is_a_leg_of_a_script(tmp_path: Path) -> None:
    """The experiment written as a loop with the four lines: equal losses of every rank and step, plans and parameters of three legs."""
    path, script = tmp_path / "e.toml", tmp_path / "loop.py"
    constant = SESSION.replace('optimizer = "momentum"', 'optimizer = "sgd"').replace('lr_per = "update"', 'lr_per = "micro_batch"')
    path.write_text("\n".join(line for line in constant.splitlines() if "lr_decay" not in line and "target_loss" not in line))
    script.write_text(FOUR_LINES)
    experiment = Experiment.load(path)
    local = DistributedStrategy(localsgd=True, localsgd_configs=LocalSGDConfigs(k_steps=3), fuse_grad_size_in_MB=0.05)
    legs = [Leg(strategy=local, steps=8, warmup_steps=3), Leg(steps=5, warmup_steps=2)]
    launch = [sys.executable, "-m", "fleetbench", "launch", "--nproc", "2", "--log-dir", str(tmp_path / "log")]
    with ScriptSession([*launch, str(script), str(path), str(tmp_path / "seen")], Experiment(name="loop")) as session:
        of_script = [session.run(leg) for leg in legs]
    first = dataclasses.replace(RECORD, strategy=experiment.strategy, start="continue")
    with Session(experiment) as session:
        parts = [session._parts(leg, None) for leg in (first, *legs)]
    with Session(experiment) as session:
        of_experiment = [session.run(leg) for leg in (first, *legs)][1:]
    for one, other in zip(of_script, of_experiment, strict=True):
        columns = ["rank", "step", "loss", "local_steps", "bytes_sent"]
        assert one.steps[columns].astype(object).equals(other.steps[columns].astype(object))
        assert one.plan.to_dict() == other.plan.to_dict()
    for rank in range(2):
        seen = (tmp_path / f"seen.{rank}").read_text().split()
        assert [seen[number - 1] for number in (13, 13 + 11, 13 + 11 + 7)] == [leg[rank]["parameters"] for leg in parts]
        assert len(set(seen)) > 20  # of 31 micro-batches, 13 of which are merged by twos


def test_emulated_stragglers_are_carried_out(tmp_path: Path) -> None:
    """A trainer that is always three times as slow takes 36 ms for a step of 12 ms; a step may lend another what the host did in between.

    That is 4 ms at most, a forward's; the clock runs from the first step's begin.
    """
    path, script = tmp_path / "e.toml", tmp_path / "tell.py"
    path.write_text(EMULATED)
    script.write_text(TELL)
    done = run_python([script, path, tmp_path / "part"], tmp_path)
    assert done.code == 0, done.out
    records = [step["record"] for step in json.loads((tmp_path / "part.0").read_text())["steps"]]
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert records[-1]["end_ns"] - records[0]["start_ns"] >= 4 * 36_000_000
    assert min(record["forward_ns"] + record["backward_ns"] for record in records) >= 36_000_000 - 4_000_000


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
