"""Training without a clock: the protocol of ``fleetbench.plan.drive`` over all replicas."""

import contextlib
import dataclasses
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fleetbench.experiment import Experiment
from fleetbench.plan.build import Plan, Setting, build_plan
from fleetbench.plan.combination import Combination
from fleetbench.plan.drive import Wanted, events_of, tell
from fleetbench.plan.events import DataEnd, Event, StepBegin
from fleetbench.plan.layers import Gradient
from fleetbench.plan.replay import Decider
from fleetbench.plan.state import closed_round
from fleetbench.plan.training import family
from fleetbench.quantities import Nanoseconds, counted
from fleetbench.target import crossing
from fleetbench.workload import OPTIMIZER_STATE
from fleetbench.workloads.training import refuse_dense_optimizer, sparse_weights
from sim.learning.gradients import Chosen, Problem, fastest
from sim.learning.prepared import Look, Prepared, Progress, Say, densely, free_bytes, never, one_thread, refuse_beyond
from sim.learning.replicas import Replicas, expected_bytes, sharing
from sim.learning.served import Played, ServedReplay
from sim.learning.trajectory import Trajectory, key_of, learnt_from


def train(
    experiment: Experiment,
    progress: Progress | None = None,
    *,
    say: Say = lambda _: None,
    played: Played | None = None,
    until: float | None = None,
    at_least: int = 0,
    look: Look = never,
) -> Trajectory:
    """Train an experiment's trainers as ``fleetbench real`` would: same parameters, same order of data.

    Computes on one thread of the CPU, or, without parameter servers, on a GPU if ``run.device`` asks for one
    and there is one.

    Args:
        experiment: the experiment to train.
        progress: called with the number of steps done, and the number of all steps.
        say: called with a message about the memory needed.
        played: the order of acts with parameter servers, if it is known; otherwise it is simulated first.
        until: a held-out loss that ends training when it is reached, by the rule of ``workload.target_loss``.
            With collectives, the trajectory is then that of an experiment with as many steps as were made.
        at_least: number of steps to train in any case, with collectives.
        look: called before each trainer's batch, or once for all that compute at once, and before an
            evaluation; it may raise.

    Raises:
        ConfigError: virtual trainers do not execute the workload or strategy, or memory does not suffice.
    """
    with one_thread(), tempfile.TemporaryDirectory(prefix="fleetbench-learning-") as folder:
        if experiment.strategy.mode == "ps":
            return ServedReplay(experiment, played or Played.of(experiment, look), Path(folder), say, look).run(progress, until)
        found = VirtualTraining(experiment, Path(folder), say=say, look=look).run(progress, until, at_least)
    torch.cuda.empty_cache()  # another process uses the GPU next
    return found


