"""Training: a registry workload on one rank, leg by leg."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import Profile, all_reduce_cost, compute_key
from fleetbench.stragglers import draws
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import Workload
from real.activations import compare_activations
from real.communicators import Communicators
from real.data import Sampler, held_out, num_training_samples, open_batches
from real.engine import Engine, Forecast
from real.injector import Injector, delay_of
from real.leg import Leg
from real.models import build_model
from real.profile_leg import MakeTraffic, ProfileLeg
from real.stopwatch import encode_steps
from real.traffic import LARGEST_BYTES, Traffic

_EVALUATED = 512
"""Held-out samples in one forward."""


class Training:
    """A model, its optimizer and its place in the data, which legs continue or start anew."""

    def __init__(self, experiment: Experiment, profile: Profile | None, data: Path, communicators: Communicators) -> None:
        self._device = communicators.device
        self._experiment = experiment
        self._profile = profile
        self._data = data
        self._communicators = communicators
        workload = experiment.workload
        sampler = Sampler(
            num_samples=num_training_samples(data),
            batch_size=workload.batch_size,
            trainers=communicators.trainers,
            rank=communicators.rank,
            seed=experiment.run.seed,
            uneven=workload.uneven_data,
            wanted_steps=workload.steps_per_epoch,
        )
        if workload.batch_size * communicators.trainers > sampler.num_samples and workload.uneven_data == "cut":
            raise ConfigError(
                "is more than there are samples for", "workload.batch_size", str(workload.batch_size), 'use uneven_data = "pad"'
            )
        self._batches = open_batches(workload, data, sampler, self._device.type)
        self._steps_per_epoch = sampler.steps_per_epoch
        self._model = self._fresh_model()
        self._scratch = self._fresh_model()
        self._optimizer = make_optimizer(self._model, workload)
        self._position = 0
        self._injector: Injector | None = None

    def run(self, leg: Leg, on_step: Callable[[int], None]) -> dict[str, Any]:
        """Run one leg and return its results as plain data; ``on_step`` hears of every step."""
        if leg.start == "initial":
            self._model.load_state_dict(self._fresh_model().state_dict())
            self._position = 0
        # Momentum that Local SGD left different on every rank would let a synchronous leg drift apart.
        self._optimizer = make_optimizer(self._model, self._experiment.workload)
        return self._profile_leg(leg, on_step) if leg.profile else self._train_leg(leg, on_step)

    def _fresh_model(self) -> torch.nn.Module:
        workload = self._experiment.workload
        return build_model(workload.model, workload.model_options, workload.dtype, self._experiment.run.seed).to(self._device)

    def _train_leg(self, leg: Leg, on_step: Callable[[int], None]) -> dict[str, Any]:
        workload = self._experiment.workload
        activations = self._activations(leg.strategy)
        engine = Engine(
            self._model,
            leg.strategy,
            self._communicators,
            first_step=1 - leg.warmup_steps,
            record=leg.record,
            trainers_per_node=self._experiment.cluster.trainers_per_node,
            forecast=self._forecast(leg.strategy),
        )
        engine.attach_optimizer(self._optimizer)
        delay = self._delays(leg, engine)

        def on_each_step(step: int) -> None:
            on_step(step)
            if delay is not None:
                delay(step)

        engine.on_step = on_each_step
        snapshots: list[tuple[int, torch.Tensor]] = []
        for step in range(1 - leg.warmup_steps, leg.steps + 1):
            scheduled = engine.num_updates + 1 if _counts_updates(leg.strategy) else step
            set_learning_rate(self._optimizer, workload, scheduled if leg.start == "initial" else 1)
            self._train_step(engine)
            if step >= 1 and step % self._steps_per_epoch == 0:
                engine.end_epoch()
            if leg.evaluate and step >= 1 and step % workload.eval_every == 0:
                with engine.stopwatch.pause():
                    snapshots.append((step, self._flat_parameters()))
        engine.flush(end=True)
        engine.stopwatch.finish()
        recording = engine.recording()
        plan = engine.plan.to_dict()
        if self._injector is not None:
            self._injector.detach()
        engine.close()
        losses = [[step, self._held_out_loss(flat)] for step, flat in snapshots]
        return {
            **encode_steps(engine.stopwatch),
            "plan": plan,
            "recording": None if recording is None else recording.to_dict(),
            "held_out": losses,
            "final_loss": self._held_out_loss(self._flat_parameters()) if leg.evaluate else None,
            "parameters": checksum(self._model),
            "activations": activations,
        }

    def close(self) -> None:
        """Let go of the data."""
        self._batches.close()

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = self._batches.batch(self._position)
        self._position += 1
        return inputs.to(self._device, non_blocking=True), labels.to(self._device, non_blocking=True)

    def _next_loss(self) -> torch.Tensor:
        inputs, labels = self._batch()
        return cross_entropy(self._model(inputs), labels)

    def _activations(self, strategy: DistributedStrategy) -> dict[str, int] | None:
        """What recompute saves, for the next batch on a copy of the model."""
        if not strategy.recompute:
            return None
        inputs, labels = (tensor.to(self._device) for tensor in self._batches.batch(self._position))
        found = compare_activations(self._scratch, strategy, self._device, lambda model: cross_entropy(model(inputs), labels))
        return dataclasses.asdict(found)

    def _train_step(self, engine: Engine) -> None:
        loss = self._next_loss()
        engine.report(loss)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        engine.stopwatch.loss(loss)

    def _table(self, strategy: DistributedStrategy) -> LayerTable | None:
        """The profile's layer table for a strategy; none where it has none."""
        key = compute_key(self._experiment, strategy)
        return next((table for table in self._profile.tables if table.key == key), None) if self._profile else None

    def _forecast(self, strategy: DistributedStrategy) -> Forecast:
        """What the profile knows beforehand, for a fusion that plans by it."""
        table = self._table(strategy)
        if strategy.fusion != "merged_gradient" or table is None:
            return Forecast()
        gradients = table.by_readiness()
        nbytes = sum(gradient.nbytes for gradient in gradients if not gradient.sparse)
        return Forecast(
            cost=all_reduce_cost(self._experiment, nbytes, self._profile), ready={gradient.name: gradient.ready for gradient in gradients}
        )

    def _delays(self, leg: Leg, engine: Engine) -> Callable[[int], None] | None:
        """Inject the experiment's stragglers; none where it declares none."""
        self._injector = None
        cluster = self._experiment.cluster
        if not cluster.stragglers:
            return None
        table = self._table(leg.strategy)
        if table is None:
            raise ConfigError("injected stragglers need the profile's layer times", "workload.profile", hint="take a profile first")
        first = 1 - leg.warmup_steps
        x = draws(
            cluster.stragglers, self._experiment.run.seed, cluster.trainers, cluster.trainers_per_node, first, leg.warmup_steps + leg.steps
        )
        own = x[self._communicators.rank]
        injector = Injector(table, delay=delay_of(self._device))
        injector.attach(self._model)
        engine.on_compute_end = injector.finish
        self._injector = injector
        return lambda step: injector.begin(int(own[step - first]))

    def _profile_leg(self, leg: Leg, on_step: Callable[[int], None]) -> dict[str, Any]:
        """Time layers, update and reading on all ranks at once, without any exchange of gradients."""
        measuring = ProfileLeg(self._model, self._optimizer, self._communicators, self._next_loss, traffic=self._traffic(leg.strategy))
        return {"layer_times": dataclasses.asdict(measuring.run(leg, on_step))}

    def _traffic(self, strategy: DistributedStrategy) -> MakeTraffic | None:
        """What makes all-reduces go round; none for one trainer, nor where NCCL would see them in another order on every rank."""
        if self._communicators.trainers == 1 or (strategy.sync_batch_norm and self._experiment.run.backend == "nccl"):
            return None
        return lambda num_bytes: Traffic(self._communicators, min(num_bytes, LARGEST_BYTES))

    def _flat_parameters(self) -> torch.Tensor:
        """Parameters, and the batch-norm statistics that an evaluation needs, as one vector."""
        return torch.cat([tensor.detach().reshape(-1) for tensor in _evaluated(self._model)])

    @torch.no_grad()
    def _held_out_loss(self, flat: torch.Tensor) -> float:
        """Mean loss on the held-out split at the average of all trainers' parameters."""
        if self._communicators.trainers > 1:
            self._communicators.average(flat, 0)
        tensors = _evaluated(self._scratch)
        for tensor, piece in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(piece.view_as(tensor))
        self._scratch.eval()
        inputs, labels = held_out(self._data)
        total = 0.0
        for some, their in zip(torch.split(inputs, _EVALUATED), torch.split(labels, _EVALUATED), strict=True):
            total += float(cross_entropy(self._scratch(some.to(self._device)), their.to(self._device), reduction="sum"))
        return total / len(labels)


