"""Train: an experiment's own workload, under any launcher that ``fleet.init`` understands, or alone.

``python -m real.workloads.train EXPERIMENT.toml [KEY=VALUE ...]`` trains one leg, that of ``fleetbench real``: with warm-up, injected
stragglers, emulated compute and evaluation as the file says. Under ``fleetbench tune`` or ``profile``, which order the legs, it is a
user's script.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from fleetbench.errors import ConfigError, FleetbenchError
from fleetbench.experiment import Experiment
from fleetbench.fleet_names import FieldHasNoEffect
from fleetbench.profile import Profile
from fleetbench.workload import LAYERS
from fleetbench.workloads.data.data import open_batches, prepare
from fleetbench.workloads.models.registry import build_model, check_model, loss_of
from real.collective import Collective
from real.communication.device import device_of
from real.emulated.support import is_emulated, refuse_unemulated
from real.engine.engine import Engine
from real.engine.stopwatch import Stopwatch
from real.fleet import fleet
from real.leg import Leg
from real.leg_training import LegEngine, set_learning_rate
from real.processes.folders import temporary_folder
from real.processes.roles import TUNING, role_of
from real.training import make_optimizer, refuse_dense_optimizer, sampler_of
from real.training_log import TrainingLog
from real.worker import training_of

LOG_EVERY = 20


def train(experiment: Experiment, *, keep_times: bool = False) -> dict[str, Any]:
    """Train the experiment; rank 0 prints the training log. This rank's part of the leg, as plain data; nothing in a tuning.

    ``keep_times``: with every step, which a training of weeks would not want. Raises ``ConfigError`` for what nobody can train.
    """
    if not is_emulated(experiment):
        if experiment.workload.model == LAYERS:
            hint = 'set run.device = "emulated", or print the launch of a script of your own: --print FORM EXPERIMENT.toml -- train.py'
            raise ConfigError("a table of layers computes nothing", "workload.model", repr(LAYERS), hint)
        check_model(experiment.workload)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FieldHasNoEffect)  # those of a registry workload have one here
        is_driven = bool(os.environ.get(TUNING))
        fleet.init(experiment.strategy, timeout_s=experiment.run.timeout * 1e-9, log_every=LOG_EVERY if is_driven else 0)
    with temporary_folder() as data:
        if not is_emulated(experiment):
            prepare(experiment.workload, experiment.run.seed, data)  # each trainer for itself: nodes share no disk that we know of
        if is_driven:
            _train_as_script(experiment, data)
            return {}
        return _train_leg(_as_started(experiment), data, keep_times=keep_times)


def _as_started(experiment: Experiment) -> Experiment:
    """The experiment with the trainers that were started, and the recommended strategy where it asks for one."""
    num, cluster = fleet.worker_num(), experiment.cluster
    if num != cluster.trainers:
        if fleet.is_first_worker():
            _say(f"note: {num} trainers were started, not the {cluster.trainers} of [cluster]")
        per_node = role_of(os.environ).trainers_per_node or 1
        cluster = dataclasses.replace(cluster, nodes=num // per_node, trainers_per_node=per_node, node_overrides=())
    strategy = experiment.strategy
    if strategy.auto:
        workload = experiment.workload
        strategy = _job().recommended(build_model(workload.model, workload.model_options, workload.dtype, experiment.run.seed))
    if is_emulated(experiment):
        refuse_unemulated(experiment, strategy)
    return experiment.replace(cluster=cluster, strategy=strategy)


def _train_leg(experiment: Experiment, data: Path, *, keep_times: bool) -> dict[str, Any]:
    """The leg of ``fleetbench real``; evaluated where the file has a target, because each evaluation keeps a copy of the model."""
    workload, run = experiment.workload, experiment.run
    profile = Profile.load(workload.profile) if workload.profile is not None else None
    evaluates = workload.target_loss is not None
    leg = Leg(strategy=experiment.strategy, steps=workload.steps, warmup_steps=run.warmup_steps, start="initial", evaluate=evaluates)
    training = training_of(experiment, profile, data, _job().communicators)
    log = _Log(training.steps_per_epoch, keep_times=keep_times)
    training.on_engine = log.follow
    try:
        part = training.run(leg, lambda _step: log.read())
    finally:
        training.close()
    log.read()
    if fleet.is_first_worker() and evaluates:
        for step, loss in part["held_out"]:
            _say(f"[Step {step}] held-out loss: {loss:.5f}")
        _say(f"held-out loss: {part['final_loss']:.5f}")
    fleet.barrier_worker()
    return part


def _job() -> Collective:
    """The part that ``fleet`` has in the job, of which a script needs no more than ``fleet`` offers."""
    job = fleet._joined("train")  # noqa: SLF001  # as said
    if not isinstance(job, Collective):
        hint = "give a script of your own, whose processes are servers and trainers: --print FORM EXPERIMENT.toml -- train.py"
        raise ConfigError("an experiment's own workload is trained by collectives alone", "strategy.mode", "'ps'", hint)
    return job


class _Log:
    """The training log of counted steps, each once its loss has been read."""

    def __init__(self, steps_per_epoch: int | None, *, keep_times: bool) -> None:
        self._log = TrainingLog(LOG_EVERY) if fleet.is_first_worker() else None
        self._steps_per_epoch = steps_per_epoch
        self._keep_times = keep_times
        self._stopwatch = Stopwatch(0)
        self._num_read = 0

    def follow(self, engine: LegEngine) -> None:
        """The leg's engine is this."""
        assert isinstance(engine, Engine)
        _job().use(engine)  # so that a failure is announced with its step
        self._stopwatch = engine.stopwatch

    def read(self) -> None:
        """Print, and forget, the steps that are over."""
        for timed in self._stopwatch.steps[self._num_read :]:
            step, loss = timed.record.step, timed.record.loss
            if self._log is not None and step >= 1:
                self._log.report({} if loss is None else {"loss": loss})
                if self._steps_per_epoch is not None and step % self._steps_per_epoch == 0:
                    self._log.end_epoch()
        if self._keep_times:
            self._num_read = len(self._stopwatch.steps)
        else:
            self._stopwatch.steps.clear()
            self._stopwatch.spans.clear()


