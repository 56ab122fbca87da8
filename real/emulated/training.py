"""EmulatedTraining: legs on a rank that sleeps by a layer table and communicates for real.

There are no data and no losses, but those of a declared curve or recording; parameters hold nothing
worth keeping, so every leg has a model of its own. An update sleeps too; packing, collectives,
unpacking, merging gradients and averaging parameters are real. With parameter servers, pushes, pulls and all
that servers do are real, their updates among it; a trainer's own update, in GeoSGD, sleeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fleetbench.declared import DeclaredScalars
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.layers import LayerTable
from fleetbench.plan.step_head import StepHead
from fleetbench.profile import Profile
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import OPTIMIZER_STATE
from real.communication.communicators import Communicators
from real.emulated.model import EmulatedModel, EmulatedOptimizer
from real.emulated.pace import Pace, sharpen_sleep
from real.emulated.support import executed_part, table_of
from real.leg import Leg
from real.leg_training import LegEngine, LegTraining
from real.servers.optimizer_options import options_for
from real.servers.training import ServedTraining


class EmulatedTraining(LegTraining):
    """A rank of an emulated device. Between ``run`` and ``close`` the thread's sleeps are sharp."""

    def __init__(self, experiment: Experiment, profile: Profile | None, communicators: Communicators) -> None:
        super().__init__(experiment, profile, communicators)
        self._scalars = DeclaredScalars.of(experiment.workload)
        self._slack_ns = sharpen_sleep()
        self._pace = Pace()
        self._head: StepHead | None = None
        self._follows_loss = False
        self._model: EmulatedModel | None = None
        self._optimizer: EmulatedOptimizer | None = None
        self._held_out: list[tuple[int, float]] = []

    @property
    def steps_per_epoch(self) -> int | None:
        """As the file says."""
        return self._experiment.workload.steps_per_epoch

    def run(self, leg: Leg, on_step: Callable[[int], None]) -> dict[str, Any]:
        """Run one leg, from parameters of zero, and return its results as plain data; ``on_step`` hears of every step."""
        if leg.profile:
            raise ConfigError("nothing computes here whose time could be measured", "run.device", "'emulated'", 'set run.device = "cpu"')
        workload = self._experiment.workload
        table = table_of(self._experiment, leg.strategy, self._profile)
        strategy = executed_part(leg.strategy)
        self._pace = Pace(holds_up=strategy.build_strategy.enable_sequential_execution)
        self._head = StepHead(table, leg.strategy.fetch_every_n_steps, self._pace.deadline(0))
        self._follows_loss = strategy.follows_loss
        self._model = EmulatedModel(table, self._communicators.rank, self._pace)
        self._optimizer = EmulatedOptimizer(
            self._model.parameters(), lr=workload.lr, update_ns=table.update, pace=self._pace, slots=OPTIMIZER_STATE[workload.optimizer]
        )
        self._held_out = []
        trained = self._train(leg, on_step, self._model, self._optimizer, strategy=strategy)
        return {
            **trained,
            "held_out": self._held_out,
            "final_loss": self._scalars.declared_loss(leg.steps) if leg.evaluate and not leg.strategy.a_sync else None,
            "activations": None,
            "lateness": {"layer": self._pace.layers.encode(), "step": self._pace.steps.encode()},
        }

    def close(self) -> None:
        """Let the thread sleep as it did."""
        if self._slack_ns is not None:
            sharpen_sleep(self._slack_ns)

    def _table(self, strategy: DistributedStrategy) -> LayerTable:
        return table_of(self._experiment, strategy, self._profile)

    def _begin_leg(self, leg: Leg, engine: LegEngine) -> Callable[[int], None]:  # noqa: ARG002  # an engine needs nothing more
        """Let every step take 1 + X times the table's."""
        x = self._draws(leg)
        return lambda step: self._pace.begin(x[step], counted=step >= 1)

    def _train_step(self, engine: LegEngine) -> None:
        assert self._model is not None
        assert self._optimizer is not None
        assert self._head is not None
        self._pace.sleep_until(self._head.forward_begins(self._pace.deadline(0)))
        output = self._model()
        if self._follows_loss:
            told = self._scalars.scalar("loss", self._communicators.rank, engine.step)
            engine.report(torch.tensor(told))
        output.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        declared = self._declared_loss(engine, engine.step)
        if declared is not None:
            engine.stopwatch.loss(declared)

    def _evaluate(self, engine: LegEngine, step: int) -> None:
        declared = self._declared_loss(engine, step)
        if declared is not None:
            self._held_out.append((step, declared))

    def _attach(self, engine: LegEngine, optimizer: torch.optim.Optimizer) -> None:
        """Servers have the workload's optimizer, which they know by name."""
        if isinstance(engine, ServedTraining):
            engine.attach_optimizer(optimizer, options_for(self._experiment.workload))
        else:
            engine.attach_optimizer(optimizer)

    def _declared_loss(self, engine: LegEngine, step: int) -> float | None:
        """By the curve, which nobody evaluates; servers' trainers do not follow it."""
        return None if isinstance(engine, ServedTraining) else self._scalars.declared_loss(step)
