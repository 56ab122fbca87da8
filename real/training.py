"""Training: an experiment's training on one rank, leg by leg.

The training in ``real.emulated.emulated_training`` sleeps instead of computing.
"""

import dataclasses
import hashlib
from abc import abstractmethod
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.combination import Combination
from fleetbench.plan.drive import ends_epoch
from fleetbench.plan.fusion import Cost
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import all_reduce_cost, as_used, compute_key, profile_of
from fleetbench.stragglers import draws
from fleetbench.strategy import DistributedStrategy
from fleetbench.target import crossing
from fleetbench.workloads.data.data import open_batches
from fleetbench.workloads.data.reader import ReadsAhead
from fleetbench.workloads.models.registry import build_model, loss_of
from fleetbench.workloads.server_updates import Told
from fleetbench.workloads.training import HeldOut, evaluated, make_optimizer, refuse_dense_optimizer, sampler_of, set_learning_rate
from real.communication.communicators import Communicators
from real.compute.injector import Injector, delay_of
from real.compute.recompute import SavedForBackward
from real.engine.engine import Engine
from real.layer_times import ProfileLeg
from real.leg import Leg
from real.leg_steps import Beat, LegEngine, Trained, begin_leg
from real.servers.links import Options
from real.servers.served_training import ServedTraining
from real.sharding.engine import ShardedEngine
from real.training_log import TrainingLog


class Training(Trained):
    """An experiment's own workload on one rank: a model and its optimizer, which legs continue or restart.

    Life cycle of a leg: ``begin`` or ``measuring``; ``step``, as often as the leg asks for one
    (``real.leg_steps``); ``results``. A subclass defines the compute of a step.
    """

    steps_per_epoch: int | None
    """Number of steps of one trainer per epoch; ``None`` without epochs."""
    engine: LegEngine
    """Engine of the current leg; not set between legs."""

    def __init__(self, experiment: Experiment, communicators: Communicators) -> None:
        super().__init__(communicators, experiment.strategy, experiment.cluster.trainers_per_node)
        self._experiment = experiment
        self.batch_size = experiment.workload.batch_size
        self._leg, self._step = Leg(steps=0), 0
        """Current leg, and the number of its next step."""
        self._saved: SavedForBackward | None = None
        """Counter of the bytes that the next forward saves, if they are counted."""
        self.keep_times = True
        """Whether to keep the times of every step; a training of weeks has too many."""
        self.log: TrainingLog | None = None
        """Training log, which gets the loss of every counted step; ``None`` for none."""

    @abstractmethod
    def close(self) -> None:
        """Release resources that outlive a leg."""

    @abstractmethod
    def _table(self, strategy: DistributedStrategy) -> LayerTable | None:
        """Return the layer table of a strategy, if it is known."""

    @abstractmethod
    def _train_step(self) -> torch.Tensor | float | None:
        """Run everything from the batch to the update; return the loss."""

    @abstractmethod
    def _evaluate(self, step: int) -> None:
        """Evaluate the model after ``step``, in a leg with ``evaluate``."""

    def run(self, leg: Leg, beat: Beat) -> dict[str, Any]:
        """Run a leg, and return this rank's part of its results."""
        steps = begin_leg(leg, self, beat)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                part: dict[str, Any] = end.value
                return part
            self.step()

    def step(self) -> None:
        """Train the leg's next step at its learning rate; then end an epoch and evaluate, if due."""
        leg, step, engine = self._leg, self._step, self.engine
        self._step += 1
        if leg.profile:
            self._train_step()
            return
        workload = self._experiment.workload
        scheduled = engine.num_updates + 1 if Combination.of(leg.strategy).lr_counts_updates else step
        set_learning_rate(self.optimizer, workload, scheduled if leg.start == "initial" else 1)
        loss = self._train_step()
        if self.log is not None and step >= 1:
            self.log.report({} if loss is None else {"loss": loss})
        if ends_epoch(step, self.steps_per_epoch):
            engine.end_epoch()
            if self.log is not None:
                self.log.end_epoch()
        if leg.evaluate and step >= 1 and step % workload.eval_every == 0:
            # fetches rows that were not looked up lately
            if isinstance(engine, ServedTraining) and engine.rules.mode != "geo_sgd":
                with engine.stopwatch.pause():
                    engine.fetch()
            self._evaluate(step)

    def results(self, leg: Leg) -> dict[str, Any]:  # noqa: ARG002  # a subclass evaluates what the leg asks for
        """Close the engine, and return a digest of the parameters."""
        self.engine.close()
        del self.engine  # frees its buffers before the next leg allocates its own
        return {"parameters": checksum(self.model)}

    @abstractmethod
    def _make_optimizer(self) -> torch.optim.Optimizer:
        """Create an optimizer of the model's parameters."""

    def use(self, engine: Engine) -> None:
        """Let this engine run the model from now on."""
        self.engine = engine

    def count_saved(self, saved: SavedForBackward) -> None:
        """Count the bytes that the next step's forward and loss save for its backward."""
        self._saved = saved

    def _start(self, leg: Leg) -> None:
        self._leg, self._step = leg, 1 - leg.warmup_steps

    def _engine(self, leg: Leg, strategy: DistributedStrategy, told: Told | None = None) -> LegEngine:
        """Return the engine of ``strategy`` with the optimizer attached; with servers, it has joined them."""
        run, first_step = self._experiment.run, 1 - leg.warmup_steps
        if strategy.mode == "ps":
            options = Options(
                number=self.communicators.rank,
                trainers=self.communicators.trainers,
                endpoints=leg.endpoints,
                timeout_s=run.timeout * 1e-9,
                startup_timeout_s=run.startup_timeout * 1e-9,
                first_step=first_step,
                keep_times=True,
                record=leg.record,
            )
            served = ServedTraining(self.model, strategy, options)
            served.attach_optimizer(self.optimizer, told)
            served.begin()
            return served
        if strategy.sharding:
            sharded = ShardedEngine(self.model, strategy, self.communicators, first_step=first_step, keep_times=self.keep_times)
            self.optimizer = self._make_optimizer()  # the model's parameters are shards now
            sharded.attach_optimizer(self.optimizer)
            return sharded
        engine = Engine(
            self.model,
            strategy,
            self.communicators,
            first_step=first_step,
            record=leg.record,
            keep_times=self.keep_times,
            trainers_per_node=self.trainers_per_node,
            forecast=self._forecast(leg.strategy),
        )
        engine.attach_optimizer(self.optimizer)
        return engine

    def _forecast(self, strategy: DistributedStrategy) -> tuple[Cost, dict[str, int]] | None:
        """Return an all-reduce's cost and gradients' readiness in ns, if the fusion plans by cost; else ``None``."""
        table = self._table(strategy)
        if not strategy.fuses_by_cost or table is None:
            return None
        cost = all_reduce_cost(self._experiment.replace(strategy=strategy), table)
        return cost, {gradient.name: gradient.ready for gradient in table.by_readiness()}

    def _draws(self, leg: Leg) -> dict[int, int]:
        """Return this rank's straggler draws X by step, for the leg's window, in units of 2^-24."""
        cluster, first = self._experiment.cluster, 1 - leg.warmup_steps
        steps = leg.warmup_steps + leg.steps
        drawn_from = first + leg.window * steps
        x = draws(cluster.stragglers, self._experiment.run.seed, cluster.trainers, cluster.trainers_per_node, drawn_from, steps)
        return dict(enumerate(map(int, x[self.communicators.rank]), first))