def _evaluated(model: torch.nn.Module) -> list[torch.Tensor]:
    """What an evaluation depends on: parameters, then buffers of the same kind of numbers."""
    return [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.is_floating_point())]


def _counts_updates(strategy: DistributedStrategy) -> bool:
    """Whether the learning rate's schedule counts updates rather than steps."""
    return strategy.gradient_merge and strategy.gradient_merge_configs.lr_per == "update"


def make_optimizer(model: torch.nn.Module, workload: Workload) -> torch.optim.Optimizer:
    """The workload's optimizer."""
    parameters, decay = model.parameters(), workload.weight_decay
    if workload.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=workload.lr, weight_decay=decay)
    if workload.optimizer == "adagrad":
        return torch.optim.Adagrad(parameters, lr=workload.lr, weight_decay=decay)
    momentum = workload.momentum if workload.optimizer == "momentum" else 0.0
    return torch.optim.SGD(parameters, lr=workload.lr, momentum=momentum, weight_decay=decay)


def set_learning_rate(optimizer: torch.optim.Optimizer, workload: Workload, step: int) -> None:
    """Put the learning rate that the workload's decay gives ``step``."""
    rate = workload.lr
    for decay in workload.lr_decay:
        rate *= decay.factor if step >= decay.step else 1.0
    for group in optimizer.param_groups:
        group["lr"] = rate


def checksum(model: torch.nn.Module) -> str:
    """Hexadecimal digest over all parameters' bits: equal on ranks that agree."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
