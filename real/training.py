"""Training: a registry workload on one rank, leg by leg."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import Profile, compute_key
from fleetbench.result import Activations
from fleetbench.strategy import DistributedStrategy, RecomputeConfigs
from fleetbench.workload import Workload
from fleetbench.workloads.data.data import Sampler, held_out, num_training_samples, open_batches
from fleetbench.workloads.data.reader import ReadsAhead
from fleetbench.workloads.models.registry import build_model, loss_of
from real.communication.communicators import Communicators
from real.compute.compute import apply_compute
from real.compute.injector import Injector, delay_of
from real.compute.recompute import activation_bytes
from real.engine.sparse import sparse_weights
from real.external import External, load_external, refuse_misfit
from real.leg import Leg
from real.leg_training import LegEngine, LegTraining
from real.processes.failures import CollectiveFailed
from real.profile_leg import ProfileLeg

_EVALUATED = 512
"""Held-out samples in one forward."""


class Training(LegTraining):
    """A model, its optimizer and its place in the data, which legs continue or start anew."""

    def __init__(
        self, experiment: Experiment, profile: Profile | None, data: Path, communicators: Communicators, model: str | None = None
    ) -> None:
        """``model`` names one outside the registry; see ``real.external``."""
        super().__init__(experiment, profile, communicators)
        self._device = communicators.device
        self._external_name = model
        self._fits = False
        """Whether the model from outside took a batch."""
        self._external: External | None = None
        self._data = data
        workload = experiment.workload
        sampler = sampler_of(experiment, data, communicators.trainers, communicators.rank)
        if workload.batch_size * communicators.trainers > sampler.num_samples and workload.uneven_data == "cut":
            raise ConfigError(
                "is more than there are samples for", "workload.batch_size", str(workload.batch_size), 'use uneven_data = "pad"'
            )
        self._batches = open_batches(workload, data, sampler, self._device.type)
        self._steps_per_epoch = sampler.steps_per_epoch
        self._model = self._fresh_model()
        if experiment.strategy.mode == "collective":
            refuse_dense_optimizer(self._model, workload)
        self._scratch = self._fresh_model()
        self._optimizer = make_optimizer(self._model, workload)
        self._compare = loss_of(workload.model) if model is None else cross_entropy
        self._position = 0
        self._injector: Injector | None = None
        self._snapshots: list[tuple[int, torch.Tensor]] = []

    @property
    def steps_per_epoch(self) -> int:
        """See ``LegTraining``."""
        return self._steps_per_epoch

    def run(self, leg: Leg, on_step: Callable[[int], None]) -> dict[str, Any]:
        """Run one leg and return its results as plain data; ``on_step`` hears of every step."""
        if leg.start == "initial":
            self._model.load_state_dict(self._fresh_model().state_dict())
            self._position = 0
        # Momentum that Local SGD left different on every rank would let a synchronous leg drift apart.
        self._optimizer = make_optimizer(self._model, self._experiment.workload)
        return self._profile_leg(leg, on_step) if leg.profile else self._train_leg(leg, on_step)

    def _fresh_model(self) -> torch.nn.Module:
        workload, seed = self._experiment.workload, self._experiment.run.seed
        if self._external_name is not None:
            self._external = load_external(self._external_name, seed).to(self._device, getattr(torch, workload.dtype))
            return self._external.model
        return build_model(workload.model, workload.model_options, workload.dtype, seed).to(self._device)

    def _train_leg(self, leg: Leg, on_step: Callable[[int], None]) -> dict[str, Any]:
        activations = self._activations(leg.strategy)
        self._snapshots = []
        trained = self._train(leg, on_step, self._model, self._optimizer, strategy=leg.strategy)
        if self._injector is not None:
            self._injector.detach()
        return {
            **trained,
            "held_out": [[step, self._held_out_loss(flat)] for step, flat in self._snapshots],
            "final_loss": self._held_out_loss(self._flat_parameters()) if leg.evaluate else None,
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
        if self._external is not None and self._external.inputs is not None:
            return self._external.computed_loss(self._model)
        inputs, labels = self._batch()
        if self._external_name is None or self._fits:
            return self._compare(self._model(inputs), labels)
        try:
            loss = self._compare(self._model(inputs), labels)
        except (CollectiveFailed, torch.OutOfMemoryError):  # RuntimeErrors, and nothing to do with what the batch looks like
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise refuse_misfit(self._external_name, inputs, error) from error
        self._fits = True
        return loss

    def _activations(self, strategy: DistributedStrategy) -> dict[str, int] | None:
        """What recompute saves, for the next batch on a copy of the model."""
        if not strategy.recompute or self._external_name is not None:
            return None
        inputs, labels = (tensor.to(self._device) for tensor in self._batches.batch(self._position))
        found = compare_activations(self._scratch, strategy, self._device, lambda model: self._compare(model(inputs), labels))
        return dataclasses.asdict(found)

    def _train_step(self, engine: LegEngine) -> None:
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

    def _evaluate(self, engine: LegEngine, step: int) -> None:
        with engine.stopwatch.pause():
            self._snapshots.append((step, self._flat_parameters()))

    def _begin_leg(self, leg: Leg, engine: LegEngine) -> Callable[[int], None] | None:
        """Inject the experiment's stragglers; nothing where it declares none."""
        self._injector = None
        if not self._experiment.cluster.stragglers:
            return None
        table = self._table(leg.strategy)
        if table is None:
            raise ConfigError("injected stragglers need the profile's layer times", "workload.profile", hint="take a profile first")
        own = self._draws(leg)
        injector = Injector(table, delay=delay_of(self._device))
        injector.attach(self._model)
        engine.on_compute_end = injector.finish
        self._injector = injector
        return lambda step: injector.begin(own[step])

    def _profile_leg(self, leg: Leg, on_step: Callable[[int], None]) -> dict[str, Any]:
        """Time layers, update and reading on all ranks at once, without any exchange of gradients."""
        reads_ahead = self._batches if isinstance(self._batches, ReadsAhead) else None
        measuring = ProfileLeg(self._model, self._optimizer, self._communicators, self._next_loss, reads_ahead=reads_ahead)
        return {"layer_times": dataclasses.asdict(measuring.run(leg, on_step))}

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
            total += float(self._compare(self._scratch(some.to(self._device)), their.to(self._device), reduction="sum"))
        return total / len(labels)