def _train_as_script(experiment: Experiment, data: Path) -> None:
    """Fleet's four lines, and the usual loop."""
    workload, run = experiment.workload, experiment.run
    if is_emulated(experiment):
        hint = "tune it without a launcher, which starts emulated trainers itself"
        raise ConfigError("a driver of scripts measures what computes", "run.device", repr(run.device), hint)
    if experiment.cluster.stragglers and fleet.is_first_worker():
        _say("note: cluster.stragglers are not injected: a tuning of a script measures those that there are")
    device = device_of(run.device)
    model = fleet.distributed_model(build_model(workload.model, workload.model_options, workload.dtype, run.seed).to(device))
    refuse_dense_optimizer(model, workload)
    optimizer = fleet.distributed_optimizer(make_optimizer(model, workload))
    compare = loss_of(workload.model)
    sampler = sampler_of(experiment, data, fleet.worker_num(), fleet.worker_index())
    batches = open_batches(workload, data, sampler, device.type)
    try:
        for step in range(1, workload.steps + 1):
            set_learning_rate(optimizer, workload, step)
            inputs, labels = (tensor.to(device, non_blocking=True) for tensor in batches.batch(step - 1))
            loss = compare(model(inputs), labels)
            fleet.report(loss=loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % sampler.steps_per_epoch == 0:
                fleet.end_epoch()
    finally:
        batches.close()
    fleet.synchronize()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  # the worker's log


if __name__ == "__main__":
    try:
        train(Experiment.load(sys.argv[1], sys.argv[2:]))
    except FleetbenchError as error:
        if os.environ.get(TUNING):  # whose driver hears of what nobody catches
            raise
        _say(f"error: {error}")
        sys.exit(error.exit_code)
