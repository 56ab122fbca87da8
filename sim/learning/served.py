"""Virtual trainers of parameter servers: they pull, push and apply in the order of a simulated or a real job.

Links and stragglers decide which parameters a gradient is computed from, and in which order servers apply it,
so the clock comes first here. ``sim.servers`` records the order of a simulated job, and needs no losses. A
``ServedReplay`` follows an order with real parameters, data and gradients.
``fleetbench.workloads.server_updates`` defines the effect of a push, a delta or a pull, as it does for real
servers.
"""

import contextlib
import dataclasses
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import nn

from fleetbench.declared import learning_rate
from fleetbench.experiment import Experiment
from fleetbench.quantities import counted
from fleetbench.target import crossing
from fleetbench.workloads.models.registry import build_model
from fleetbench.workloads.server_updates import (
    DTYPES,
    Array,
    Change,
    GeoCopy,
    Layout,
    ParameterShard,
    add_changes,
    options_for,
    part_of,
    shard_rows,
    views_of,
)
from fleetbench.workloads.training import refuse_dense_optimizer, sparse_embeddings, sparse_weights
from sim.learning.gradients import Problem, Tensors
from sim.learning.prepared import Look, Prepared, Progress, Say, never, refuse_beyond
from sim.learning.trajectory import Trajectory, key_of, learnt_from
from sim.servers.actor import Act, Job, Order
from sim.servers.simulate import execute, job_of
from sim.servers.traffic import KnownRows, LookUps


class Played(NamedTuple):
    """A job, and the order of its acts."""

    job: Job
    order: Order

    @classmethod
    def of(cls, experiment: Experiment, look: Look = never) -> Self:
        """Simulate a job, and return it with the order of its acts.

        ``look`` is called repeatedly, and may raise. Raises ``ConfigError`` for what cannot be simulated or
        trained.
        """
        job, order = served_job(experiment, look), Order()
        execute(job, order=order, step_done=look)
        return cls(job, order)


def served_job(experiment: Experiment, look: Look = never) -> Job:
    """Return the job of an experiment.

    With sparse embeddings, the data determine the sizes of its messages.
    """
    learnt = learnt_from(experiment)
    workload = learnt.workload
    model = build_model(workload.model, workload.model_options, workload.dtype, learnt.run.seed)
    if not sparse_weights(model):
        return job_of(experiment)
    with tempfile.TemporaryDirectory(prefix="fleetbench-learning-") as folder:
        found = _look_ups(Prepared(learnt, Path(folder)), learnt, look)
    shards = _layout(model).shards(experiment.cluster.servers)
    traffic = KnownRows(servers=shards.servers, shards=shards, itemsize=DTYPES[workload.dtype].itemsize, look_ups=found)
    return job_of(experiment, traffic=traffic)