def _evaluated(model: torch.nn.Module) -> list[torch.Tensor]:
    """What an evaluation depends on: parameters, then buffers of the same kind of numbers."""
    return [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.is_floating_point())]


def refuse_dense_optimizer(model: torch.nn.Module, workload: Workload) -> None:
    """Raise ``ConfigError`` for an optimizer that takes no sparse gradients, where the model has some and trainers update it."""
    if (workload.optimizer == "adam" or workload.weight_decay) and (sparse := sparse_weights(model)):
        adam = workload.optimizer == "adam"
        where, value = ("optimizer", repr(workload.optimizer)) if adam else ("weight_decay", str(workload.weight_decay))
        servers = '; parameter servers (strategy.mode = "ps", but for GeoSGD) take adam' if adam else ""
        hint = f"use sgd or adagrad, without weight_decay{servers}"
        raise ConfigError(f"cannot update {min(sparse)}, whose gradients are sparse", f"workload.{where}", value, hint)


def sampler_of(experiment: Experiment, data: Path, trainers: int, rank: int) -> Sampler:
    """Which of the prepared ``data`` a trainer's batches have."""
    workload = experiment.workload
    return Sampler(
        num_samples=num_training_samples(data),
        batch_size=workload.batch_size,
        trainers=trainers,
        rank=rank,
        seed=experiment.run.seed,
        uneven=workload.uneven_data,
        wanted_steps=workload.steps_per_epoch,
    )


def make_optimizer(model: torch.nn.Module, workload: Workload) -> torch.optim.Optimizer:
    """The workload's optimizer."""
    parameters, decay = model.parameters(), workload.weight_decay
    if workload.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=workload.lr, weight_decay=decay)
    if workload.optimizer == "adagrad":
        return torch.optim.Adagrad(parameters, lr=workload.lr, weight_decay=decay)
    momentum = workload.momentum if workload.optimizer == "momentum" else 0.0
    return torch.optim.SGD(parameters, lr=workload.lr, momentum=momentum, weight_decay=decay)


def compare_activations(
    model: nn.Module, strategy: DistributedStrategy, device: torch.device, run: Callable[[nn.Module], torch.Tensor]
) -> Activations:
    """Bytes that one forward of ``model`` saves for its backward, with the strategy's recompute and without any.

    ``run`` takes the model to its loss. The model's running statistics move; torch's random numbers
    do not. Blocks are not compiled for it, nor do batch norms meet.
    """
    alone = DistributedStrategy(
        thread_num=strategy.thread_num,
        amp=strategy.amp,
        amp_configs=strategy.amp_configs,
        recompute=strategy.recompute,
        recompute_configs=strategy.recompute_configs,
    )
    model.train()
    saved = [
        _saved(model, variant, device, run) for variant in (alone, alone.replace(recompute=False, recompute_configs=RecomputeConfigs()))
    ]
    return Activations(saved_bytes=saved[0], without_recompute_bytes=saved[1])


def _saved(model: nn.Module, strategy: DistributedStrategy, device: torch.device, run: Callable[[nn.Module], torch.Tensor]) -> int:
    undo = apply_compute(model, strategy, device=device, group=None, scale=lambda: 1.0)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            return activation_bytes(model, lambda: run(model))
    finally:
        undo()
