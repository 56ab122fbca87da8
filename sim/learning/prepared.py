"""Prepared: initial state of virtual trainers, with collectives or parameter servers."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.quantities import counted
from fleetbench.workload import Workload
from fleetbench.workloads.data.data import open_batches, prepare
from fleetbench.workloads.models.registry import build_model, loss_of, placeholder_batch, placeholder_model
from fleetbench.workloads.training import HeldOut, sampler_of

Progress = Callable[[int, int], None]
"""Callback with the number of steps done, and the number of all steps."""
Say = Callable[[str], None]
"""Callback with a message about the memory that a training run takes, before it is taken."""
Look = Callable[[], None]
"""Callback before each trainer's batch, or before the joint batch of all trainers; it may raise to stop training."""


def never() -> None:
    """Do nothing: the ``Look`` of a training run without a limit."""


class Prepared:
    """An experiment's data, below ``folder``, its initial model, and all trainers' joint batches."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        """Prepare data and build models. Raises ``ConfigError`` if memory does not suffice for the models."""
        workload, trainers, seed = experiment.workload, experiment.cluster.trainers, experiment.run.seed
        refuse_beyond(trainers, _LEAST_COPIES * sum(value.nbytes for value in placeholder_model(workload).parameters()))
        prepare(workload, seed, folder)
        sampler = sampler_of(experiment, folder, trainers, 0)
        self.steps_per_epoch = sampler.steps_per_epoch
        self.batches = open_batches(workload, folder, dataclasses.replace(sampler, batch_size=sampler.batch_size * trainers, trainers=1))
        self.compare = loss_of(workload.model)
        self.model, scratch = (build_model(workload.model, workload.model_options, workload.dtype, seed) for _ in range(2))
        self.held_out = HeldOut(scratch, folder, self.compare)


_LEAST_COPIES = 4
"""Least number of copies of the parameters in memory: the model, one for evaluation, the trained ones, and
gradients."""


def step_flops(workload: Workload) -> int:
    """Return the estimated number of floating-point operations of one trainer's forward and backward."""
    model = placeholder_model(workload)
    densely(model)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        inputs, labels = placeholder_batch(workload)
        loss_of(workload.model)(model(inputs), labels).backward()
    return int(counter.get_total_flops())


def densely(model: nn.Module) -> None:
    """Make embeddings' gradients dense, with zeros for untouched rows.

    For optimizers that accept sparse gradients, the update is the same.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False


def free_bytes(device: str) -> int:
    """Return the free memory of ``device``, ``cpu`` or ``cuda``, in bytes."""
    return psutil.virtual_memory().available if device == "cpu" else torch.cuda.mem_get_info()[0]


def refuse_beyond(trainers: int, needed: int) -> None:
    """Raise ``ConfigError`` if virtual trainers need more bytes than the host's memory has free."""
    if needed > (free := free_bytes("cpu")):
        value = f"{counted(trainers, 'trainer')} take about {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free"
        raise ConfigError("virtual trainers do not fit into memory", "cluster", value, "simulate fewer trainers, or leave --loss out")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Return a context that computes with one CPU thread, because threads of small operations mostly wait.

    A GPU computes with full float32 precision.
    """
    before = torch.get_num_threads(), torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
        torch.set_float32_matmul_precision(before[2])