@torch.no_grad()
def _look_ups(data: Prepared, learnt: Experiment, look: Look) -> LookUps:
    """Return the rows that all trainers' forwards read, found by running a model that is not trained."""
    layout = _layout(data.model)
    under_way: list[tuple[int, np.ndarray[Any, np.dtype[np.int64]]]] = []

    def note(number: int, _module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        under_way.append((number, np.unique(inputs[0].numpy())))  # no module of the registry's models reads another's table

    for module in sparse_embeddings(data.model):
        module.register_forward_pre_hook(partial(note, layout.table_of(module.weight)))
    trainers, batch_size = learnt.cluster.trainers, learnt.workload.batch_size
    found: list[list[tuple[Any, ...]]] = [[] for _ in range(trainers)]
    with contextlib.closing(data.batches):
        for position in range(learnt.run.warmup_steps + learnt.workload.steps):
            inputs, _ = data.batches.batch(position)
            for rank, own in enumerate(inputs.split(batch_size)):
                under_way.clear()
                look()
                data.model(own)
                found[rank].append(tuple(under_way))
    return tuple(map(tuple, found))


def _layout(model: nn.Module) -> Layout:
    return Layout(dict(model.named_parameters()), sparse_weights(model))


@dataclasses.dataclass(slots=True, kw_only=True)
class _Trainer:
    """State of a trainer and its sender: between two steps, or after the forward of step ``index``."""

    flat: torch.Tensor
    """Dense parameters as one vector: in GeoSGD the trainer's own copy, as in ``tables``, otherwise the last
    pulled ones."""
    tables: Tensors
    """Embedding tables; except in GeoSGD, scratch space of all trainers, because rows are looked up before
    each forward."""
    buffers: Tensors
    geo: GeoCopy | None
    pushed: list[deque[Change]]
    """Pushes in flight, by server."""
    pulled: dict[int, list[Array]] = dataclasses.field(default_factory=dict)
    """Last answer to a pull, by server."""
    queue: deque[Change] = dataclasses.field(default_factory=deque)
    """Gradients that the sender has not taken yet."""
    index: int = 0
    """Index of the step under way."""
    gradients: tuple[torch.Tensor | None, ...] = ()
    rows: list[tuple[int, torch.Tensor, Array]] = dataclasses.field(default_factory=list)
    """Rows that the next forward reads, as the table's number, the rows' numbers and their values."""
    num_answers: list[int] = dataclasses.field(default_factory=list)
    """Number of look-ups in this step that each server has answered."""


class ServedReplay:
    """A training run that follows a given order of acts.

    Life cycle: created (data are prepared, memory is checked), ``run``.
    """

    def __init__(self, experiment: Experiment, played: Played, folder: Path, say: Say = lambda _: None, look: Look = never) -> None:
        self._begin_s = time.perf_counter()
        self.key = key_of(experiment, played.order)
        self._learnt = learnt = learnt_from(experiment)
        self._job, self._order = played
        self._geo = self._job.rules.mode == "geo_sgd"
        self._look = look
        self._data = data = Prepared(learnt, folder)
        workload, cluster = learnt.workload, learnt.cluster
        refuse_dense_optimizer(data.model, dataclasses.replace(workload, optimizer="sgd"))  # servers accept sparse gradients with any
        self._layout = layout = _layout(data.model)
        self.shards = layout.shards(cluster.servers)
        self._problem = Problem(model=data.model, compare=data.compare, trainers=cluster.trainers, shares=False, averages=False)
        self._batch = lru_cache(maxsize=64)(data.batches.batch)  # trainers are at nearby steps
        self.num_bytes = self._expected_bytes()
        refuse_beyond(cluster.trainers, self.num_bytes)
        say(f"{counted(cluster.trainers, 'virtual trainer')} take {self.num_bytes / 1e6:.3g} MB")
        self._flat, self._tables = layout.flat, layout.tables
        self.servers = [self._shard(server) for server in range(cluster.servers)]
        self._trainers = [self._trainer() for _ in range(cluster.trainers)]
        self._losses = np.zeros((len(self._job.steps), cluster.trainers))
        self._sums: dict[int, torch.Tensor] = {}
        """Sum of trainers' evaluated vectors by step, until all trainers have ended that step."""
        self._held_out_losses: list[tuple[int, float]] = []

    def _expected_bytes(self) -> int:
        """Return the peak memory without activations: copies, gradients in flight, and the servers' state."""
        layout, rules = self._layout, self._job.rules
        dense, tables = layout.flat.nbytes, sum(table.nbytes for table in layout.tables)
        own = 4 * (dense + tables) if self._geo else dense * (3 + rules.pushes_in_flight + min(rules.room, len(self._job.steps)))
        return rules.trainers * own + 5 * (dense + tables)

    def _shard(self, server: int) -> ParameterShard:
        workload = self._learnt.workload
        shard = ParameterShard(self.shards, server, DTYPES[workload.dtype], options_for(workload), self._job.rules.readers)
        shard.install([view.numpy() for view in views_of(self.shards, server, self._flat, self._tables)])
        return shard

    def _trainer(self) -> _Trainer:
        flat, tables = self._flat.clone(), [table.clone() for table in self._tables] if self._geo else self._tables
        servers = self.shards.servers
        return _Trainer(
            flat=flat,
            tables=tables,
            buffers=[buffer.clone() for buffer in self._data.model.buffers()],
            geo=GeoCopy(flat, tables, self.shards) if self._geo else None,
            pushed=[deque() for _ in range(servers)],
            num_answers=[0] * servers,
        )

    def run(self, progress: Progress | None = None, until: float | None = None) -> Trajectory:
        """Train to the last act, or ``until`` a held-out loss is reached, and evaluate the servers' state."""
        total, done = self._losses.size, 0
        with contextlib.closing(self._data.batches):
            for act in self._order.acts:
                getattr(self, f"_{act.role}_{act.kind}")(act)
                if act.kind != "forward":
                    continue
                done += 1
                if progress is not None:
                    progress(done, total)
                if crossing(self._held_out_losses, until) is not None:
                    break
            self._look()
            final_loss = self._data.held_out.loss(self.evaluated())
        return Trajectory(
            key=self.key if until is None else f"{self.key} until {until:g}",
            workload=self._learnt.workload,
            first_step=self._job.steps.start,
            losses=self._losses,
            observed={},
            held_out=tuple(self._held_out_losses),
            final_loss=final_loss,
            local_steps=(),
            steps_per_epoch=self._data.steps_per_epoch,
            way="loop",
            num_bytes=self.num_bytes,
            seconds=time.perf_counter() - self._begin_s,
        )

    def evaluated(self) -> torch.Tensor:
        """Return the vector that an evaluation needs: the servers' parameters, and the mean of trainers' buffers."""
        buffers = [torch.stack(of_all).to(torch.float64).mean(0) for of_all in zip(*(one.buffers for one in self._trainers), strict=True)]
        return self._vector(*self.held(), buffers)

    def held(self) -> tuple[torch.Tensor, Tensors]:
        """Return the servers' current dense parameters and tables."""
        flat, tables = torch.empty_like(self._flat), [torch.empty_like(table) for table in self._tables]
        for shard in self.servers:
            for view, array in zip(views_of(self.shards, shard.server, flat, tables), shard.arrays, strict=True):
                view.copy_(torch.from_numpy(array))
        return flat, tables

    def _vector(self, flat: torch.Tensor, tables: Tensors, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
        kept = [own for own, buffer in zip(buffers, self._data.model.buffers(), strict=True) if buffer.is_floating_point()]
        return torch.cat([value.reshape(-1).to(flat.dtype) for value in (*self._layout.parameters(flat, tables), *kept)])

    # Effects of acts: one method for each role and kind

    def _trainer_forward(self, act: Act) -> None:
        """Compute a step's forward and backward.

        The gradient then waits for the sender or, in GeoSGD, for the trainer's own update.
        """
        one, batch_size = self._trainers[act.rank], self._learnt.workload.batch_size
        for table, rows, values in one.rows:
            one.tables[table][rows] = torch.from_numpy(values)
        one.rows.clear()
        one.num_answers = [0] * self.shards.servers
        mine = slice(act.rank * batch_size, (act.rank + 1) * batch_size)
        inputs, labels = (joint[mine] for joint in self._batch(one.index))
        own = [value.detach().requires_grad_() for value in self._layout.parameters(one.flat, one.tables)]
        self._look()
        output, buffers = self._problem.forward(own, one.buffers, inputs)
        loss = self._problem.compare(output, labels)
        gradients = torch.autograd.grad(loss, own, allow_unused=True)
        one.buffers = [buffer.detach() for buffer in buffers]
        self._losses[one.index, act.rank] = loss.item()
        if self._geo:
            one.gradients = gradients
        else:
            one.queue.append(dataclasses.replace(self._layout.change(gradients), rate=self._rate(one)))

    def _rate(self, one: _Trainer) -> float:
        return learning_rate(self._learnt.workload, self._job.steps[one.index]) * self._learnt.strategy.lr_scale

    @torch.no_grad()
    def _trainer_update(self, act: Act) -> None:
        """Apply a trainer's own step of SGD in GeoSGD."""
        one = self._trainers[act.rank]
        assert one.geo is not None
        rate, decay = self._rate(one), self._learnt.workload.weight_decay
        for value, gradient in zip(self._layout.parameters(one.flat, one.tables), one.gradients, strict=True):
            if gradient is not None:
                value.add_(gradient.add(value, alpha=decay) if decay else gradient, alpha=-rate)  # as torch.optim.SGD
        one.geo.mark(self._layout.touched(one.gradients))
        self._trainer_skip(act)

    def _trainer_skip(self, act: Act) -> None:
        one, workload = self._trainers[act.rank], self._learnt.workload
        step = self._job.steps[one.index]
        one.index += 1
        if step >= 1 and step % workload.eval_every == 0:
            vector = self._vector(one.flat, one.tables if self._geo else self.held()[1], one.buffers)
            self._sums[step] = vector if step not in self._sums else self._sums[step] + vector
            if all(other.index >= one.index for other in self._trainers):
                self._look()
                self._held_out_losses.append((step, self._data.held_out.loss(self._sums.pop(step) / len(self._trainers))))

    def _sender_merge(self, act: Act) -> None:
        one = self._trainers[act.rank]
        staged = add_changes([one.queue.popleft() for _ in range(act.num)]) if one.geo is None else one.geo.take(act.divisor)
        for server, line in enumerate(one.pushed):
            line.append(part_of(staged, self.shards, server))

    def _sender_install(self, act: Act) -> None:
        one = self._trainers[act.rank]
        for server, answer in one.pulled.items():
            dense, *rest = map(torch.from_numpy, answer)
            if one.geo is None:
                one.flat[self.shards.dense_part(server)] = dense
            else:
                one.geo.merge(server, dense, list(zip(rest[::2], rest[1::2], strict=True)))

    def _server_update(self, act: Act) -> None:
        """Update a server by one trainer's push or, if ``act.of`` is ``None``, by all pushes that have arrived."""
        came = self._trainers if act.of is None else [self._trainers[act.of]]
        lines = [one.pushed[act.rank] for one in came]
        self.servers[act.rank].update([line.popleft() for line in lines if line], act.divisor)

    def _server_accumulate(self, act: Act) -> None:
        assert act.of is not None
        push = self._trainers[act.of].pushed[act.rank].popleft()
        self.servers[act.rank].accumulate(push)
        self.servers[act.rank].mark(act.of, push)

    def _server_parameters(self, act: Act) -> None:
        assert act.of is not None
        self._trainers[act.of].pulled[act.rank] = self.servers[act.rank].parameters(act.of)

    def _server_rows(self, act: Act) -> None:
        assert act.of is not None
        assert isinstance(self._job.traffic, KnownRows)
        one = self._trainers[act.of]
        table, wanted = self._job.traffic.look_ups[act.of][one.index][one.num_answers[act.rank]]
        one.num_answers[act.rank] += 1
        own, rows = shard_rows(torch.from_numpy(wanted), self.shards.servers, act.rank)
        one.rows.append((table, rows, self.servers[act.rank].tables[table][own]))
