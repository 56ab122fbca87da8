"""ServedEngine: what a leg of an experiment drives where there are servers; the counterpart of ``real.engine.engine.Engine``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fleetbench.plan.build import Plan
from fleetbench.plan.groups import world_of
from fleetbench.plan.replay import Recording
from fleetbench.plan.servers.recording import RoleRecording
from fleetbench.strategy import DistributedStrategy
from real.engine.stopwatch import Stopwatch
from real.servers.optimizer_options import Told
from real.servers.training import ServedTraining, TrainerOptions


class ServedEngine:
    """Life cycle: made, ``attach_optimizer``, steps, ``flush(end=True)``, ``close``. Every trainer of a leg makes one."""

    def __init__(self, model: torch.nn.Module, strategy: DistributedStrategy, options: TrainerOptions) -> None:
        self._training = ServedTraining(model, strategy, options)
        self._trainers = options.trainers

    @property
    def stopwatch(self) -> Stopwatch:
        """Where the steps went."""
        return self._training.stopwatch

    @property
    def on_step(self) -> Callable[[int], None] | None:
        """Hears of every step as it begins."""
        return self._training.on_step

    @on_step.setter
    def on_step(self, hear: Callable[[int], None] | None) -> None:
        self._training.on_step = hear

    @property
    def on_compute_end(self) -> Callable[[], None] | None:
        """Runs where the backward's computation ends, before anything is waited for."""
        return self._training.on_compute_end

    @on_compute_end.setter
    def on_compute_end(self, run: Callable[[], None] | None) -> None:
        self._training.on_compute_end = run

    @property
    def step(self) -> int:
        """The step under way or done last."""
        return self._training.step

    @property
    def num_updates(self) -> int:
        """Steps: each is an update, here or on the servers."""
        return self._training.step

    @property
    def plan(self) -> Plan:
        """Without collectives."""
        return Plan(trainers=self._trainers, buckets=(), exchange=(), groups=(("world", world_of(self._trainers)),))

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, told: Told | None = None) -> None:
        """Let its steps be the strategy's, and join the servers. ``told``: see ``ServedTraining``."""
        self._training.attach_optimizer(optimizer, told)
        self._training.begin()

    def report(self, loss: torch.Tensor) -> None:
        """Servers follow no loss."""

    def end_epoch(self) -> None:
        """Servers count no epochs."""

    def refresh(self) -> None:
        """Before an evaluation: read the rows that this trainer has not looked up lately. In GeoSGD it has its own."""
        if self._training.rules.mode != "geo_sgd":
            self._training.fetch()

    def flush(self, *, end: bool = False) -> None:
        """Push and pull what there is. ``end``: no step follows, and all trainers end with what the servers hold."""
        with self.stopwatch.waits():
            self._training.flush()
        if end:
            self._training.count_sent()
            self.stopwatch.finish()  # what follows is none of the last step's
            self._training.take_all()
            self._training.finish()

    def recording(self) -> Recording | None:
        """None: roles have recordings of another kind."""
        return None

    def roles(self) -> list[RoleRecording]:
        """What the trainer and its sender heard and decided; none where that was not asked for."""
        return self._training.recordings()

    def close(self) -> None:
        """Let go of what is left."""
        self._training.close()
