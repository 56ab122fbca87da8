"""fleet: the four lines that make a script's training distributed.

    fleet.init(strategy)
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)
    # the usual loop: loss.backward(); optimizer.step(); optimizer.zero_grad()

When ``loss.backward()`` returns, ``.grad`` holds the averaged gradients, as with
DistributedDataParallel. Inside a Local SGD round, and on the batches before the k-th of a gradient
merge, it holds this trainer's own. Adaptive steps need ``fleet.report(loss=loss)`` before
``optimizer.step()``; what counts epochs needs ``fleet.end_epoch()`` behind each.

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

import atexit
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from real.checkpoints.meeting import Meeting
from real.communication.communicators import Communicators, Errors, collective_errors
from real.communication.device import backend_of_world, device_of
from real.engine.engine import Engine
from real.engine.hooks import NoSync
from real.processes.failures import Failures, watch_failures
from real.processes.joining import join
from real.processes.roles import JOINED, Role, launcher_of, role_of
from real.recommended import recommended, refuse_beside_auto
from real.script.variable import TUNING
from real.training_log import TrainingLog

if TYPE_CHECKING:
    from real.checkpoints.saving import Loaded
    from real.script.legs import ScriptLegs
    from real.servers.served import Served
    from real.servers.server_report import ServerReport


class Fleet:
    """The role of this process. Life cycle: ``init``, ``distributed_model``, ``distributed_optimizer``, training.

    Raises ``ConfigError`` when they are called out of order, or for a strategy that cannot be executed.
    """

    def __init__(self) -> None:
        self._strategy = DistributedStrategy()
        self._communicators: Communicators | None = None
        self._engine: Engine | None = None
        self._has_optimizer = False
        self._failures: Failures | None = None
        self._meeting: Meeting | None = None
        self._endpoints: tuple[str, ...] = ()
        self._role = Role()
        self._log: TrainingLog | None = None
        self._legs: ScriptLegs | None = None
        self._served: Served | None = None

    def init(self, strategy: DistributedStrategy | None = None, *, timeout_s: float = 120.0, log_every: int = 0) -> None:
        """Join the other trainers, as the launcher's environment says; a script started alone is one trainer.

        The variables of torchrun, ``fleetbench launch``, Paddle and Slurm are understood, see ``real.processes.roles``.
        ``timeout_s`` bounds every collective; with servers, a synchronous step's wait for the other trainers, and a quarter of it
        is how long a trainer or a server may be silent. With ``log_every``, rank 0 prints what ``fleet.report`` is told
        of every so many batches.
        """
        if self._communicators is not None or self._served is not None:
            raise ConfigError("this process has its role already", "fleet.init", hint="call it once")
        strategy = DistributedStrategy() if strategy is None else strategy
        if not isinstance(strategy, DistributedStrategy):
            hint = "DistributedStrategy(localsgd=True), DistributedStrategy.from_dict({...}) or DistributedStrategy.load(FILE)"
            raise ConfigError("is no DistributedStrategy", "fleet.init", type(strategy).__name__, hint)
        if not 0 < timeout_s < float("inf"):
            raise ConfigError("must be above zero", "fleet.init(timeout_s=...)", repr(timeout_s), "120 gives every collective two minutes")
        if log_every < 0:
            raise ConfigError("cannot be negative", "fleet.init(log_every=...)", repr(log_every), "5 prints every fifth batch, 0 none")
        _warn_of_what_is_the_scripts(strategy)
        if strategy.mode == "ps":
            self._init_served(strategy, timeout_s, log_every)
            return
        if strategy.auto:
            refuse_beside_auto(strategy)
        else:
            refuse_unexecuted(strategy, "strategy", PLANNED, "the real executor")
        self._role = role_of(os.environ)
        _arrive()
        if not dist.is_initialized():
            join(self._role, timedelta(seconds=timeout_s))
            atexit.register(_part)
        self._strategy = strategy
        backend = backend_of_world()
        device = device_of("cuda" if backend == "nccl" else "cpu", self._role.local_rank)
        atexit.register(self._leave)
        self._communicators = Communicators(backend, timedelta(seconds=timeout_s), device, errors=self._watch_failures())
        self._communicators.barrier()
        self._meeting = Meeting(timedelta(seconds=timeout_s), self._failures)
        self._endpoints = self._role.endpoints or self._meeting.places(self._role.local_rank)
        if self.is_first_worker():
            print(overview(strategy, self._environment(backend)), file=sys.stderr)  # noqa: T201  # Fleet prints its box, too
            self._log = TrainingLog(log_every) if log_every else None
        if os.environ.get(TUNING):
            from real.script.legs import ScriptLegs

            self._legs = ScriptLegs.join(self._communicators, self._role.trainers_per_node or 1)

    def distributed_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Start all trainers from rank 0's parameters and buffers, and hook the model; returns the same model."""
        if self._served is not None:
            return self._served.distributed_model(model)
        if self._engine is not None:
            raise ConfigError("this process trains a model already", "fleet.distributed_model", hint="one model a process")
        if self._strategy.auto:
            self._strategy = self._recommended(model)
        if self._role.trainers_per_node is None and self._strategy.use_hierarchical_allreduce:
            hint = "start as many trainers on every node, and a node's in one row (srun --ntasks-per-node=N --distribution=block)"
            what = "nodes differ in their number of trainers, or ranks are not numbered node by node"
            raise ConfigError(what, "strategy.use_hierarchical_allreduce", "true", hint)
        self._engine = Engine(
            model,
            self._strategy,
            self._joined("fleet.distributed_model"),
            keep_times=False,
            trainers_per_node=self._role.trainers_per_node or 1,
        )
        self._use(self._engine)
        if self._strategy.use_hierarchical_allreduce and "inner" not in self._engine.plan.parts:
            message = "one node has no hierarchy: use_hierarchical_allreduce is switched off"
            warnings.warn(message, HierarchySwitchedOff, stacklevel=2)
        if not hasattr(model, "no_sync"):
            model.no_sync = NoSync(self.no_sync)  # type: ignore[assignment]  # modules take any attribute
        return model

    def distributed_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let ``optimizer.step()`` be the strategy's update; returns the same optimizer."""
        if self._served is not None:
            return self._served.distributed_optimizer(optimizer)
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
        if self._legs is not None:
            self._legs.begin(self._engine, optimizer, self._use)
        return optimizer

    def init_server(self, path: str | Path | None = None) -> bool:
        """On a server: take its address. With the folder of a checkpoint, begin from this server's part, if it is there; whether it was."""
        return self._with_servers("fleet.init_server").init_server(None if path is None else Path(path))

    def run_server(self, *, save_to: str | Path | None = None, save_every_s: float | None = None) -> ServerReport:
        """On a server: serve until all trainers have ended.

        With ``save_to``, it writes its part of the parameters there at the end, and every ``save_every_s`` seconds.
        Raises ``WorkerFailed`` naming the trainer without which synchronous training cannot go on.
        """
        return self._with_servers("fleet.run_server").run_server(None if save_to is None else Path(save_to), save_every_s)

    def init_worker(self) -> None:
        """On a trainer: join the servers. Rank 0 brings the parameters, unless servers begin from a checkpoint; the others take them."""
        self._with_servers("fleet.init_worker").init_worker()

    def stop_worker(self) -> None:
        """On a trainer: push what is left, and leave; behind the last trainer the servers end. For their model see ``pull_model``."""
        self._with_servers("fleet.stop_worker").stop_worker()

    @staticmethod
    def advice(workload: Workload, cluster: Cluster, gradient_bytes: int | None = None) -> Advice:
        """What Fleet's documents would use for a workload on a cluster, and what of it does not fit here.

        ``gradient_bytes`` are those of one step's dense gradients, which the size of buckets follows.
        """
        return advice(workload, cluster, gradient_bytes, device="cuda" if torch.cuda.is_available() else "cpu")

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backwards inside add to ``.grad`` on this trainer alone, invisible to the strategy; the next one outside exchanges the sum.

        For a loop that accumulates gradients by itself, in every step but the last before
        ``optimizer.step()``. ``model.no_sync()`` is the same, as a DistributedDataParallel's.
        """
        return self._trained("fleet.no_sync").no_sync()

    def synchronize(self) -> None:
        """Make the trainers agree between two averagings of Local SGD, before a save or an evaluation.

        Every trainer calls it. With synchronous training there is nothing to do. With parameter servers a trainer
        may do so alone: what it has goes out, and its model becomes what the servers hold, embeddings and all;
        in GeoSGD it stays a copy of its own, see ``pull_model``.
        """
        if self._served is not None:
            self._served.synchronize()
            return
        self._trained("fleet.synchronize").flush()

    def pull_model(self) -> None:
        """With parameter servers: push, wait for the other trainers, and take all that the servers hold then.

        Every trainer calls it, behind the same step, before ``stop_worker``; all end with the same model, and may train on
        from it. In GeoSGD it takes the place of the trainer's own copy, whose changes that have not gone out yet are given
        up. Without servers, it is ``synchronize``.
        """
        if self._served is None:
            self.synchronize()
            return
        self._served.pull_model()

    def report(self, *, loss: torch.Tensor | float, **metrics: torch.Tensor | float) -> None:
        """Tell the step's loss, one number, before ``optimizer.step()``; adaptive steps follow it.

        ``metrics`` (``acc1=``, ``acc5=``, ...) are for the training log alone, see ``fleet.init(log_every=...)``.
        """
        if self._served is not None:
            if self._log is not None:
                self._log.report({"loss": loss, **metrics})
            return
        engine = self._trained("fleet.report")
        if self._legs is None or not self._legs.report(loss):
            engine.report(loss)
        if self._log is not None:
            self._log.report({"loss": loss, **metrics})

    def end_epoch(self) -> None:
        """Say that an epoch's data are used up; every trainer does, behind its last ``optimizer.step()``."""
        if self._served is None:
            self._trained("fleet.end_epoch").end_epoch()
        if self._log is not None:
            self._log.end_epoch()

    def worker_num(self) -> int:
        """Number of trainers."""
        if self._served is not None:
            return self._served.role.trainers
        return self._joined("fleet.worker_num").trainers

    def worker_index(self) -> int:
        """This trainer's rank. Raises ``ConfigError`` on a server."""
        if self._served is not None:
            self._served.require("trainer", "fleet.worker_index")
            return self._served.role.rank
        return self._joined("fleet.worker_index").rank

    def is_first_worker(self) -> bool:
        """Whether this is rank 0 of the trainers."""
        return self.is_worker() and self.worker_index() == 0

    def is_worker(self) -> bool:
        """Whether this process trains; always, without parameter servers."""
        if self._served is not None:
            return not self._served.is_server
        return self._joined("fleet.is_worker") is not None

    def is_server(self) -> bool:
        """Whether this process is a parameter server."""
        return not self.is_worker()

    def worker_endpoints(self) -> list[str]:
        """Where every trainer is: ``host:port`` as the launcher says, or else ``host:number of the trainer on that host``."""
        if self._served is not None:
            return list(self._served.role.endpoints)
        self._joined("fleet.worker_endpoints")
        return list(self._endpoints)

    def server_num(self) -> int:
        """Number of parameter servers, as the launcher says."""
        if self._served is None:
            self._joined("fleet.server_num")
        return len(self._role.servers)

    def server_index(self) -> int:
        """Which server this process is. Raises ``ConfigError`` on a trainer."""
        if self._served is not None:
            self._served.require("server", "fleet.server_index")
            return self._served.role.rank
        rank = self._joined("fleet.server_index").rank
        raise ConfigError("this process is no server", "fleet.server_index", f"trainer {rank}", "ask fleet.is_server() first")

    def barrier_worker(self) -> None:
        """Meet all trainers."""
        if self._served is not None:
            self._served.trained("fleet.barrier_worker").barrier()
            return
        self._joined("fleet.barrier_worker").barrier()

    def save_persistables(self, path: str | Path, *, extra: Any = None, per_rank: bool = False) -> None:
        """Save all that training goes on from into the folder ``path``; every trainer calls it, behind the same step.

        Parameters, buffers, the optimizer's state, torch's random numbers and how far the strategy has
        come: also within a round of Local SGD or a gradient merge, neither of which it disturbs. ``extra``
        is the script's own plain data and tensors, such as ``scheduler.state_dict()``. The save
        before stays in force until this one is complete. One copy, in a folder that all trainers see;
        ``per_rank``: each trainer's in a folder of its own below. See docs/checkpoints.md.
        With parameter servers every server writes its part on its own host, for ``fleet.init_server(path)``.
        """
        if self._served is not None:
            self._served.save(Path(path), extra=extra, per_rank=per_rank)
            return
        if self._legs is not None:  # what is trained in a tuning is of no use, and must not take the place of what is
            return
        from real.checkpoints.saving import save  # which training without a checkpoint need not pay for

        engine = self._trained("fleet.save_persistables")
        save(engine, self._meets("fleet.save_persistables"), Path(path), extra=extra, per_rank=per_rank)

    def load_persistables(self, path: str | Path, *, predicate: Callable[[str], bool] | None = None, resynchronize: bool = False) -> Loaded:
        """Go on from what ``save_persistables`` wrote, bit for bit; every trainer calls it, behind ``distributed_optimizer``.

        It takes as many trainers, the same strategy, model and optimizer. ``resynchronize`` lets other
        trainers, or another strategy, begin anew from the averaged parameters and rank 0's state.
        With ``predicate``, only those of the model's parameters and buffers are loaded whose names it
        wants, from a checkpoint or a .safetensors file; what was loaded, what not and what is left
        over is returned, and printed. With parameter servers, servers begin from a checkpoint: ``fleet.init_server(path)``.
        """
        if self._served is not None:
            hint = "give the folder to the servers: fleet.init_server(FOLDER); a part of a model load before fleet.init_worker(), on rank 0"
            raise ConfigError("with parameter servers, trainers load nothing", "fleet.load_persistables", str(path), hint)
        from real.checkpoints.saving import load

        engine = self._trained("fleet.load_persistables")
        loaded = load(
            engine,
            self._meets("fleet.load_persistables"),
            Path(path),
            predicate=predicate,
            resynchronize=resynchronize or self._legs is not None,  # a leg's strategy is another than the one that was saved
        )
        if self._log is not None and predicate is None:
            self._log.resume(loaded.epoch)
        return loaded

    def save_inference_model(self, path: str | Path, example_inputs: Sequence[Any], *, dynamic_shapes: Any = None) -> None:
        """Write the model for a server, by torch.export, to ``path`` (.pt2); every trainer calls it, and rank 0 writes.

        ``torch.export.load(path).module()`` runs it without this package. ``example_inputs`` are the
        forward's, two samples or more; the first dimension of each is then a batch of any size, unless
        ``dynamic_shapes`` says otherwise, as ``torch.export.export`` takes it. With parameter servers it is
        the model that ``pull_model`` brings, which this calls.
        """
        if self._served is not None:
            self._served.save_inference_model(Path(path), example_inputs, dynamic_shapes)
            return
        if self._legs is not None:
            return
        from real.checkpoints.inference import save_inference_model

        engine = self._trained("fleet.save_inference_model")
        save_inference_model(engine, self._meets("fleet.save_inference_model"), Path(path), example_inputs, dynamic_shapes)

    def _watch_failures(self) -> Errors:
        """Watch for a failure on any rank; what stands around every collective from now on."""
        if dist.get_world_size() == 1:
            return collective_errors
        self._failures = watch_failures(lambda: 0 if self._engine is None else self._engine.step)
        return self._failures.broken

    def _init_served(self, strategy: DistributedStrategy, timeout_s: float, log_every: int) -> None:
        """Be a server, or a trainer of servers. Raises ``ConfigError`` in a tuning."""
        if os.environ.get(TUNING):
            from real.script.watch import refuse_served

            refuse_served()
        from real.servers.served import Served  # which training without servers need not pay for

        self._role = role_of(os.environ)
        self._served = Served(self._role, strategy, timeout_s)
        self._strategy = strategy
        atexit.register(self._served.leave)
        if self.is_first_worker():
            print(overview(strategy, self._served.environment()), file=sys.stderr)  # noqa: T201  # Fleet prints its box, too
            self._log = TrainingLog(log_every) if log_every else None

    def _with_servers(self, where: str) -> Served:
        if self._served is None:
            hint = 'fleet.init(DistributedStrategy(mode="ps", a_sync=True)) first'
            raise ConfigError("this process is of no job with parameter servers", where, hint=hint)
        return self._served

    def _use(self, engine: Engine) -> None:
        """Another engine runs the model from now on."""
        self._engine = engine
        if self._failures is not None:
            engine.on_failure = self._failures.announce

    def _environment(self, backend: str) -> dict[str, object]:
        """What the box says of the job."""
        role = self._role
        node = {"trainers per node": role.trainers_per_node} if role.trainers_per_node is not None else {}
        return {
            "trainers": self.worker_num(),
            **node,
            "launcher": launcher_of(role, os.environ),
            "rendezvous": role.rendezvous or role.store or "none",
            "backend": backend,
        }

    def _joined(self, where: str) -> Communicators:
        self._refuse_with_servers(where)
        if self._communicators is None:
            raise ConfigError("this process has no role yet", where, hint="call fleet.init first")
        return self._communicators

    def _recommended(self, model: torch.nn.Module) -> DistributedStrategy:
        """What is stored for this model on these trainers; while it is still being looked for, Fleet's defaults."""
        if self._legs is not None:
            return DistributedStrategy()
        communicators, meeting = self._joined("fleet.distributed_model"), self._meets("fleet.distributed_model")
        strategy = recommended(model, meeting, communicators.device, self._role.trainers_per_node or 1)
        refuse_unexecuted(strategy, "strategy", PLANNED, "the real executor")
        if self.is_first_worker():
            print(overview(strategy), file=sys.stderr)  # noqa: T201  # as fleet.init prints the script's own
        return strategy

    def _meets(self, where: str) -> Meeting:
        self._joined(where)
        assert self._meeting is not None
        return self._meeting

    def _refuse_with_servers(self, where: str) -> None:
        if self._served is not None:
            hint = "it is not needed: gradients go out at optimizer.step() alone, however many backwards came before it"
            raise ConfigError("trainers of parameter servers do not have this", where, hint=hint)

    def _trained(self, where: str) -> Engine:
        self._refuse_with_servers(where)
        if self._engine is None:
            raise ConfigError("there is no model yet", where, hint="call fleet.distributed_model first")
        return self._engine

    def _leave(self) -> None:
        """At exit: leave together, unless this process leaves because of an error, or another has failed.

        The script may have destroyed its process group. Never with exit code 0 where a collective broke, or some rank has failed.
        """
        if self._meeting is not None and self._failures is not None and not self._has_failed:
            self._failures.begin_exit()
            with suppress(RuntimeError):  # the failures name who is gone
                self._meeting.leave()
        if self._failures is not None:
            if self._failures.has_failed:
                self._failures.leave()
            self._failures.end()
        if self._communicators is not None and not self._has_failed:
            self._communicators.close()

    @property
    def _has_failed(self) -> bool:
        return hasattr(sys, "last_value") if self._failures is None else self._failures.has_failed


def _part() -> None:
    """At exit: destroy the process group that ``fleet.init`` has made."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _arrive() -> None:
    """Let ``fleetbench launch`` know that this trainer has called ``fleet.init``; in a tuning, end with its driver from now on."""
    if os.environ.get(TUNING):
        from real.script.watch import watch_driver

        watch_driver()
    if JOINED in os.environ:
        with suppress(OSError):  # a remark of the launcher's depends on it, and nothing else
            Path(os.environ[JOINED]).touch()


def _warn_of_what_is_the_scripts(strategy: DistributedStrategy) -> None:
    """Some fields say how a registry workload is trained; in a user's script they are the loop's own business."""
    for name, is_set in (
        ("gradient_merge_configs.lr_per", strategy.gradient_merge_configs.lr_per != "micro_batch"),
        ("fetch_every_n_steps", strategy.fetch_every_n_steps != 1),
    ):
        if is_set:
            warnings.warn(f"{name} has no effect in a script: its own loop decides that", FieldHasNoEffect, stacklevel=3)


fleet = Fleet()
"""This process's role: the one object with process-wide state."""
