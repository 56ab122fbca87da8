"""Train: an experiment's own workload, under any launcher that ``fleet.init`` supports, or as one process.

``python -m real.workloads.train EXPERIMENT.toml [KEY=VALUE ...]`` trains one leg, as ``fleetbench real``
does: with warm-up, injected stragglers, emulated compute and evaluation as the file says. If a driver orders
legs, as a ``Session`` or the tuning of a command does, it trains these.
"""

import dataclasses
import os
import sys
from contextlib import closing, nullcontext
from typing import Any

import torch

from fleetbench.errors import ConfigError, FleetbenchError
from fleetbench.experiment import Experiment
from fleetbench.overview import overview
from fleetbench.plan.training import PLANNED
from fleetbench.profile import table_for
from fleetbench.strategy import DistributedStrategy
from fleetbench.support import refuse_unexecuted
from fleetbench.workload import LAYERS
from fleetbench.workloads.data.data import prepare
from fleetbench.workloads.models.registry import build_model, check_model
from real.collective import Collective
from real.emulated.emulated_training import EmulatedTraining
from real.emulated.model import EmulatedModel
from real.engine.engine import Engine
from real.job.folder import EXPERIMENT
from real.leg import Leg
from real.processes.place import temporary_folder
from real.processes.roles import TUNING
from real.supported import is_emulated, refuse_unemulated
from real.training import ComputedTraining, Training
from real.training_log import TrainingLog

LOG_EVERY = 20


def train(experiment: Experiment, *, keep_times: bool = False) -> dict[str, Any]:
    """Train the experiment, and return this rank's part of the leg as plain data.

    Rank 0 prints the training log. The result is empty if a driver orders legs. ``keep_times``: keep the
    times of every step, which are too many in a training of weeks. Raises ``ConfigError`` for an experiment
    that cannot be trained.
    """
    run = experiment.run
    # legs have strategies of their own
    timeout_s, startup_timeout_s = run.timeout * 1e-9, run.startup_timeout * 1e-9
    job = Collective(DistributedStrategy(), timeout_s, startup_timeout_s=startup_timeout_s, backend=run.backend, device=run.device)
    session = None if job.driven is None else job.driven.folder.path
    if session is None or not (session / EXPERIMENT).is_file():
        session = None
        _refuse(experiment)
    experiment = _as_started(experiment, job)
    if job.worker_index() == 0:
        print(overview(experiment.strategy, job.environment()), file=sys.stderr)  # noqa: T201  # as fleet.init does
    with temporary_folder() if session is None else nullcontext(session / "data") as data:
        if session is None and not is_emulated(experiment):
            # each trainer by itself, because nodes may not share a disk
            prepare(experiment.workload, run.seed, data)
        emulates, meets = is_emulated(experiment), job.communicators
        with closing(EmulatedTraining(experiment, meets) if emulates else ComputedTraining(experiment, data, meets)) as training:
            if job.driven is None:
                training.keep_times = keep_times
                return _train_leg(experiment, training, job)
            for _ in job.driven.orders(training):
                training.step()
    return {}


def _refuse(experiment: Experiment) -> None:
    """Raise ``ConfigError`` for an experiment that no script trains.

    The driver of a ``Session`` has checked its experiment before.
    """
    workload, strategy = experiment.workload, experiment.strategy
    if workload.model == LAYERS and not is_emulated(experiment):
        hint = 'set run.device = "emulated", or print the launch of a script of your own: --print FORM EXPERIMENT.toml -- train.py'
        raise ConfigError("a table of layers computes nothing", "workload.model", repr(LAYERS), hint)
    if not is_emulated(experiment):
        check_model(workload)
    if strategy.mode == "ps":
        what = "an experiment's own workload is trained only by collectives, not with parameter servers"
        hint = "give a script of your own, whose processes are servers and trainers: --print FORM EXPERIMENT.toml -- train.py"
        raise ConfigError(what, "strategy.mode", "'ps'", hint)
    if not strategy.auto:
        refuse_unexecuted(strategy, "strategy", PLANNED, "the real executor")


def _as_started(experiment: Experiment, job: Collective) -> Experiment:
    """Return the experiment with the trainers that were started, and the recommended strategy if it asks."""
    num, cluster = job.trainers, experiment.cluster
    if num != cluster.trainers:
        if job.worker_index() == 0:
            _say(f"note: {num} trainers were started, not the {cluster.trainers} of [cluster]")
        per_node = job.role.trainers_per_node or 1
        cluster = dataclasses.replace(cluster, nodes=num // per_node, trainers_per_node=per_node, node_overrides=())
    strategy = experiment.strategy
    if strategy.auto:
        strategy = job.recommended(_model(experiment))
    if is_emulated(experiment):
        refuse_unemulated(experiment, strategy)
    return experiment.replace(cluster=cluster, strategy=strategy)


def _model(experiment: Experiment) -> torch.nn.Module:
    if is_emulated(experiment):
        return EmulatedModel(table_for(experiment))
    workload = experiment.workload
    return build_model(workload.model, workload.model_options, workload.dtype, experiment.run.seed)


def _train_leg(experiment: Experiment, training: Training, job: Collective) -> dict[str, Any]:
    """Train the leg of ``fleetbench real``.

    Evaluate only if the file has a target, because each evaluation keeps a copy of the model.
    """
    workload, run, is_first = experiment.workload, experiment.run, job.worker_index() == 0
    evaluates = workload.target_loss is not None
    leg = Leg(strategy=experiment.strategy, steps=workload.steps, warmup_steps=run.warmup_steps, start="initial", evaluate=evaluates)
    training.log = TrainingLog(LOG_EVERY) if is_first else None

    def begin_step(_step: int) -> None:
        """Name the step in a failure's announcement."""
        assert isinstance(training.engine, Engine)
        job.use(training.engine)

    part = training.run(leg, begin_step)
    if is_first and evaluates:
        for step, loss in part["held_out"]:
            _say(f"[Step {step}] held-out loss: {loss:.5f}")
        _say(f"held-out loss: {part['final_loss']:.5f}")
    job.barrier()
    return part


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  # the worker's log


if __name__ == "__main__":
    try:
        train(Experiment.load(sys.argv[1], sys.argv[2:]))
    except FleetbenchError as error:
        if os.environ.get(TUNING):  # the driver reports an uncaught error
            raise
        sys.last_value = error  # exit handlers treat this as a failure
        _say(f"error: {error}")
        sys.exit(error.exit_code)
