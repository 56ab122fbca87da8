"""One process of a job, which trains a task in a mode: ``python train.py OUT DATA TASK MODE RATE EPOCHS SEED``.

In all modes but one it is ``fleetbench launch`` that starts it. DATA is what ``data.prepare`` wrote. Of the parameters, a
single process leaves its own behind every epoch N in OUT/epochN.safetensors, a server its own in OUT/checkpoint, and in
GeoSGD trainer 0 its copy in OUT/trainer0.safetensors. A server leaves its report in OUT/server.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tasks import ALONE, DECAY_STEPS, MODES, TASKS, Task, batches_of

from fleetbench import DistributedStrategy, fleet
from fleetbench.workloads.data.reader import Reader, Sampler
from fleetbench.workloads.models.registry import build_model, loss_of


def main(out: str, data: str, task_name: str, mode: str, rate: str, epochs: str, seed: str) -> None:  # as the command line has them
    """Train, or serve."""
    torch.set_num_threads(1)
    task = TASKS[task_name]
    workload = task.workload
    model = build_model(workload.model, workload.model_options, workload.dtype, int(seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=float(rate))
    if mode == ALONE:
        batches, sampler = batches_of(task, Path(data), int(seed), trainers=1, rank=0)
        for epoch in range(int(epochs)):
            _train(task, model, optimizer, batches, sampler, epoch)
            _save(model, Path(out, f"epoch{1 + epoch}.safetensors"))
        return
    fleet.init(DistributedStrategy.from_dict({"mode": "ps", **MODES[mode]}))
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)
    if fleet.is_server():
        fleet.init_server()
        report = fleet.run_server()
        found = {"updates": report.staleness.total(), "staleness": {str(lag): num for lag, num in sorted(report.staleness.items())}}
        Path(out, "server.json").write_text(json.dumps(found), encoding="utf-8")
        return
    fleet.init_worker()
    batches, sampler = batches_of(task, Path(data), int(seed), trainers=fleet.worker_num(), rank=fleet.worker_index())
    for epoch in range(int(epochs)):
        _train(task, model, optimizer, batches, sampler, epoch)
    fleet.synchronize()
    fleet.barrier_worker()
    if mode.startswith("GeoSGD") and fleet.is_first_worker():  # in the other modes the servers have the only copy
        _save(model, Path(out, "trainer0.safetensors"))
    fleet.save_persistables(Path(out, "checkpoint"))
    fleet.stop_worker()


def _train(task: Task, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Reader, sampler: Sampler, epoch: int) -> None:
    """The usual loop, for an epoch."""
    compare, group = loss_of(task.workload.model), optimizer.param_groups[0]
    for position in range(epoch * sampler.steps_per_epoch, (1 + epoch) * sampler.steps_per_epoch):
        group["lr"] = optimizer.defaults["lr"] * task.decay ** (position * sampler.trainers / DECAY_STEPS)
        inputs, labels = batches.batch(position)
        optimizer.zero_grad()
        compare(model(inputs), labels).backward()
        optimizer.step()


def _save(model: torch.nn.Module, path: Path) -> None:
    save_file({name: value.detach().clone() for name, value in model.state_dict().items()}, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
