"""EmulatedTraining: legs on a rank that sleeps by a layer table and communicates for real.

There are no data, and no losses except those of a declared curve or recording. Parameters hold nothing worth keeping,
so every leg has its own model. An update sleeps too; packing, collectives, unpacking, merging gradients and averaging
parameters are real. With parameter servers, pushes, pulls and all work of the servers are real, including their
updates; a trainer's own update, in GeoSGD, sleeps.
"""

from typing import Any, NoReturn

import torch

from fleetbench.declared import DeclaredScalars
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.layers import Gradient, LayerTable, StepHead
from fleetbench.plan.sharding import REST, degree_of, grouped_by_block
from fleetbench.profile import table_for
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import OPTIMIZER_STATE
from fleetbench.workloads.server_updates import options_for
from real.communication.communicators import Communicators
from real.emulated.model import EmulatedModel, EmulatedOptimizer
from real.emulated.pace import Pace, sharpen_sleep
from real.leg import Leg
from real.leg_steps import Beat, LegEngine
from real.supported import executed_part
from real.training import Training


class EmulatedTraining(Training):
    """Trains on an emulated device. Until ``close``, the thread's sleeps end with minimal delay."""

    _pace: Pace
    _head: StepHead
    _strategy: DistributedStrategy

    def __init__(self, experiment: Experiment, communicators: Communicators) -> None:
        super().__init__(experiment, communicators)
        self.steps_per_epoch = experiment.workload.steps_per_epoch
        self._scalars = DeclaredScalars(experiment.workload)
        self._slack_ns = sharpen_sleep()
        self._held_out: list[tuple[int, float]] = []
        self._last = 0

    def begin(self, leg: Leg, beat: Beat) -> LegEngine:
        """See ``Training``; parameters start at zero."""
        if leg.start == "as_is":  # from a driver of scripts, which measures layers next
            self.measuring(leg)
        workload = self._experiment.workload
        self._start(leg)
        table = self._table(leg.strategy)
        self._strategy = strategy = executed_part(leg.strategy)
        lead_ns = 0 if strategy.mode == "ps" else table.forward_ns  # with servers, no stopwatch sees where a trainer waits
        holds_up = strategy.build_strategy.enable_sequential_execution or strategy.sharding
        self._pace = pace = Pace(holds_up=holds_up, lead_ns=lead_ns)
        self._head = StepHead(table, leg.strategy.fetch_every_n_steps, pace.deadline(0))
        gradients, blocks = table.by_readiness(), dict[str, list[Gradient]]()
        trainers, ranks = self.communicators.trainers, 1
        if strategy.sharding:
            blocks = grouped_by_block(gradients, strategy, ())
            ranks = degree_of(strategy.sharding_configs, trainers)
        named = {block: [gradient.name for gradient in own] for block, own in blocks.items() if block != REST}
        self.model = EmulatedModel(table, self.communicators.rank, pace, named)
        self._update_ns = (2 * table.update + ranks) // (2 * ranks)
        self.optimizer = self._make_optimizer()
        self._held_out, self._last = [], leg.steps
        x = self._draws(leg)

        def begin_step(step: int) -> None:
            pace.begin(x[step], counted=step >= 1)
            beat(step)

        self.engine = self._engine(leg, strategy, options_for(workload))
        self.engine.on_step = begin_step
        if lead_ns:
            self.engine.stopwatch.on_stall = pace.stalled
        return self.engine

    def results(self, leg: Leg) -> dict[str, Any]:
        """See ``Training``; adds declared losses, and how late sleeps ended."""
        return {
            **super().results(leg),
            "held_out": self._held_out,
            "final_loss": self._scalars.declared_loss(leg.steps) if leg.evaluate and not leg.strategy.a_sync else None,
            "lateness": {"layer": sorted(self._pace.layers.items()), "step": sorted(self._pace.steps.items())},
        }

    def measuring(self, _leg: Leg) -> NoReturn:
        """Raise ``ConfigError``, because nothing is computed whose time could be measured."""
        raise ConfigError("nothing computes here whose time could be measured", "run.device", "'emulated'", 'set run.device = "cpu"')

    def close(self) -> None:
        """Restore the thread's timer slack."""
        if self._slack_ns is not None:
            sharpen_sleep(self._slack_ns)

    def _make_optimizer(self) -> EmulatedOptimizer:
        workload = self._experiment.workload
        slots = OPTIMIZER_STATE[workload.optimizer]
        return EmulatedOptimizer(self.model.parameters(), lr=workload.lr, update_ns=self._update_ns, pace=self._pace, slots=slots)

    def _table(self, strategy: DistributedStrategy) -> LayerTable:
        return table_for(self._experiment.replace(strategy=strategy))

    def _train_step(self) -> float | None:
        engine = self.engine
        self.optimizer.zero_grad()
        self._pace.busy_until(self._head.forward_begins(self._pace.ready()))
        output = self.model()
        if self._strategy.follows_loss:
            engine.report(torch.tensor(self._scalars.scalar("loss", self.communicators.rank, engine.step)))
        output.backward()
        self.optimizer.step()
        if engine.step == self._last and self._head.read_ns():
            self._pace.busy_until(self._pace.ready() + self._head.read_ns())
        if (loss := self._declared_loss(engine.step)) is not None:
            engine.stopwatch.loss(loss)
        return loss

    def _evaluate(self, step: int) -> None:
        if (loss := self._declared_loss(step)) is not None:
            self._held_out.append((step, loss))

    def _declared_loss(self, step: int) -> float | None:
        """Return the declared loss, if any; None with parameter servers, whose trainers do not follow it."""
        return None if self._strategy.mode == "ps" else self._scalars.declared_loss(step)
