"""What is learned, and in which ways: shared by measure.py, which starts the jobs, and train.py, which is a process of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetbench.workload import Workload
from fleetbench.workloads.data.data import PairBatches, num_training_samples, open_batches
from fleetbench.workloads.data.reader import Reader, Sampler
from fleetbench.workloads.models.registry import sizes

SERVERS, TRAINERS = 1, 2
ALONE = "single process"
MODES: Mapping[str, Mapping[str, Any]] = {
    ALONE: {},
    "synchronous": {"a_sync": False},
    "asynchronous": {"a_sync": True, "a_sync_configs": {"k_steps": 0}},
    "GeoSGD, K = 100": {"a_sync": True, "a_sync_configs": {"k_steps": 100, "send_wait_times": 500}},
    "GeoSGD, K = 400": {"a_sync": True, "a_sync_configs": {"k_steps": 400, "send_wait_times": 500}},
}
"""What a script's strategy has beside ``mode = "ps"``. Alone there is no strategy.

All else is the default, but in GeoSGD: there a trainer that has not come to step for 10 ms exchanges early, which on a machine with
other work happens all the time. It must have been idle for 5 s here, so that K is what it says.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A registry workload, trained by plain SGD.

    Learning rate and epochs are those at which the single process's held-out loss is least, on a seed that counts for nothing else.
    """

    workload: Workload
    rates: tuple[float, ...]
    most_epochs: int
    """Epochs that are tried; the loss is looked at behind each."""
    seeds: int
    decay: float = 1.0
    """Of the learning rate, for every ``DECAY_STEPS`` batches of all trainers together."""
    modes: tuple[str, ...] = tuple(MODES)
    data_seed: int | None = None
    """Draws the data; none: each seed draws its own."""
    own_negatives: bool = False
    """Each seed draws its own negatives for the training pairs; those of the held-out pairs are the data's, and alike for all."""


DECAY_STEPS = 100_000
TASKS: Mapping[str, Task] = {
    "word2vec": Task(
        workload=Workload(
            model="word2vec", data="pydocs", data_options={"window": 5, "negatives": 5}, model_options={"dim": 64}, batch_size=100
        ),
        rates=(1.0, 2.0, 4.0),
        most_epochs=16,
        seeds=5,
        decay=0.999,
        modes=tuple(mode for mode in MODES if mode != "synchronous"),
        data_seed=0,
        own_negatives=True,
    ),
    "wide_deep": Task(
        workload=Workload(model="wide_deep", data="synthetic", data_options={"samples": 200_000}, batch_size=100),
        rates=(0.2, 0.4, 0.8),
        most_epochs=2,
        seeds=3,
    ),
}


def rate_of(mode: str, rate: float) -> float:
    """The learning rate in a mode: the single process's, but as many times it as there are gradients in the mean of an update.

    A synchronous update is one by the mean of all trainers' gradients, a batch each, and there are
    fewer of them; in all other modes each batch makes a change of its own.
    """
    return rate * TRAINERS if mode == "synchronous" else rate


def batches_of(task: Task, data: Path, seed: int, *, trainers: int, rank: int) -> tuple[Reader, Sampler]:
    """A trainer's part of the batches; those of all trainers laid end to end are the single process's."""
    workload = task.workload
    sampler = Sampler(
        num_samples=num_training_samples(data),
        batch_size=workload.batch_size,
        trainers=trainers,
        rank=rank,
        seed=seed,
        uneven=workload.uneven_data,
    )
    if task.own_negatives:
        return PairBatches(data, sampler, sizes(workload, "pairs")["negatives"], seed), sampler
    return open_batches(workload, data, sampler), sampler