class ComputedTraining(Training):
    """Training of a registry model, with its position in the data."""

    def __init__(self, experiment: Experiment, data: Path, communicators: Communicators) -> None:
        """``data`` is the folder with the prepared data."""
        super().__init__(experiment, communicators)
        self._data, self._seed = data, experiment.run.seed
        workload = experiment.workload
        self._open_batches()
        self.model = self._fresh_model()
        if experiment.strategy.mode == "collective":
            refuse_dense_optimizer(self.model, workload)
        self._held_out = HeldOut(self._fresh_model(), data, loss_of(workload.model))
        self._compare = loss_of(workload.model)
        self._position = 0
        self._snapshots: list[tuple[int, torch.Tensor]] = []
        self._measures: list[tuple[int, float, float | None]] = []
        """Evaluations in the current leg: step, and the held-out loss and accuracy after it."""
        self._injector: Injector | None = None

    def begin(self, leg: Leg, beat: Beat) -> LegEngine:
        """See ``Trained``."""
        self._start(leg)
        self._snapshots, self._measures, self.has_arrived = [], [], False
        self.engine = self._engine(leg, self.own_strategy if leg.start == "as_is" else leg.strategy)
        self.engine.on_step = beat
        if self._experiment.cluster.stragglers:
            self._inject(leg, beat)
        return self.engine

    def results(self, leg: Leg) -> dict[str, Any]:
        """See ``Training``; adds held-out losses."""
        found = super().results(leg)
        if self._injector is not None:
            self._injector.detach()
            self._injector = None
        measures = [*self._measures, *((step, *self._evaluated_at(flat)) for step, flat in self._snapshots)]
        return {
            **found,
            "held_out": [[step, loss] for step, loss, _ in measures],
            "metrics": {"accuracy": [[step, accuracy] for step, _, accuracy in measures if accuracy is not None]},
            "final_loss": self._evaluated_at(self._flat_parameters())[0] if leg.evaluate else None,
        }

    def measuring(self, leg: Leg) -> ProfileLeg:
        """See ``Trained``."""
        self._start(leg)
        reads_ahead = self._batches if isinstance(self._batches, ReadsAhead) else None
        return ProfileLeg(self.model, self.optimizer, self.communicators, reads_ahead=reads_ahead)

    def close(self) -> None:
        """Close the data."""
        self._batches.close()

    def _fresh_model(self) -> torch.nn.Module:
        workload = self._experiment.workload
        return build_model(workload.model, workload.model_options, workload.dtype, self._seed).to(self.device)

    def _open_batches(self) -> None:
        own = self._experiment.replace(run=dataclasses.replace(self._experiment.run, seed=self._seed))
        sampler = sampler_of(own, self._data, self.communicators.trainers, self.communicators.rank)
        self._batches = open_batches(own.workload, self._data, sampler)
        self.steps_per_epoch = sampler.steps_per_epoch

    def _start(self, leg: Leg) -> None:
        super()._start(leg)
        if leg.start == "initial":
            seed = self._experiment.run.seed if leg.seed is None else leg.seed
            if seed != self._seed:
                self._batches.close()
                self._seed = seed
                self._open_batches()
            self.model = self._fresh_model()  # the last one may be sharded
            self._position = 0
        # Momentum that Local SGD left different on every rank would let a synchronous leg drift apart.
        self.optimizer = self._make_optimizer()

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model, self._experiment.workload)

    def _inject(self, leg: Leg, beat: Beat) -> None:
        table = self._table(leg.strategy)
        if table is None:
            raise ConfigError("injected stragglers need the profile's layer times", "workload.profile", hint="take a profile first")
        self._injector = injector = Injector(table, delay_of(self.device))
        own = self._draws(leg)
        injector.attach(self.model)

        def begin_step(step: int) -> None:
            injector.begin(own[step])
            beat(step)

        self.engine.on_step, self.engine.on_compute_end = begin_step, injector.finish

    def _train_step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        saved, self._saved = self._saved, None
        with saved or nullcontext():
            inputs, labels = (tensor.to(self.device, non_blocking=True) for tensor in self._batches.batch(self._position))
            self._position += 1
            loss = self._compare(self.model(inputs), labels)
        self.engine.report(loss)
        loss.backward()
        self.optimizer.step()
        self.engine.stopwatch.loss(loss)
        return loss

    def _table(self, strategy: DistributedStrategy) -> LayerTable | None:
        key, profile = compute_key(self._experiment, strategy), profile_of(self._experiment)
        return next((as_used(table, strategy) for table in profile.tables if table.key == key), None) if profile else None

    def _evaluate(self, step: int) -> None:
        with self.engine.stopwatch.pause():
            flat, leg = self._flat_parameters(), self._leg
            in_flight = isinstance(self.engine, ServedTraining) or leg.strategy.localsgd_configs.has_fragments
            if in_flight or not leg.ends_at_target:  # an exchange now would not match across ranks
                self._snapshots.append((step, flat))
                return
            loss, accuracy = self._evaluated_at(flat)
            agreed = torch.tensor([loss], dtype=torch.float64, device=self.device)
            # ranks may differ in the last digit, but must end at one step
            self.communicators.all_reduce(agreed, "mean")
            self._measures.append((step, float(agreed), accuracy))
            held_out = [(after, loss) for after, loss, _ in self._measures]
            self.has_arrived = crossing(held_out, self._experiment.workload.target_loss) is not None

    def _flat_parameters(self) -> torch.Tensor:
        """Return parameters, and the batch-norm statistics that an evaluation needs, as one vector."""
        return torch.cat([whole(tensor).reshape(-1) for tensor in evaluated(self.model)])

    def _evaluated_at(self, flat: torch.Tensor) -> tuple[float, float | None]:
        """Return mean loss and accuracy on the held-out split, at the average of all trainers' parameters."""
        self.communicators.all_reduce(flat, "mean")
        return self._held_out.loss_and_accuracy(flat)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, whole and without its history; for a sharded one, all ranks call it at the same place."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def checksum(model: torch.nn.Module) -> str:
    """Return the hexadecimal digest of all parameters' bits: equal on ranks that agree."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(whole(parameter).cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
