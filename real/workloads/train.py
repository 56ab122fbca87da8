"""Train: an experiment's own workload, under any launcher that ``fleet.init`` understands, or alone.

``python -m real.workloads.train EXPERIMENT.toml [KEY=VALUE ...]`` trains one leg, that of ``fleetbench real``: with warm-up, injected
stragglers, emulated compute and evaluation as the file says. Under ``fleetbench tune`` or ``profile``, which order the legs, it is a
user's script.

``python -m real.workloads.train FOLDER`` is one rank of a ``Session``: it trains the experiment of FOLDER/spec.json in the legs that are
ordered in this folder, until the driver says stop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import traceback
import warnings
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fleetbench.config import decode
from fleetbench.errors import ConfigError, FleetbenchError
from fleetbench.experiment import Experiment
from fleetbench.fleet_names import FieldHasNoEffect
from fleetbench.profile import Profile
from fleetbench.workload import LAYERS
from fleetbench.workloads.data.data import open_batches, prepare
from fleetbench.workloads.models.registry import build_model, check_model, loss_of
from fleetbench.workloads.training import make_optimizer, refuse_dense_optimizer, sampler_of, set_learning_rate
from real.collective import Collective
from real.communication.benchmark import run_benchmark
from real.communication.communicators import Communicators
from real.communication.device import device_of
from real.emulated.emulated_training import EmulatedTraining
from real.emulated.support import is_emulated, refuse_unemulated
from real.engine.engine import Engine
from real.engine.stopwatch import Stopwatch
from real.fleet import fleet
from real.job.folder import RankPlace, RankSide
from real.leg import Leg
from real.processes.beats import BeatWriter
from real.processes.failures import rank_error
from real.processes.folders import temporary_folder
from real.processes.joining import join
from real.processes.place import Place
from real.processes.roles import TUNING, role_of
from real.training import ComputedTraining, Training
from real.training_log import TrainingLog

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
    workload, run, job = experiment.workload, experiment.run, _job()
    profile = Profile.load(workload.profile) if workload.profile is not None else None
    evaluates = workload.target_loss is not None
    leg = Leg(strategy=experiment.strategy, steps=workload.steps, warmup_steps=run.warmup_steps, start="initial", evaluate=evaluates)
    training = training_of(experiment, profile, data, job.communicators)
    log = TrainingLog(LOG_EVERY) if fleet.is_first_worker() else None
    stopwatch: Stopwatch | None = None
    num_read = 0

    def read_steps(_step: int = 0) -> None:
        """Print, and forget, the steps that are over."""
        nonlocal num_read, stopwatch
        if stopwatch is None:
            assert isinstance(training.engine, Engine)
            job.use(training.engine)  # so that a failure is announced with its step
            stopwatch = training.engine.stopwatch
        for timed in stopwatch.steps[num_read:]:
            step, loss = timed.record.step, timed.record.loss
            if log is not None and step >= 1:
                log.report({} if loss is None else {"loss": loss})
                if training.steps_per_epoch is not None and step % training.steps_per_epoch == 0:
                    log.end_epoch()
        num_read = len(stopwatch.steps)
        if not keep_times:
            num_read = 0
            stopwatch.steps.clear()
            stopwatch.spans.clear()

    with contextlib.closing(training):
        part = training.run(leg, read_steps)
    read_steps()
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
    with contextlib.closing(open_batches(workload, data, sampler)) as batches:
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
    fleet.synchronize()


def follow_orders(folder: RankSide, rank: int) -> None:
    """Join the other ranks of a session, and run the legs that its driver orders, until it says stop."""
    spec = json.loads((folder.path / "spec.json").read_text(encoding="utf-8"))
    experiment = Experiment.from_dict(spec["experiment"])
    profile = decode(spec["profile"], Profile, "profile") if spec["profile"] else None
    cluster, run = experiment.cluster, experiment.run
    beats = BeatWriter(folder.beats, rank)
    beats.beat(-1, 0)
    torch.set_num_threads(1)
    timeout = timedelta(microseconds=run.startup_timeout // 1000)
    join(role_of(os.environ), timeout, run.backend)
    communicators = Communicators(run.backend, timedelta(microseconds=run.timeout // 1000), device_of(run.device))
    communicators.barrier()
    folder.join(RankPlace(rank=rank, trainers=cluster.trainers, trainers_per_node=cluster.trainers_per_node, place=Place.here()))
    training: Training | None = None
    number = 0
    while (leg := folder.wait_for(number)) is not None:
        beats.beat(number, -leg.warmup_steps)
        on_step = partial(beats.beat, number)
        if leg.collectives is not None:
            part: dict[str, Any] = {"collectives": run_benchmark(leg.collectives, communicators, on_step)}
        else:
            training = training or training_of(experiment, profile, folder.path / "data", communicators)
            part = training.run(leg, on_step)
        beats.beat(number, leg.steps)
        folder.finish(number, rank, part | {"complete": True, "num_steps": leg.warmup_steps + leg.steps})
        number += 1
    if training is not None:
        training.close()
    communicators.barrier()
    communicators.close()
    dist.destroy_process_group()


def training_of(experiment: Experiment, profile: Profile | None, data: Path, communicators: Communicators) -> Training:
    """What trains on the experiment's device."""
    if is_emulated(experiment):
        return EmulatedTraining(experiment, profile, communicators)
    return ComputedTraining(experiment, profile, data, communicators)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  # the worker's log


def _work(folder: RankSide, rank: int) -> None:
    """Follow orders; an error is reported to the driver, and ends this process with code 1."""
    try:
        follow_orders(folder, rank)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # whatever it was, the driver must learn of it
        traceback.print_exc()
        with contextlib.suppress(OSError):  # the driver may have taken its folder away
            folder.fail(rank, asdict(rank_error(error)))
        sys.stderr.flush()
        os._exit(1)  # lanes may be stuck in a collective that nobody will answer


if __name__ == "__main__":
    if Path(sys.argv[1]).is_dir():
        _work(RankSide(Path(sys.argv[1])), int(os.environ["RANK"]))
    else:
        try:
            train(Experiment.load(sys.argv[1], sys.argv[2:]))
        except FleetbenchError as error:
            if os.environ.get(TUNING):  # whose driver hears of what nobody catches
                raise
            _say(f"error: {error}")
            sys.exit(error.exit_code)
