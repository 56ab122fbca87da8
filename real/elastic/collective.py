"""ElasticCollective: the implementation of ``fleet`` for workers that come and go."""

from __future__ import annotations

import os
from hashlib import sha256
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn

from fleetbench.errors import ConfigError
from fleetbench.plan.elastic import Elastic
from fleetbench.plan.steps import average_of
from fleetbench.strategy import DistributedStrategy
from real.collective import Collective, arrive
from real.communication.communicators import strategy_digest
from real.elastic.gathering import Gathering
from real.elastic.workers import Progress, Trained, Workers
from real.engine.fleet_engine import FleetEngine
from real.models import MODEL
from real.processes.roles import TUNING, Role, role_of

_FIELD = "strategy.localsgd_configs.elastic"


class ElasticEngine(FleetEngine):
    """An engine whose only trainer is this worker; its rounds end with an exchange among the workers that arrive."""

    def join(self, workers: Workers) -> None:
        """Take part in a round without steps, and continue from what workers agree on."""
        lines = [strategy_digest(self.strategy), *self._planning.lines()]
        workers.trains(
            Trained(
                parameters=list(self._parameters),
                buffers=list(self.model.buffers()),
                digest=int.from_bytes(sha256("\n".join(lines).encode()).digest()[:7]),
                progress=lambda: Progress(step=self.step, updates=self.num_updates, epoch=self._decider.state.epoch),
            )
        )
        workers.gather()
        self.executor.start(tuple(one for one in average_of(self.plan, self.executor.combination) if one.kind != "reset"))
        if (told := workers.taken) is not None:
            state = self._decider.state
            self._decider.state = state._replace(step=told.step or None, updates=told.updates, last_sync=told.updates, epoch=told.epoch)
            self.step = told.step
        self.note_parameters()


class ElasticCollective(Collective):
    """A worker's part in an elastic job: a world of its own, which meets the others when a round ends."""

    engine_kind = ElasticEngine

    def __init__(self, strategy: DistributedStrategy, timeout_s: float) -> None:
        """Find the lighthouse. Raises ``ConfigError`` in a tuning, and in a process group of several."""
        launched, rule = role_of(os.environ), Elastic.of(strategy)
        assert rule is not None
        if os.environ.get(TUNING):
            arrive(launched.rank)  # lets the driver receive the error
            hint = "tune it without elastic: an undisturbed training is the same"
            raise ConfigError("a script with elastic workers is neither profiled nor tuned", _FIELD, "true", hint)
        if dist.is_initialized() and dist.get_world_size() > 1:
            hint = "leave out torch.distributed.init_process_group"
            raise ConfigError("each worker is a world of its own, and the script has made a group of several", _FIELD, "true", hint)
        name = f"{launched.rank:05d}"
        self.workers = Workers(Gathering(name, timeout_s), rule, rank=launched.rank, nominal=launched.trainers, timeout_s=timeout_s)
        super().__init__(strategy, timeout_s, backend="gloo")
        self.communicators.workers = self.workers

    def own_role(self) -> Role:
        """Return the role of a script that was started alone."""
        return Role(local_rank=role_of(os.environ).local_rank)

    def distributed_model(self, model: nn.Module, strategy: DistributedStrategy | None = None) -> nn.Module:
        """Join the other workers, and hook the model; return the same model."""
        if strategy is not None or self.models.engines:
            hint = "write fleet's four lines into the script, and call it once, for one model"
            raise ConfigError("exchanges one model, which the script gives to fleet", MODEL, type(model).__name__, hint)
        super().distributed_model(model)
        (engine,) = self.models.engines
        assert isinstance(engine, ElasticEngine)
        engine.join(self.workers)
        return model

    @property
    def trainers(self) -> int:
        """Number of workers in the last round; before the first, of the launch."""
        return self.workers.num

    def worker_index(self) -> int:
        """Return this worker's rank in the last round; before the first, in the launch."""
        return self.workers.rank

    def environment(self) -> dict[str, object]:
        """See ``Collective``."""
        return {**super().environment(), "trainers": f"elastic, {self.workers.num} at the start"}

    def leave(self) -> None:
        """At exit, leave the other workers."""
        self.workers.close()
        super().leave()

    def barrier(self) -> NoReturn:
        """Raise ``ConfigError``."""
        _refuse("fleet.barrier_worker")

    def save(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ``ConfigError``."""
        _refuse("fleet.save_persistables")

    def load(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ``ConfigError``."""
        _refuse("fleet.load_persistables")

    def save_inference_model(self, *_: Any) -> NoReturn:
        """Raise ``ConfigError``."""
        _refuse("fleet.save_inference_model")


def _refuse(where: str) -> NoReturn:
    hint = "save by torch.save on fleet.is_first_worker(), after fleet.synchronize(); load before fleet.distributed_model"
    raise ConfigError("is for all trainers of a job, and elastic workers come and go", where, hint=hint)
