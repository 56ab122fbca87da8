"""ElasticCollective: the implementation of ``fleet`` for workers that come and go."""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import sha256
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from fleetbench.errors import ConfigError
from fleetbench.plan.elastic import Elastic, Progress, joined, joining
from fleetbench.plan.steps import average_of
from fleetbench.strategy import DistributedStrategy
from real.collective import Collective, arrive
from real.communication.communicators import strategy_digest
from real.elastic.gathering import Gathering
from real.elastic.workers import Workers
from real.engine.buckets import DeltaBucket
from real.engine.fleet_engine import FleetEngine
from real.models import MODEL
from real.processes.roles import TUNING, Role, role_of

_FIELD = "strategy.localsgd_configs.elastic"


class ElasticEngine(FleetEngine):
    """An engine whose only trainer is this worker; its rounds end with an exchange among the workers that arrive."""

    def join(self, workers: Workers) -> None:
        """Take part in a round without steps, and continue from what workers agree on."""
        lines = [strategy_digest(self.strategy), *self._planning.lines()]
        self.digest = int.from_bytes(sha256("\n".join(lines).encode()).digest()[:7])
        workers.engine = self
        workers.gather()
        self.executor.start(joining(average_of(self.plan, self.executor.combination)))
        if (told := workers.taken) is not None:
            self._decider.state = joined(self._decider.state, told)
            self.step = told.step
        self.note_parameters()

    @property
    def told(self) -> Progress:
        """Progress that a newcomer takes over."""
        return Progress(step=self.step, updates=self.num_updates, epoch=self._decider.state.epoch)

    def in_order(self, deltas: Iterable[DeltaBucket], kind: str) -> list[torch.Tensor]:
        """Return each parameter's part of what buckets hold, in the model's order: workers may have other buckets."""
        found = {name: own for delta in deltas for name, own in zip(delta.names, getattr(delta, kind), strict=False)}
        return [found[name] for name in self._parameters if name in found]


class ElasticCollective(Collective):
    """A worker's part in an elastic job: a world of its own, which meets the others when a round ends."""

    engine_kind = ElasticEngine

    def __init__(self, strategy: DistributedStrategy, timeout_s: float) -> None:
        """Raises ``ConfigError`` in a tuning, in a process group of several, and without a lighthouse or a count of workers."""
        launched, rule = role_of(os.environ), Elastic.of(strategy)
        assert rule is not None
        if os.environ.get(TUNING):
            arrive(launched.rank)  # lets the driver receive the error
            hint = "tune it without elastic: an undisturbed training is the same"
            raise ConfigError("a script with elastic workers is neither profiled nor tuned", _FIELD, "true", hint)
        if dist.is_initialized() and dist.get_world_size() > 1:
            hint = "leave out torch.distributed.init_process_group"
            raise ConfigError("each worker is a world of its own, and the script has made a group of several", _FIELD, "true", hint)
        if launched.launcher == "none":
            hint = "start with fleetbench launch --restarts N, or set RANK=0 WORLD_SIZE=4, with each worker's own rank"
            raise ConfigError("how many workers wait for each other at the start?", "RANK, WORLD_SIZE", hint=hint)
        gathering, numbers = Gathering(f"{launched.rank:05d}", timeout_s), {"rank": launched.rank, "nominal": launched.trainers}
        self.workers = Workers(gathering, rule, timeout_s=timeout_s, **numbers)
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

    def leave(self) -> None:
        """At exit, leave the other workers."""
        self.workers.close()
        super().leave()

    def barrier(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ``ConfigError``."""
        hint = "save by torch.save on fleet.is_first_worker(), after fleet.synchronize(); load before fleet.distributed_model"
        raise ConfigError("barriers, saves, loads and exports are of all trainers, and workers come and go", _FIELD, "true", hint)

    save = load = save_inference_model = barrier
