"""Training: what an experiment trains on one rank, leg by leg. ``real.emulated.emulated_training`` sleeps instead of computing."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.combination import Combination
from fleetbench.plan.drive import ends_epoch
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import Profile, all_reduce_cost, compute_key
from fleetbench.stragglers import draws
from fleetbench.strategy import DistributedStrategy
from fleetbench.workloads.data.data import open_batches
from fleetbench.workloads.data.reader import ReadsAhead
from fleetbench.workloads.models.registry import build_model, loss_of
from fleetbench.workloads.training import HeldOut, evaluated, make_optimizer, refuse_dense_optimizer, sampler_of, set_learning_rate
from real.communication.communicators import Communicators
from real.compute.injector import Injector, delay_of
from real.engine.engine import Engine
from real.engine.planning import Forecast
from real.engine.stopwatch import encode_steps
from real.layer_times import ProfileLeg
from real.leg import Leg
from real.servers.links import TrainerOptions
from real.servers.parameters import Told
from real.servers.security import encrypts
from real.servers.served_training import ServedTraining

LegEngine = Engine | ServedTraining
"""What executes a leg's strategy, by collectives or with servers."""


class Training(ABC):
    """A model and its optimizer, which legs continue or start again. A subclass says what a step computes."""

    steps_per_epoch: int | None
    """Of one trainer; none where there are no epochs."""
    engine: LegEngine
    """Of the leg under way; none between legs."""
    _model: torch.nn.Module
    _optimizer: torch.optim.Optimizer

    def __init__(self, experiment: Experiment, profile: Profile | None, communicators: Communicators) -> None:
        self._experiment = experiment
        self._profile = profile
        self._communicators = communicators

    @abstractmethod
    def run(self, leg: Leg, on_step: Callable[[int], None]) -> dict[str, Any]:
        """Run one leg and return its results as plain data; ``on_step`` hears of every step as its forward begins."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what outlives a leg."""

    @abstractmethod
    def _table(self, strategy: DistributedStrategy) -> LayerTable | None:
        """What is known of the layers' times under a strategy."""

    @abstractmethod
    def _train_step(self) -> None:
        """Everything from the batch to the update."""

    @abstractmethod
    def _evaluate(self, step: int) -> None:
        """After a step of an evaluated leg."""

    def _train(self, leg: Leg) -> dict[str, Any]:
        """Train a leg's steps by ``engine``; what it saw, as plain data."""
        workload, engine = self._experiment.workload, self.engine
        counts_updates = Combination.of(leg.strategy).lr_counts_updates
        for step in range(1 - leg.warmup_steps, leg.steps + 1):
            scheduled = engine.num_updates + 1 if counts_updates else step
            set_learning_rate(self._optimizer, workload, scheduled if leg.start == "initial" else 1)
            self._train_step()
            if ends_epoch(step, self.steps_per_epoch):
                engine.end_epoch()
            if leg.evaluate and step >= 1 and step % workload.eval_every == 0:
                if isinstance(engine, ServedTraining) and engine.rules.mode != "geo_sgd":  # rows not looked up lately
                    with engine.stopwatch.pause():
                        engine.fetch()
                self._evaluate(step)
        engine.flush(end=True)
        engine.stopwatch.finish()
        recording = None if isinstance(engine, ServedTraining) else engine.recording()
        roles = engine.recordings() if isinstance(engine, ServedTraining) else []
        plan = engine.plan.to_dict()
        engine.close()
        del self.engine  # its buffers go before those of the next leg come
        return {
            **encode_steps(engine.stopwatch),
            "plan": plan,
            "recording": None if recording is None else recording.to_dict(),
            "roles": [role.to_dict() for role in roles],
            "parameters": checksum(self._model),
        }

    def _engine(self, leg: Leg, strategy: DistributedStrategy, told: Told | None = None) -> LegEngine:
        """What executes ``strategy``, with the optimizer attached and, where there are servers, joined to them.

        ``told``: see ``ServedTraining.attach_optimizer``.
        """
        run, first_step = self._experiment.run, 1 - leg.warmup_steps
        if strategy.mode == "ps":
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
            served = ServedTraining(self._model, strategy, options)
            served.attach_optimizer(self._optimizer, told)
            served.begin()
            return served
        engine = Engine(
            self._model,
            strategy,
            self._communicators,
            first_step=first_step,
            record=leg.record,
            trainers_per_node=self._experiment.cluster.trainers_per_node,
            forecast=self._forecast(leg.strategy),
        )
        engine.attach_optimizer(self._optimizer)
        return engine

    def _forecast(self, strategy: DistributedStrategy) -> Forecast:
        """What the layer table knows beforehand, for a fusion that plans by it."""
        table = self._table(strategy)
        if not strategy.fuses_by_cost or table is None:
            return Forecast()
        gradients = table.by_readiness()
        cost = all_reduce_cost(self._experiment.replace(strategy=strategy), self._profile)
        return Forecast(cost=cost, ready={gradient.name: gradient.ready for gradient in gradients})

    def _draws(self, leg: Leg) -> dict[int, int]:
        """This rank's X of every step, in units of 2^-24."""
        cluster, first = self._experiment.cluster, 1 - leg.warmup_steps
        steps = leg.warmup_steps + leg.steps
        x = draws(cluster.stragglers, self._experiment.run.seed, cluster.trainers, cluster.trainers_per_node, first, steps)
        return dict(enumerate(map(int, x[self._communicators.rank]), first))


