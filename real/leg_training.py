"""LegTraining: what training leg by leg is, whatever computes a step."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from fleetbench.declared import learning_rate
from fleetbench.experiment import Experiment
from fleetbench.plan.combination import Combination
from fleetbench.plan.drive import ends_epoch
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import Profile, all_reduce_cost
from fleetbench.stragglers import draws
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import Workload
from real.communication.communicators import Communicators
from real.engine.engine import Engine
from real.engine.planning import Forecast
from real.engine.stopwatch import encode_steps
from real.leg import Leg
from real.servers.links import TrainerOptions
from real.servers.security import encrypts
from real.servers.training import ServedTraining

LegEngine = Engine | ServedTraining
"""What executes a leg's strategy, by collectives or with servers."""


class LegTraining(ABC):
    """Runs legs of an experiment on one rank. A subclass says what a step is, and what happens around steps."""

    def __init__(self, experiment: Experiment, profile: Profile | None, communicators: Communicators) -> None:
        self._experiment = experiment
        self._profile = profile
        self._communicators = communicators
        self.on_engine: Callable[[LegEngine], None] | None = None
        """Hears of every leg's engine, before its first step."""

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int | None:
        """Of one trainer; none where there are no epochs."""

    @abstractmethod
    def run(self, leg: Leg, on_step: Callable[[int], None]) -> dict[str, Any]:
        """Run one leg and return its results as plain data; ``on_step`` hears of every step."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what outlives a leg."""

    @abstractmethod
    def _table(self, strategy: DistributedStrategy) -> LayerTable | None:
        """What is known of the layers' times under a strategy."""

    @abstractmethod
    def _begin_leg(self, leg: Leg, engine: LegEngine) -> Callable[[int], None] | None:
        """Prepare; what is returned hears of every step as its forward begins."""

    @abstractmethod
    def _train_step(self, engine: LegEngine) -> None:
        """Everything from the batch to the update."""

    @abstractmethod
    def _evaluate(self, engine: LegEngine, step: int) -> None:
        """Behind a step of an evaluated leg."""

    def _attach(self, engine: LegEngine, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer's steps be the strategy's."""
        engine.attach_optimizer(optimizer)

    def _train(
        self,
        leg: Leg,
        on_step: Callable[[int], None],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        strategy: DistributedStrategy,
    ) -> dict[str, Any]:
        """Train a leg's steps under ``strategy``; what the engine saw, as plain data."""
        workload = self._experiment.workload
        engine = self._engine(leg, model, strategy)
        self._attach(engine, optimizer)
        if isinstance(engine, ServedTraining):
            engine.begin()
        if self.on_engine is not None:
            self.on_engine(engine)
        begin_step = self._begin_leg(leg, engine)

        def on_each_step(step: int) -> None:
            if begin_step is not None:
                begin_step(step)
            on_step(step)

        engine.on_step = on_each_step
        counts_updates = Combination.of(strategy).lr_counts_updates
        for step in range(1 - leg.warmup_steps, leg.steps + 1):
            scheduled = engine.num_updates + 1 if counts_updates else step
            set_learning_rate(optimizer, workload, scheduled if leg.start == "initial" else 1)
            self._train_step(engine)
            if ends_epoch(step, self.steps_per_epoch):
                engine.end_epoch()
            if leg.evaluate and step >= 1 and step % workload.eval_every == 0:
                if isinstance(engine, ServedTraining) and engine.rules.mode != "geo_sgd":  # rows not looked up lately
                    with engine.stopwatch.pause():
                        engine.fetch()
                self._evaluate(engine, step)
        engine.flush(end=True)
        engine.stopwatch.finish()
        recording = None if isinstance(engine, ServedTraining) else engine.recording()
        roles = [role.to_dict() for role in engine.recordings()] if isinstance(engine, ServedTraining) else []
        plan = engine.plan.to_dict()
        engine.close()
        return {
            **encode_steps(engine.stopwatch),
            "plan": plan,
            "recording": None if recording is None else recording.to_dict(),
            "roles": roles,
            "parameters": checksum(model),
        }

    def _engine(self, leg: Leg, model: torch.nn.Module, strategy: DistributedStrategy) -> LegEngine:
        """What executes the strategy."""
        first_step = 1 - leg.warmup_steps
        if strategy.mode == "ps":
            run = self._experiment.run
            options = TrainerOptions(
                rank=self._communicators.rank,
                trainers=self._communicators.trainers,
                endpoints=leg.endpoints,
                token=leg.token,
                encrypted=encrypts(os.environ, ()),
                timeout_s=run.timeout * 1e-9,
                startup_timeout_s=run.startup_timeout * 1e-9,
                first_step=first_step,
                keep_times=True,
                record=leg.record,
            )
            return ServedTraining(model, strategy, options)
        return Engine(
            model,
            strategy,
            self._communicators,
            first_step=first_step,
            record=leg.record,
            trainers_per_node=self._experiment.cluster.trainers_per_node,
            forecast=self._forecast(leg.strategy),
        )

    def _forecast(self, strategy: DistributedStrategy) -> Forecast:
        """What the layer table knows beforehand, for a fusion that plans by it."""
        table = self._table(strategy)
        if not strategy.fuses_by_cost or table is None:
            return Forecast()
        gradients = table.by_readiness()
        nbytes = sum(gradient.nbytes for gradient in gradients if not gradient.sparse)
        return Forecast(
            cost=all_reduce_cost(self._experiment, nbytes, self._profile), ready={gradient.name: gradient.ready for gradient in gradients}
        )

    def _draws(self, leg: Leg) -> dict[int, int]:
        """This rank's X of every step, in units of 2^-24."""
        cluster, first = self._experiment.cluster, 1 - leg.warmup_steps
        steps = leg.warmup_steps + leg.steps
        x = draws(cluster.stragglers, self._experiment.run.seed, cluster.trainers, cluster.trainers_per_node, first, steps)
        return dict(enumerate(map(int, x[self._communicators.rank]), first))


def set_learning_rate(optimizer: torch.optim.Optimizer, workload: Workload, step: int) -> None:
    """Put the learning rate that the workload's decay gives ``step``."""
    rate = learning_rate(workload, step)
    for group in optimizer.param_groups:
        group["lr"] = rate


def checksum(model: torch.nn.Module) -> str:
    """Hexadecimal digest over all parameters' bits: equal on ranks that agree."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
