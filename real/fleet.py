"""fleet: the four lines that make a script's training distributed.

fleet.init(strategy)
model = fleet.distributed_model(model)
optimizer = fleet.distributed_optimizer(optimizer)
# the usual loop: loss.backward(); optimizer.step(); optimizer.zero_grad()

When ``loss.backward()`` returns, ``.grad`` has the averaged gradients, as with DistributedDataParallel.
Inside a Local SGD round, and on the batches before the k-th of a gradient merge, it has only this trainer's.
Adaptive steps need ``fleet.report(loss=loss)`` before ``optimizer.step()``. Strategies that count epochs need
``fleet.end_epoch()`` after each.

With ``sharding`` every trainer keeps a shard of the training's state. The optimizer is created after
``fleet.distributed_model``, which replaces the model's parameters by shards.

With parameter servers (``mode = "ps"``) every process of the job runs the same script:

if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    ...  # the usual loop
    fleet.stop_worker()
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fleetbench.advice import Advice, advice
from fleetbench.cluster import Cluster
from fleetbench.errors import ConfigError
from fleetbench.fleet_names import FieldHasNoEffect
from fleetbench.overview import overview
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import Workload
from real.collective import Collective, arrive
from real.processes.exits import at_exit
from real.processes.roles import TUNING, role_of
from real.training_log import TrainingLog

if TYPE_CHECKING:
    from fleetbench.staleness import ServerLoad
    from real.checkpoints.saving import Loaded
    from real.servers.served import Served


class Fleet:
    """The role of this process in its job.

    Life cycle: ``init``, ``distributed_model``, ``distributed_optimizer``, training.

    Methods that an evaluation calls leave ``torch.inference_mode``, because buffers created in it could not
    be written to later. Raises ``ConfigError`` for calls out of order, or a strategy that cannot be executed.
    """

    def __init__(self) -> None:
        self._job: Collective | Served | None = None
        self._log: TrainingLog | None = None

    def init(self, strategy: DistributedStrategy | None = None, *, timeout_s: float = 120.0, log_every: int = 0) -> None:
        """Join the other trainers, as the launcher's environment says; a script started alone is one trainer.

        It supports the variables of torchrun, ``fleetbench launch``, Paddle and Slurm, see
        ``real.processes.roles``. ``timeout_s`` limits every collective; with servers, it limits a synchronous
        step's wait for the other trainers, and a trainer or a server may be silent for a quarter of it. With
        ``log_every``, rank 0 prints the values of ``fleet.report`` for every ``log_every``-th batch.
        """
        if self._job is not None:
            raise ConfigError("this process already has its role", "fleet.init", hint="call it once")
        # multiprocessing checks it in the same way
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            what = "a process that a trainer has started, such as a DataLoader's worker, runs the whole script again"
            hint = 'put the training below `if __name__ == "__main__":`, or start workers by fork'
            raise ConfigError(what, "fleet.init", hint=hint)
        strategy = DistributedStrategy() if strategy is None else strategy
        if not isinstance(strategy, DistributedStrategy):
            hint = "DistributedStrategy(localsgd=True), DistributedStrategy.from_dict({...}) or DistributedStrategy.load(FILE)"
            raise ConfigError("is not a DistributedStrategy", "fleet.init", type(strategy).__name__, hint)
        if not 0 < timeout_s < float("inf"):
            raise ConfigError("must be above zero", "fleet.init(timeout_s=...)", repr(timeout_s), "120 gives every collective two minutes")
        if log_every < 0:
            raise ConfigError("cannot be negative", "fleet.init(log_every=...)", repr(log_every), "5 prints every fifth batch, 0 none")
        _warn_of_what_is_the_scripts(strategy)
        self._job = _joined(strategy, timeout_s)
        if self.is_first_worker():
            print(overview(strategy, self._job.environment()), file=sys.stderr)  # noqa: T201  # Fleet prints its box, too
            self._log = TrainingLog(log_every) if log_every else None

    @property
    def job(self) -> Collective | Served | None:
        """This process's part in its job; ``None`` before ``init``."""
        return self._job

    def distributed_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Start all trainers from rank 0's parameters and buffers, and hook the model; return the same model.

        Call it once for each model, and again, between two steps, after layers were unfrozen, added or
        replaced.
        """
        return self._joined("fleet.distributed_model").distributed_model(model)

    def distributed_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let ``optimizer.step()`` be the strategy's update of its models; return the same optimizer.

        Call it once for each optimizer. An optimizer that holds parameters of an earlier one replaces that
        one.
        """
        return self._joined("fleet.distributed_optimizer").distributed_optimizer(optimizer)

    def init_server(self, path: str | Path | None = None) -> bool:
        """On a server: take its address, and load this server's part of a checkpoint, if there is one.

        Returns whether a part was loaded.
        """
        return self._with_servers("fleet.init_server").init_server(None if path is None else Path(path))

    def run_server(self) -> ServerLoad:
        """On a server: serve until all trainers have ended, and return its load.

        Raises ``WorkerFailed``, which names the trainer, if a trainer fails.
        """
        return self._with_servers("fleet.run_server").run_server()

    def init_worker(self) -> None:
        """On a trainer: join the servers.

        Rank 0 sends the parameters, unless servers start from a checkpoint; the other trainers receive them.
        """
        self._with_servers("fleet.init_worker").trained("fleet.init_worker").begin()

    def stop_worker(self) -> None:
        """On a trainer: push the remaining gradients, and leave; after the last trainer the servers end.

        See ``pull_model`` for the servers' model.
        """
        self._with_servers("fleet.stop_worker").trained("fleet.stop_worker").finish()

    @staticmethod
    def advice(workload: Workload, cluster: Cluster, gradient_bytes: int | None = None) -> Advice:
        """Return the settings that Fleet's documents recommend, and those of them that do not apply here.

        ``gradient_bytes`` is the number of bytes of one step's dense gradients, which determines the size of
        buckets.
        """
        return advice(workload, cluster, gradient_bytes, device="cuda" if torch.cuda.is_available() else "cpu")

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backwards inside add to ``.grad`` only on this trainer; the next one outside exchanges the sum.

        The strategy does not count these backwards. A loop that accumulates gradients by itself uses it for
        all micro-batches except the last before ``optimizer.step()``. ``model.no_sync()`` is the same for one
        model, as in DistributedDataParallel.
        """
        return self._joined("fleet.no_sync").no_sync()

    def join(self, *, enable: bool = True, throw_on_early_termination: bool = False) -> AbstractContextManager[None]:
        """Let trainers have different numbers of batches inside, as ``DistributedDataParallel.join`` does.

        Every trainer enters it. Trainers without data contribute zeros, and gradients are divided by the
        number of all trainers. At the end all trainers have the model of the last one; the optimizer's state
        and ``.grad`` stay each trainer's own. It needs gradients that are averaged in every backward. With
        ``throw_on_early_termination`` all trainers instead raise ``RuntimeError`` in their next step once one
        has no data. ``model.join()`` is the same for one model.
        """
        return self._joined("fleet.join").join(enable=enable, throw_on_early_termination=throw_on_early_termination)

    @torch.inference_mode(mode=False)  # see ``Fleet``
    def synchronize(self) -> None:
        """Make the trainers agree between two averagings of Local SGD, before a save or an evaluation.

        Every trainer calls it. With synchronous training it does nothing. With parameter servers a single
        trainer may call it: its gradients are pushed, and its model becomes that of the servers, embeddings
        included. In GeoSGD the model stays the trainer's own copy, see ``pull_model``.
        """
        self._joined("fleet.synchronize").synchronize()

    @torch.inference_mode(mode=False)  # see ``Fleet``
    def pull_model(self) -> None:
        """With parameter servers: push, wait for the other trainers, and pull all that the servers hold.

        Every trainer calls it, after the same step, before ``stop_worker``. All end with the same model, and
        may continue to train from it. In GeoSGD it replaces the trainer's own copy, and changes that were not
        pushed yet are dropped. Without servers, it is ``synchronize``.
        """
        self._joined("fleet.pull_model").pull_model()

    def report(self, *, loss: torch.Tensor | float, **metrics: torch.Tensor | float) -> None:
        """Report the step's loss, one number, before ``optimizer.step()``; adaptive steps depend on it.

        ``metrics`` (``acc1=``, ``acc5=``, ...) are for the training log, see ``fleet.init(log_every=...)``,
        and for ``tune.metric``.
        """
        self._joined("fleet.report").report(loss, metrics)
        if self._log is not None:
            self._log.report({"loss": loss, **metrics})

    @torch.inference_mode(mode=False)  # see ``Fleet``
    def end_epoch(self) -> None:
        """End an epoch; every trainer calls it after the epoch's last ``optimizer.step()``."""
        self._joined("fleet.end_epoch").end_epoch()
        if self._log is not None:
            self._log.end_epoch()

    def worker_num(self) -> int:
        """Return the number of trainers; with elastic workers, in the last round."""
        return self._joined("fleet.worker_num").trainers

    def num_steps(self) -> int:
        """Return the number of steps that have begun; for a newcomer among elastic workers, they begin with its peers'.

        Raises ``ConfigError`` with parameter servers.
        """
        job = self._joined("fleet.num_steps")
        if not isinstance(job, Collective):
            raise ConfigError("counts the steps of trainers that average", "fleet.num_steps", hint="count them in the loop")
        return job.num_steps()

    def worker_index(self) -> int:
        """Return this trainer's rank. Raises ``ConfigError`` on a server."""
        return self._joined("fleet.worker_index").worker_index()

    def is_first_worker(self) -> bool:
        """Whether this is rank 0 of the trainers."""
        return self.is_worker() and self.worker_index() == 0

    def is_worker(self) -> bool:
        """Whether this process trains; always true without parameter servers."""
        return not self._joined("fleet.is_worker").is_server

    def is_server(self) -> bool:
        """Whether this process is a parameter server."""
        return not self.is_worker()

    def worker_endpoints(self) -> list[str]:
        """Return every trainer's address: ``host:port`` from the launcher, or else ``host:local rank``."""
        return list(self._joined("fleet.worker_endpoints").endpoints)

    def server_num(self) -> int:
        """Return the number of parameter servers, from the launcher."""
        return len(self._joined("fleet.server_num").role.servers)

    def server_index(self) -> int:
        """Return this server's number. Raises ``ConfigError`` on a trainer."""
        return self._joined("fleet.server_index").server_index()

    def barrier_worker(self) -> None:
        """Wait for all trainers."""
        self._joined("fleet.barrier_worker").barrier()

    @torch.inference_mode(mode=False)  # see ``Fleet``
    def save_persistables(self, path: str | Path, *, extra: Any = None) -> None:
        """Save everything that training needs to resume into the folder ``path``.

        Every trainer calls it, after the same step. It saves parameters, buffers, the optimizer's state,
        torch's random numbers and the strategy's progress, also within a round of Local SGD or a gradient
        merge, which it does not disturb. ``extra`` is the script's own plain data and tensors, such as
        ``scheduler.state_dict()``. The previous save stays current until this one is complete. All trainers
        must see the folder. With parameter servers every server writes its part on its own host, for
        ``fleet.init_server(path)``.
        """
        self._joined("fleet.save_persistables").save(Path(path), extra=extra)

    @torch.inference_mode(mode=False)  # see ``Fleet``
    def load_persistables(
        self,
        path: str | Path,
        *,
        predicate: Callable[[str], bool] | None = None,
        model: torch.nn.Module | None = None,
        resynchronize: bool = False,
    ) -> Loaded:
        """Resume from a save of ``save_persistables``, bit for bit.

        Every trainer calls it, after ``distributed_optimizer``. It needs the same number of trainers,
        strategy, models and optimizers, in the same order. With ``resynchronize``, other trainers or another
        strategy restart from the averaged parameters and rank 0's state. A sharded training resumes with
        other trainers, or in another stage, without it.

        With ``predicate``, it loads only the model's parameters and buffers that ``predicate`` selects by
        name, from a checkpoint or a file of tensors. It returns and prints which were loaded, which were
        not, and which are left over. ``model`` is one of several models; names have no prefix. With
        parameter servers, servers start from a checkpoint:
        ``fleet.init_server(path)``.
        """
        loaded = self._joined("fleet.load_persistables").load(Path(path), predicate=predicate, model=model, resynchronize=resynchronize)
        if self._log is not None and predicate is None:
            self._log.resume(loaded.epoch)
        return loaded

    @torch.inference_mode(mode=False)  # see ``Fleet``
    def save_inference_model(
        self, path: str | Path, example_inputs: Sequence[Any], *, dynamic_shapes: Any = None, model: torch.nn.Module | None = None
    ) -> None:
        """Export the model, or ``model`` of several, for a server by torch.export to ``path`` (.pt2).

        Every trainer calls it, and rank 0 writes. ``torch.export.load(path).module()`` runs it without this
        package. ``example_inputs`` are the forward's, with two samples or more. The first dimension of each
        is then a batch of any size, unless ``dynamic_shapes`` says otherwise, in the format of
        ``torch.export.export``. With parameter servers it calls ``pull_model`` and exports that model.
        """
        self._joined("fleet.save_inference_model").save_inference_model(Path(path), example_inputs, dynamic_shapes, model)

    def _with_servers(self, where: str) -> Served:
        if self._job is None or isinstance(self._job, Collective):
            hint = 'fleet.init(DistributedStrategy(mode="ps", a_sync=True)) first'
            raise ConfigError("this process is not in a job with parameter servers", where, hint=hint)
        return self._job

    def _joined(self, where: str) -> Collective | Served:
        if self._job is None:
            raise ConfigError("this process has no role yet", where, hint="call fleet.init first")
        return self._job


