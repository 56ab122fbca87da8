"""Registry script: an experiment's own workload, trained as a user's script would train it.

``python -m real.registry_script EXPERIMENT.toml [KEY=VALUE ...]``, under any launcher that ``fleet.init`` understands, or
alone. So what starts a user's script on a cluster starts an experiment without one, too.
"""

from __future__ import annotations

import os
import sys

import torch

from fleetbench.errors import ConfigError, FleetbenchError
from fleetbench.experiment import Experiment
from fleetbench.workload import LAYERS
from real.communication.device import device_of
from real.data.data import Sampler, num_training_samples, open_batches, prepare
from real.fleet import fleet
from real.leg_training import set_learning_rate
from real.models.registry import Loss, build_model, loss_of
from real.processes.folders import temporary_folder
from real.script.variable import TUNING
from real.training import make_optimizer, refuse_dense_optimizer

LOG_EVERY = 20


def train(experiment: Experiment) -> None:
    """Train the experiment's steps; rank 0 prints the training log. Raises ``ConfigError`` for a workload that computes nothing."""
    workload, run = experiment.workload, experiment.run
    if workload.model == LAYERS:
        hint = "name a model of the registry, or print the launch of a script of your own: --print FORM EXPERIMENT.toml -- train.py"
        raise ConfigError("a table of layers computes nothing", "workload.model", repr(workload.model), hint)
    fleet.init(experiment.strategy, timeout_s=run.timeout * 1e-9, log_every=LOG_EVERY)
    device = device_of(run.device)
    model = fleet.distributed_model(build_model(workload.model, workload.model_options, workload.dtype, run.seed).to(device))
    if experiment.strategy.mode == "collective":
        refuse_dense_optimizer(model, workload)
    optimizer = fleet.distributed_optimizer(make_optimizer(model, workload))
    compare = loss_of(workload.model)
    with temporary_folder() as data:
        prepare(workload, run.seed, data)  # each trainer for itself: nodes share no disk that we know of
        sampler = Sampler(
            num_samples=num_training_samples(data),
            batch_size=workload.batch_size,
            trainers=fleet.worker_num(),
            rank=fleet.worker_index(),
            seed=run.seed,
            uneven=workload.uneven_data,
            wanted_steps=workload.steps_per_epoch,
        )
        batches = open_batches(workload, data, sampler, device.type)
        try:
            for step in range(1, workload.steps + 1):
                set_learning_rate(optimizer, workload, step)
                inputs, labels = (tensor.to(device, non_blocking=True) for tensor in batches.batch(step - 1))
                _step(compare, model, optimizer, inputs, labels)
                if step % sampler.steps_per_epoch == 0:
                    fleet.end_epoch()
        finally:
            batches.close()
    fleet.synchronize()


def _step(compare: Loss, model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    loss = compare(model(inputs), labels)
    fleet.report(loss=loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    try:
        train(Experiment.load(sys.argv[1], sys.argv[2:]))
    except FleetbenchError as error:
        if os.environ.get(TUNING):  # whose driver hears of what nobody catches
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201  # the worker's log
        sys.exit(error.exit_code)