class VirtualTraining:
    """One training run. Life cycle: created (data are prepared, memory is checked), ``run``."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        way: str | None = None,
        say: Say = lambda _: None,
        device: str = "cpu",
        look: Look = never,
    ) -> None:
        """``way`` is ``loop`` or ``graph`` on ``device``; default: the faster one on the experiment's device."""
        self._begin_s = time.perf_counter()
        self.key = key_of(experiment)
        if way is None and experiment.run.device == "cuda" and torch.cuda.is_available():
            device = "cuda"
        self._experiment = experiment = learnt_from(experiment)
        self._look = look
        look()
        data = Prepared(experiment, folder)
        self.steps_per_epoch, self._batches, self._held_out, model = data.steps_per_epoch, data.batches, data.held_out, data.model
        refuse_dense_optimizer(model, experiment.workload)
        self._strategy = family(experiment.strategy, _plan(experiment, model))
        self._decider = Decider.start(self._strategy, 0, first_step=1 - experiment.run.warmup_steps)
        densely(model)
        shares, averages = sharing(self._strategy.plan, self._strategy.combination)
        problem = Problem(
            model=model,
            compare=data.compare,
            trainers=experiment.cluster.trainers,
            shares=shares,
            averages=averages,
            amp=experiment.strategy.amp_configs if experiment.strategy.amp else None,
            look=look,
        )
        self._choose(problem, way, say, device)

    def _choose(self, problem: Problem, wanted: str | None, say: Say, device: str) -> None:
        """Make the replicas and choose how gradients are computed.

        Raises ``ConfigError`` if memory does not suffice.
        """
        workload, plan, what = self._experiment.workload, self._strategy.plan, self._strategy.combination
        inputs, labels = self._batches.batch(0)
        one = slice(workload.batch_size)  # cloned, because a slice holds the whole joint batch in memory
        activations = 2 * problem.activation_bytes(inputs[one].clone(), labels[one].clone())  # the backward makes as many again
        in_loop = expected_bytes(problem.model, workload, plan, what) + activations
        if wanted is None and in_loop > free_bytes(device):
            device = "cpu"
        at_once = in_loop + activations * (problem.trainers - 1)
        refuse_beyond(problem.trainers, at_once if wanted == "graph" else in_loop)
        taken, most = in_loop / 1e6, at_once / 1e6
        say(f"{counted(problem.trainers, 'virtual trainer')} take {taken:.3g} MB, or {most:.3g} MB where many compute at once")
        problem = dataclasses.replace(problem, model=problem.model.to(device))
        self.replicas = Replicas(problem.model, workload, plan, what)
        arguments = self.replicas.arguments(inputs, labels, self._loss_scale)
        if wanted is None:
            chosen = fastest(problem, arguments, workload.steps, may_stack=at_once <= free_bytes(device))
        else:
            chosen = Chosen(problem.loop if wanted == "loop" else problem.graph(*arguments), wanted, 0.0)
        self._way, self.way = chosen.way, chosen.name if device == "cpu" else f"{chosen.name} on {device}"
        self.num_bytes = at_once if chosen.name == "graph" else in_loop

    @property
    def _loss_scale(self) -> float:
        scale = self._decider.state.scale
        return 1.0 if scale is None else scale.value

    def run(self, progress: Progress | None = None, until: float | None = None, at_least: int = 0) -> Trajectory:
        """Train to the last step, or to the held-out loss ``until``, and average.

        At least ``at_least`` steps are trained.
        """
        workload, warmup, key = self._experiment.workload, self._experiment.run.warmup_steps, self.key
        losses, held_out, local_steps = [], [], []
        observed: dict[str, dict[int, float]] = {}
        steps = range(1 - warmup, workload.steps + 1)
        with contextlib.closing(self._batches):
            for position, step in enumerate(steps):
                before = self._decider.state
                for event in events_of(self._strategy.plan, step, self.steps_per_epoch):
                    self._tell(event, observed)
                    if isinstance(event, StepBegin):
                        self._look()
                        self.replicas.compute(self._way, *self._batches.batch(position), self._loss_scale)
                        losses.append(self.replicas.losses.to(torch.float64).cpu().numpy())
                local_steps.append(closed_round(before, self._decider.state))
                if step >= 1 and step % workload.eval_every == 0:
                    held_out.append((step, self._evaluated()))
                if progress is not None:
                    progress(position + 1, len(steps))
                if step >= at_least and crossing(held_out, until) is not None:
                    workload = dataclasses.replace(workload, steps=step)
                    key = key_of(self._experiment.replace(workload=workload))
                    break
        before = self._decider.state
        self._tell(DataEnd(), observed)
        local_steps[-1] = closed_round(before, self._decider.state) or local_steps[-1]
        return Trajectory(
            key=key,
            workload=workload,
            first_step=steps.start,
            losses=np.stack(losses),
            observed=observed,
            held_out=tuple(held_out),
            final_loss=self._evaluated(),
            local_steps=tuple(local_steps),
            steps_per_epoch=self.steps_per_epoch,
            way=self.way,
            num_bytes=self.num_bytes,
            seconds=time.perf_counter() - self._begin_s,
        )

    def _evaluated(self) -> float:
        self._look()
        return self._held_out.loss(self.replicas.evaluated())

    def _tell(self, event: Event, observed: dict[str, dict[int, float]]) -> None:
        if isinstance(event, StepBegin):
            by_update = self._strategy.combination.lr_counts_updates
            self.replicas.begin_step(self._decider.state.updates + 1 if by_update else event.step)
        for request in tell(self._decider, event, lambda: 0):
            if isinstance(request, Wanted):
                request.value = self.replicas.scalar(request.name)
                step = self._decider.state.step
                assert step is not None
                observed.setdefault(request.name, {})[step] = request.value
            else:
                for operation in request.operations:
                    self.replicas.run(operation)


def _plan(experiment: Experiment, model: nn.Module) -> Plan:
    """Return the real engine's plan, except for gradients' order of readiness, on which losses do not depend."""
    workload, cluster, sparse = experiment.workload, experiment.cluster, sparse_weights(model)
    gradients = [
        Gradient(name=name, numel=parameter.numel(), dtype=workload.dtype, sparse=name in sparse, ready=Nanoseconds(place))
        for place, (name, parameter) in enumerate(reversed(list(model.named_parameters())))
    ]
    setting = Setting(
        trainers=cluster.trainers,
        trainers_per_node=cluster.trainers_per_node,
        num_state_slots=len(Combination.of(experiment.strategy).slots(OPTIMIZER_STATE[workload.optimizer])),
        buffers_nbytes=sum(buffer.nbytes for buffer in model.buffers()),
    )
    return build_plan(experiment.strategy, gradients, setting)