def _joined(strategy: DistributedStrategy, timeout_s: float) -> Collective | Served:
    """Create this process's part in a job with ``strategy``."""
    if strategy.mode == "ps":
        return _served(strategy, timeout_s)
    if strategy.is_elastic:
        from real.elastic.collective import ElasticCollective  # other training does not need it

        return ElasticCollective(strategy, timeout_s)
    if not strategy.sharding:
        return Collective(strategy, timeout_s)
    from real.sharded_collective import ShardedCollective  # torch's FSDP takes a second to import

    return ShardedCollective(strategy, timeout_s)


def _served(strategy: DistributedStrategy, timeout_s: float) -> Served:
    """Create this process's part in a job with parameter servers. Raises ``ConfigError`` in a tuning."""
    role = role_of(os.environ)
    if os.environ.get(TUNING):
        arrive(role.rank)  # lets the driver receive the error
        what = "a script with parameter servers is neither profiled nor tuned: legs change the strategies of collective training"
        raise ConfigError(what, "strategy.mode", "'ps'", "compare runs of fleetbench sim or real with different a_sync_configs")
    from real.servers.served import Served  # training without servers does not need it

    served = Served(role, strategy, timeout_s)
    at_exit(served.leave)
    return served


def _warn_of_what_is_the_scripts(strategy: DistributedStrategy) -> None:
    """Warn of settings that have no effect in a script: fields that its own loop decides, ``OMP_NUM_THREADS``."""
    for name, is_set in (
        ("gradient_merge_configs.lr_per", strategy.gradient_merge_configs.lr_per != "micro_batch"),
        ("fetch_every_n_steps", strategy.fetch_every_n_steps != 1),
    ):
        if is_set:
            warnings.warn(f"{name} has no effect in a script: its own loop decides that", FieldHasNoEffect, stacklevel=3)
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    is_unset = strategy.thread_num == DistributedStrategy().thread_num and not strategy.auto
    # a tuning's legs set it
    if is_unset and threads.isdecimal() and int(threads) != strategy.thread_num and not os.environ.get(TUNING):
        message = f"OMP_NUM_THREADS={threads} has no effect: a trainer has strategy.thread_num = {strategy.thread_num} threads"
        warnings.warn(f"{message}; set thread_num = {int(threads)} for as many", FieldHasNoEffect, stacklevel=3)


fleet = Fleet()
"""This process's role: the only object with process-wide state."""
