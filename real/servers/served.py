"""Served: the implementation of ``fleet`` in a job with parameter servers, on servers and on trainers."""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from fleetbench.errors import ConfigError, WorkerFailed
from fleetbench.plan.servers.rules import refuse_unserved
from fleetbench.staleness import ServerLoad
from fleetbench.strategy import DistributedStrategy
from real.engine.refusals import refuse_untrainable
from real.processes.diagnosis import note_failure
from real.processes.roles import STARTUP, Role, launcher_of
from real.servers.links import Options
from real.servers.served_training import ServedTraining
from real.servers.server import ParameterServer

_SILENCE = 4.0
"""Ratio of a collective's timeout to the time after which a silent process counts as failed."""


class Served:
    """A server or a trainer of the job.

    Raises ``ConfigError`` for calls in the wrong order or on the wrong kind of process.
    """

    def __init__(self, role: Role, strategy: DistributedStrategy, timeout_s: float) -> None:
        refuse_unserved(strategy)
        if not role.servers:
            hint = "fleetbench launch --servers 1 --workers 2 train.py, or a launcher that sets PADDLE_PSERVERS_IP_PORT_LIST"
            raise ConfigError('mode = "ps" needs servers, and this job has none', "strategy.mode", "'ps'", hint)
        self.role = role
        self.trainers, self.endpoints = role.trainers, role.endpoints
        self.training: ServedTraining | None = None
        self._strategy = strategy
        self._options = Options(
            number=role.rank,
            endpoints=role.servers,
            trainers=role.trainers,
            timeout_s=timeout_s / _SILENCE,
            startup_timeout_s=startup_timeout_of(os.environ),
            round_timeout_s=timeout_s,
        )
        self._server: ParameterServer | None = None

    @property
    def is_server(self) -> bool:
        """Whether this process is a server."""
        return self.role.kind == "server"

    def init_server(self, path: Path | None) -> bool:
        """Take the server's address, and begin from its checkpoint in ``path`` if there is one.

        Return whether there was a checkpoint.
        """
        self.require("server", "fleet.init_server")
        with ExitStack() as made:
            server = made.enter_context(closing(ParameterServer(self._options)))
            restored = path is not None and server.restore(path)
            server.bind()
            made.pop_all()
        self._server = server
        return restored

    def run_server(self) -> ServerLoad:
        """Serve until all trainers have left.

        Raises ``WorkerFailed`` naming the trainer without which the job cannot continue.
        """
        self.require("server", "fleet.run_server")
        if self._server is None:
            self.init_server(None)
        assert self._server is not None
        with closing(self._server) as server:
            self._server = None
            return server.run()

    def distributed_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Prepare the model for training; on a server, do nothing."""
        if self.is_server:
            return model
        if self.training is not None:
            raise ConfigError("this process trains a model already", "fleet.distributed_model", hint="one model a process")
        refuse_untrainable(model)
        self.training = ServedTraining(model, self._strategy, self._options)
        return model

    def distributed_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Make the optimizer's steps train through the servers; on a server, do nothing."""
        if not self.is_server:
            self.trained("fleet.distributed_optimizer").attach_optimizer(optimizer)
        return optimizer

    def synchronize(self) -> None:
        """Push this trainer's pending changes; except in GeoSGD, the model then gets all of the servers' parameters.

        A trainer may call it without the others.
        """
        training = self.trained("fleet.synchronize")
        training.flush()
        if training.rules.mode != "geo_sgd":
            training.fetch()

    def pull_model(self, where: str = "fleet.pull_model") -> ServedTraining:
        """Give every trainer's model the servers' parameters after all trainers have pushed their changes.

        Every trainer must call it.
        """
        training = self.trained(where)
        training.flush()
        training.take_all()
        return training

    def no_sync(self) -> NoReturn:
        """Raise ``ConfigError``: gradients are only sent by ``optimizer.step()`` anyway."""
        _refuse("fleet.no_sync", "it is not needed: gradients go out at optimizer.step() alone, however many backwards came before it")

    def join(self, **_: bool) -> NoReturn:
        """Raise ``ConfigError``: trainers of servers have no ``fleet.join``."""
        hint = "in asynchronous training each trainer may have as many batches as it likes; in synchronous training give all as many"
        _refuse("fleet.join", hint)

    def report(self, loss: torch.Tensor | float, _metrics: Mapping[str, torch.Tensor | float]) -> None:
        """Do nothing: servers do not use the loss."""

    def end_epoch(self) -> None:
        """Do nothing: servers count no epochs."""

    def worker_index(self) -> int:
        """Return this trainer's rank."""
        self.require("trainer", "fleet.worker_index")
        return self.role.rank

    def server_index(self) -> int:
        """Return this server's number."""
        self.require("server", "fleet.server_index")
        return self.role.rank

    def barrier(self) -> None:
        """Wait until all trainers that have not left call it."""
        self.trained("fleet.barrier_worker").barrier()

    def load(self, _path: Path, **_: object) -> NoReturn:
        """Raise ``ConfigError``: servers load their checkpoints in ``fleet.init_server``."""
        hint = "give the folder to the servers: fleet.init_server(FOLDER); a part of a model load before fleet.init_worker(), on rank 0"
        _refuse("fleet.load_persistables", hint)

    def save_inference_model(self, path: Path, example_inputs: Sequence[Any], dynamic_shapes: Any, _model: object = None) -> None:
        """Export a model with the servers' parameters, on rank 0; every trainer must call it."""
        from real.checkpoints.inference import EXPORT, export, require_name, served_copy  # others do not need it

        require_name(path)  # on every rank, before all meet and pull every table
        training = self.pull_model(EXPORT)
        if self.role.rank == 0:
            export(served_copy(training.model, {}), tuple(example_inputs), path, dynamic_shapes)

    def save(self, path: Path, *, extra: object) -> None:
        """Push all trainers' pending changes, then let every server write its shard.

        Every trainer must call it.
        """
        where = "fleet.save_persistables"
        if extra is not None:
            raise ConfigError("servers save parameters and their optimizer's state alone", where, "extra", "leave it out")
        training = self.trained(where)
        training.flush()
        training.barrier()
        try:
            if self.role.rank == 0:
                training.save(path)
        finally:
            training.barrier()  # the others wait there, even if the checkpoint failed

    def environment(self) -> dict[str, object]:
        """Return facts about the job for the printed summary."""
        role = self.role
        return {"trainers": role.trainers, "servers": ", ".join(role.servers), "launcher": launcher_of(role, os.environ)}

    def trained(self, where: str) -> ServedTraining:
        """Return the training of this process. Raises ``ConfigError`` on a server, and before there is a model."""
        self.require("trainer", where)
        if self.training is None:
            raise ConfigError("there is no model yet", where, hint="call fleet.distributed_model first")
        return self.training

    def leave(self) -> None:
        """End the job when this process exits, unless it has left in order: it failed, or did not call ``stop_worker``."""
        if self._server is not None:
            self._server.close()
        training, failure = self.training, getattr(sys, "last_value", None)
        if failure is None and not self.is_server and (training is None or not training.has_ended):
            failure = WorkerFailed("ends without fleet.stop_worker(), and the job with it", f"rank {self.role.rank}")
            print(failure, file=sys.stderr)  # noqa: T201  # the worker's log
        if isinstance(failure, WorkerFailed) and failure.where is not None:
            note_failure(failure.where, failure.what)
        if training is not None:
            training.close()

    def require(self, kind: str, where: str) -> None:
        """Raise ``ConfigError`` unless this process is of this ``kind``."""
        if self.role.kind != kind:
            other = "fleet.is_server()" if kind == "server" else "fleet.is_worker()"
            raise ConfigError(f"this process is no {kind}", where, f"{self.role.kind} {self.role.rank}", f"ask {other} first")


def startup_timeout_of(environment: Mapping[str, str]) -> float:
    """Return the seconds that the variable ``STARTUP`` sets; 300 without it.

    Raises ``ConfigError`` if it is not a positive, finite number.
    """
    text = environment.get(STARTUP, "300")
    with suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise ConfigError("is no number of seconds", STARTUP, repr(text), "fleetbench launch --startup-timeout 600 sets it")


def _refuse(where: str, hint: str) -> NoReturn:
    raise ConfigError("trainers of parameter servers do not have this", where, hint=hint)
