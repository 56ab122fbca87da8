"""fleet: the four lines that make a script's training distributed.

    fleet.init(strategy)
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)
    # the usual loop: loss.backward(); optimizer.step(); optimizer.zero_grad()

When ``loss.backward()`` returns, ``.grad`` holds the averaged gradients, as with
DistributedDataParallel. Inside a Local SGD round, and on the batches before the k-th of a gradient
merge, it holds this trainer's own. Adaptive steps need ``fleet.report(loss=loss)`` before
``optimizer.step()``; what counts epochs needs ``fleet.end_epoch()`` behind each.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from fleetbench.advice import Advice, advice
from fleetbench.cluster import Cluster
from fleetbench.errors import ConfigError
from fleetbench.experiment import HierarchySwitchedOff
from fleetbench.overview import overview
from fleetbench.plan.family import PLANNED
from fleetbench.strategy import DistributedStrategy, FieldHasNoEffect
from fleetbench.support import refuse_unexecuted
from fleetbench.workload import Workload
from real.communication.communicators import Communicators
from real.communication.device import device_of
from real.engine.engine import Engine
from real.processes.orphan import end_with_parent

STORE = "FLEETBENCH_STORE"
"""Environment variable with the file through which the ranks of ``fleetbench launch`` find each other."""


class Fleet:
    """The role of this process. Life cycle: ``init``, ``distributed_model``, ``distributed_optimizer``, training.

    Raises ``ConfigError`` when they are called out of order, or for a strategy that cannot be executed.
    """

    def __init__(self) -> None:
        self._strategy = DistributedStrategy()
        self._communicators: Communicators | None = None
        self._engine: Engine | None = None
        self._has_optimizer = False
        self._exit_group: dist.ProcessGroup | None = None

    def init(self, strategy: DistributedStrategy | None = None, *, timeout_s: float = 120.0) -> None:
        """Join the other trainers, as the launcher's environment says; a script started alone is one trainer.

        ``timeout_s`` bounds every collective.
        """
        if self._communicators is not None:
            raise ConfigError("this process has its role already", "fleet.init", hint="call it once")
        strategy = DistributedStrategy() if strategy is None else strategy
        if not isinstance(strategy, DistributedStrategy):
            hint = "DistributedStrategy(localsgd=True), DistributedStrategy.from_dict({...}) or DistributedStrategy.load(FILE)"
            raise ConfigError("is no DistributedStrategy", "fleet.init", type(strategy).__name__, hint)
        if not 0 < timeout_s < float("inf"):
            raise ConfigError("must be above zero", "fleet.init(timeout_s=...)", repr(timeout_s), "120 gives every collective two minutes")
        _warn_of_what_is_the_scripts(strategy)
        refuse_unexecuted(strategy, "strategy", PLANNED, "the real executor")
        if not dist.is_initialized():
            _join(timedelta(seconds=timeout_s))
            atexit.register(self._leave)
        self._strategy = strategy
        backend = "nccl" if dist.get_backend() == "nccl" else "gloo"
        device = device_of("cuda" if backend == "nccl" else "cpu")
        self._communicators = Communicators(backend, timedelta(seconds=timeout_s), device)
        self._communicators.barrier()
        # A group of its own: a rank that leaves must not be taken for one that reduces. Half the time, so that it speaks first.
        self._exit_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s / 2))
        if self.is_first_worker():
            print(overview(strategy, {"trainers": self.worker_num(), "backend": backend}), file=sys.stderr)  # noqa: T201  # Fleet prints its box, too

    def distributed_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Start all trainers from rank 0's parameters and buffers, and hook the model; returns the same model."""
        if self._engine is not None:
            raise ConfigError("this process trains a model already", "fleet.distributed_model", hint="one model a process")
        self._engine = Engine(
            model,
            self._strategy,
            self._joined("fleet.distributed_model"),
            keep_times=False,
            trainers_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )
        if self._strategy.use_hierarchical_allreduce and "inner" not in self._engine.plan.parts:
            message = "one node has no hierarchy: use_hierarchical_allreduce is switched off"
            warnings.warn(message, HierarchySwitchedOff, stacklevel=2)
        return model

    def distributed_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let ``optimizer.step()`` be the strategy's update; returns the same optimizer."""
        if self._engine is None:
            raise ConfigError("there is no model yet", "fleet.distributed_optimizer", hint="call fleet.distributed_model first")
        if self._has_optimizer:
            raise ConfigError("this process has its optimizer already", "fleet.distributed_optimizer", hint="one optimizer a process")
        averages_state = self._strategy.averaging.optimizer_state == "average"
        if self._strategy.is_local and not averages_state and not isinstance(optimizer, torch.optim.SGD):
            raise ConfigError(
                "Local SGD averages parameters, which is not a step of averages for this optimizer",
                "fleet.distributed_optimizer",
                type(optimizer).__name__,
                'use torch.optim.SGD, or set optimizer_state = "average"',
            )
        self._engine.attach_optimizer(optimizer)
        self._has_optimizer = True
        return optimizer

    @staticmethod
    def advice(workload: Workload, cluster: Cluster, gradient_bytes: int | None = None) -> Advice:
        """What Fleet's documents would use for a workload on a cluster, and what of it does not fit here.

        ``gradient_bytes`` are those of one step's dense gradients, which the size of buckets follows.
        """
        return advice(workload, cluster, gradient_bytes, device="cuda" if torch.cuda.is_available() else "cpu")

    def synchronize(self) -> None:
        """Make the trainers agree between two averagings of Local SGD, before a save or an evaluation.

        Every trainer calls it. With synchronous training there is nothing to do.
        """
        self._trained("fleet.synchronize").flush()

    def report(self, *, loss: torch.Tensor | float) -> None:
        """Tell the step's loss, one number, before ``optimizer.step()``; adaptive steps follow it."""
        self._trained("fleet.report").report(loss)

    def end_epoch(self) -> None:
        """Say that an epoch's data are used up; every trainer does, behind its last ``optimizer.step()``."""
        self._trained("fleet.end_epoch").end_epoch()

    def worker_num(self) -> int:
        """Number of trainers."""
        return self._joined("fleet.worker_num").trainers

    def worker_index(self) -> int:
        """This trainer's rank."""
        return self._joined("fleet.worker_index").rank

    def is_first_worker(self) -> bool:
        """Whether this is rank 0."""
        return self.worker_index() == 0

    def is_worker(self) -> bool:
        """Whether this process trains; always, without parameter servers."""
        return self._joined("fleet.is_worker") is not None

    def barrier_worker(self) -> None:
        """Meet all trainers."""
        self._joined("fleet.barrier_worker").barrier()

    def _joined(self, where: str) -> Communicators:
        if self._communicators is None:
            raise ConfigError("this process has no role yet", where, hint="call fleet.init first")
        return self._communicators

    def _trained(self, where: str) -> Engine:
        if self._engine is None:
            raise ConfigError("there is no model yet", where, hint="call fleet.distributed_model first")
        return self._engine

    def _leave(self) -> None:
        """At exit: leave together, unless this process leaves because of an error."""
        if not dist.is_initialized():
            return
        if self._communicators is not None and not hasattr(sys, "last_value"):
            try:
                dist.barrier(group=self._exit_group)
            except RuntimeError:
                rank = self._communicators.rank
                print(f"rank {rank} has ended while others still train: it left early, or had fewer batches", file=sys.stderr)  # noqa: T201  # the worker's log
                sys.stderr.flush()
                os._exit(1)
            self._communicators.close()
        dist.destroy_process_group()


def _warn_of_what_is_the_scripts(strategy: DistributedStrategy) -> None:
    """Some fields say how a registry workload is trained; in a user's script they are the loop's own business."""
    for name, is_set in (
        ("gradient_merge_configs.lr_per", strategy.gradient_merge_configs.lr_per != "micro_batch"),
        ("fetch_every_n_steps", strategy.fetch_every_n_steps != 1),
    ):
        if is_set:
            warnings.warn(f"{name} has no effect in a script: its own loop decides that", FieldHasNoEffect, stacklevel=3)


def _join(timeout: timedelta) -> None:
    if "RANK" not in os.environ:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)  # type: ignore[attr-defined]  # missing from __all__ only
        return
    store = os.environ.get(STORE)
    if store is not None:
        end_with_parent()
    try:
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"file://{store}" if store is not None else "env://",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timeout,
        )
    except KeyError as error:
        raise ConfigError(
            "the launcher's environment is incomplete", str(error.args[0]), hint="start with fleetbench launch or torchrun"
        ) from None


fleet = Fleet()
"""This process's role: the one object with process-wide state."""