class ComputedTraining(Training):
    """A registry model, and its place in the data."""

    def __init__(self, experiment: Experiment, profile: Profile | None, data: Path, communicators: Communicators) -> None:
        """``data`` were prepared there."""
        super().__init__(experiment, profile, communicators)
        self._device = communicators.device
        self._data = data
        workload = experiment.workload
        sampler = sampler_of(experiment, data, communicators.trainers, communicators.rank)
        self._batches = open_batches(workload, data, sampler)
        self.steps_per_epoch = sampler.steps_per_epoch
        self._model = self._fresh_model()
        if experiment.strategy.mode == "collective":
            refuse_dense_optimizer(self._model, workload)
        self._held_out = HeldOut(self._fresh_model(), data, loss_of(workload.model))
        self._compare = loss_of(workload.model)
        self._position = 0
        self._snapshots: list[tuple[int, torch.Tensor]] = []

    def run(self, leg: Leg, on_step: Callable[[int], None]) -> dict[str, Any]:
        """See ``Training``."""
        if leg.start == "initial":
            self._model.load_state_dict(self._fresh_model().state_dict())
            self._position = 0
        # Momentum that Local SGD left different on every rank would let a synchronous leg drift apart.
        self._optimizer = make_optimizer(self._model, self._experiment.workload)
        if leg.profile:
            reads_ahead = self._batches if isinstance(self._batches, ReadsAhead) else None
            measuring = ProfileLeg(self._model, self._optimizer, self._communicators, self._next_loss, reads_ahead=reads_ahead)
            return {"layer_times": dataclasses.asdict(measuring.run(leg, on_step))}
        self._snapshots = []
        self.engine = self._engine(leg, leg.strategy)
        self.engine.on_step = on_step
        injector = self._injector(leg, on_step)
        trained = self._train(leg)
        if injector is not None:
            injector.detach()
        return {
            **trained,
            "held_out": [[step, self._held_out_loss(flat)] for step, flat in self._snapshots],
            "final_loss": self._held_out_loss(self._flat_parameters()) if leg.evaluate else None,
        }

    def close(self) -> None:
        """Let go of the data."""
        self._batches.close()

    def _fresh_model(self) -> torch.nn.Module:
        workload, seed = self._experiment.workload, self._experiment.run.seed
        return build_model(workload.model, workload.model_options, workload.dtype, seed).to(self._device)

    def _injector(self, leg: Leg, on_step: Callable[[int], None]) -> Injector | None:
        """What delays the engine's steps by the experiment's stragglers; none where it declares none."""
        if not self._experiment.cluster.stragglers:
            return None
        table = self._table(leg.strategy)
        if table is None:
            raise ConfigError("injected stragglers need the profile's layer times", "workload.profile", hint="take a profile first")
        injector, own = Injector(table, delay=delay_of(self._device)), self._draws(leg)
        injector.attach(self._model)

        def begin_step(step: int) -> None:
            injector.begin(own[step])
            on_step(step)

        self.engine.on_step, self.engine.on_compute_end = begin_step, injector.finish
        return injector

    def _next_loss(self) -> torch.Tensor:
        inputs, labels = (tensor.to(self._device, non_blocking=True) for tensor in self._batches.batch(self._position))
        self._position += 1
        return self._compare(self._model(inputs), labels)

    def _train_step(self) -> None:
        loss = self._next_loss()
        self.engine.report(loss)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.engine.stopwatch.loss(loss)

    def _table(self, strategy: DistributedStrategy) -> LayerTable | None:
        """The profile's; none where it has none."""
        key = compute_key(self._experiment, strategy)
        return next((table for table in self._profile.tables if table.key == key), None) if self._profile else None

    def _evaluate(self, step: int) -> None:
        with self.engine.stopwatch.pause():
            self._snapshots.append((step, self._flat_parameters()))

    def _flat_parameters(self) -> torch.Tensor:
        """Parameters, and the batch-norm statistics that an evaluation needs, as one vector."""
        return torch.cat([tensor.detach().reshape(-1) for tensor in evaluated(self._model)])

    def _held_out_loss(self, flat: torch.Tensor) -> float:
        """Mean loss on the held-out split at the average of all trainers' parameters."""
        if self._communicators.trainers > 1:
            self._communicators.average(flat, 0)
        return self._held_out.loss(flat)


def checksum(model: torch.nn.Module) -> str:
    """Hexadecimal digest over all parameters' bits: equal on ranks that agree."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
