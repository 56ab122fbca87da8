"""ServedTraining: training of a user's model with parameter servers, through hooks of the model and its optimizer.

Life cycle: created with a model; ``attach_optimizer``; ``begin``, which joins the servers and starts the sender;
steps; ``finish``. A step begins with the model's forward and ends with ``optimizer.step()``, which hands the
gradients to the sender and waits as the mode requires. A forward of an embedding with sparse gradients first pulls
the rows that it reads. In GeoSGD, ``optimizer.step()`` updates the trainer's own model, which has all rows.
"""

import functools
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import zmq
from torch import nn
from torch.utils.hooks import RemovableHandle

from fleetbench.errors import ConfigError, WorkerFailed
from fleetbench.plan.build import Plan
from fleetbench.plan.events import BackwardEnd, DataEnd, Event, Flush, LookUp, Message, StepBegin
from fleetbench.plan.groups import world_of
from fleetbench.plan.operations import Operation
from fleetbench.plan.replay import Recording, RoleDecider
from fleetbench.plan.servers.rules import ServerRules, choice, rules_of
from fleetbench.plan.servers.states import TrainerState
from fleetbench.plan.servers.training import ServerTraining
from fleetbench.strategy import DistributedStrategy
from fleetbench.workloads.server_updates import ROW, Array, GeoCopy, Told, shard_rows
from fleetbench.workloads.training import sparse_embeddings
from real.compute.compute import apply_device_settings
from real.compute.living import living_hook
from real.engine.optimizers import hide, scale_rates
from real.engine.refusals import given_of, refuse_arguments, refuse_max_norm
from real.engine.stopwatch import Stopwatch
from real.servers.links import BEAT_S, Answer, Links, Options, text_of
from real.servers.parameters import VERSION, Parameters, Spec, fixed_options, join, options_of, rate_of, read_values, refuse_changes
from real.servers.sender import Sender


class ServedTraining:
    """Training of one trainer; see the module.

    Raises ``ConfigError`` for a model or optimizer that servers cannot train, and ``WorkerFailed`` naming a server or
    trainer that failed.
    """

    def __init__(self, model: nn.Module, strategy: DistributedStrategy, options: Options) -> None:
        self.model = model
        self.parameters = Parameters(model)
        self.on_step: Callable[[int], None] | None = None
        """Called with the number of each step that begins."""
        self.on_compute_end: Callable[[], None] | None = None
        """Called when the backward has ended, before its gradients are handed to the sender."""
        self.step = options.first_step - 1
        self.stopwatch = Stopwatch(options.number, options.keep_times, fetch_every=strategy.fetch_every_n_steps)
        self._strategy = strategy
        self._options = options
        self._optimizer: torch.optim.Optimizer  # from ``attach_optimizer`` on
        self._fixed: dict[str, object] = {}
        self._spec: Spec | None = None
        self._role: RoleDecider  # from ``begin`` on, as are both links
        self._geo: GeoCopy | None = None
        self._sender: Sender | None = None
        self._sender_links: Links
        self._links: Links
        """Connections of the trainer's own thread."""
        self._table = 0
        self._asked: list[tuple[Array, torch.Tensor]] = []
        """Rows of table ``_table`` in the current look-up, by server: as numbered on the server, and in the table."""
        self._is_for_step = False
        self._read: dict[int, int] = {}
        """Number of updates in the oldest parameters from each server that this step computes with, by server."""
        self._rest: list[Operation] = []
        """Operations that follow the update of a step in GeoSGD."""
        self._touched: list[torch.Tensor | None] = []
        self._update = ExitStack()
        """Callbacks for the end of an update, even one that raised. They restore gradients or learning rates, and let
        the sender merge."""
        self._told_bytes = 0
        self.has_ended = False
        """Whether this trainer has left its servers or was closed."""
        self._handles: list[RemovableHandle] = []
        self._open = ExitStack()
        """Resources that ``close`` releases."""

    @property
    def rules(self) -> ServerRules:
        """Rules of the job, known after ``attach_optimizer``."""
        assert self._spec is not None
        return self._spec.rules

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, told: Told | None = None) -> None:
        """Make ``optimizer.step()`` train through the servers.

        ``told``: name and options for the servers, if they differ from those of ``optimizer``. Raises ``ConfigError``
        for an optimizer that servers do not have.
        """
        name, options = told or options_of(optimizer, self.parameters)
        rules = rules_of(
            self._strategy,
            self._options.trainers,
            len(self._options.endpoints),
            optimizer=name,
            parameter_bytes=self.parameters.nbytes,
            memory_bytes=psutil.virtual_memory().total,
            has_dense=bool(self.parameters.dense),
        )
        if rules.mode != "geo_sgd":
            hint = "leave max_norm out, or train with GeoSGD (a_sync_configs.k_steps above 0), where trainers make the updates"
            refuse_max_norm(self.model, "as servers do not", hint)
        self._optimizer, self._fixed = optimizer, fixed_options(optimizer)
        self._spec = self.parameters.spec(rules, (name, options))
        self._handles = [self.model.register_forward_pre_hook(living_hook(self._before_forward))]

    def begin(self) -> None:
        """Join the servers and start the sender.

        All trainers take the servers' parameters, which are rank 0's unless the servers begin from a checkpoint.
        """
        if self._spec is None:
            raise ConfigError("there is no optimizer yet", "fleet.init_worker", hint="call fleet.distributed_optimizer first")
        if self._sender is not None:
            raise ConfigError("this trainer has joined already", "fleet.init_worker", hint="call it once")
        self.parameters.refuse_moved()
        with ExitStack() as opened:
            self._begin(self._spec, opened)
            self._open = opened.pop_all()
        self._told_bytes = self.bytes_sent  # bytes of the joining belong to no step
        if self._options.number == 0 and (chosen := choice(self._strategy, self.rules)) is not None:
            print(f"trainer 0: {chosen}", file=sys.stderr, flush=True)  # noqa: T201  # the trainer's log

    def _begin(self, spec: Spec, opened: ExitStack) -> None:
        rank, record, is_geo = self._options.number, self._options.record, self.rules.mode == "geo_sgd"
        opened.callback(apply_device_settings(self._strategy, torch.device("cpu")))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        opened.callback(context.term)
        self._sender_links = links = opened.enter_context(closing(Links(context, self._options)))
        versions = join(links, spec, self.parameters)
        self._links = opened.enter_context(closing(Links(context, self._options, are_up=True)))
        self._geo = GeoCopy(self.parameters.flat, self.parameters.tables, spec.shards) if is_geo else None
        self._role = RoleDecider.start(ServerTraining(self.rules), rank, record=record)
        if self._strategy.a_sync_configs.launch_barrier:
            links.ask_all("barrier")
        sender = Sender(links, spec, self.parameters, self._geo, rank=rank, record=record)
        self._sender = opened.enter_context(closing(sender))
        sender.versions = versions
        sender.start()
        self._hook()

    def flush(self, *, end: bool = False) -> None:
        """Push everything that is queued, and pull dense parameters; in GeoSGD, also the rows that others changed.

        ``end``: whether no step follows. Then every trainer must call it, and all leave with the servers' parameters.
        """
        with self.stopwatch.waits():
            self._tell(Flush())
        if end:
            self._count_sent()
            self.stopwatch.finish()  # what follows does not belong to the last step
            self.take_all()
            self.finish()

    def fetch(self) -> None:
        """Put all rows into the model as the servers hold them; call it after ``flush``.

        Training continues from them. In GeoSGD, the flush has pulled them into a copy, which replaces the model's
        parameters: changes that this trainer has not pushed are lost.
        """
        self._joined()
        if self._geo is not None:
            self._geo.give_up()
            return
        for number, table in enumerate(self.parameters.tables):
            self._look_up(number, torch.arange(len(table), device="cpu"))

    def take_all(self) -> None:
        """Give all trainers equal parameters, those of the servers, in every mode.

        Every trainer must call it, after its own ``flush``.
        """
        self.barrier()
        self.flush()
        self.fetch()
        self.barrier()

    def barrier(self) -> None:
        """Wait until all trainers that have not left call it."""
        self._ask("barrier")

    def save(self, folder: Path) -> None:
        """Let every server write its shard to ``folder``, on its own host.

        Raises ``WorkerFailed`` if one cannot.
        """
        errors = {answer.server: text_of(answer.tensors[0]) for answer in self._ask("save", str(folder).encode())}
        if unsaved := "; ".join(f"server {server}: {error}" for server, error in sorted(errors.items()) if error):
            hint = "look for room and the right to write on the servers' own hosts; training can go on"
            raise WorkerFailed(f"the checkpoint could not be written: {unsaved}", str(folder), hint=hint)

    def _ask(self, kind: str, *tensors: bytes) -> list[Answer]:
        """Send a request to all servers, and return their answers."""
        self._settled()
        return self._links.ask_all(kind, *tensors)

    # Methods that a leg of an experiment needs; ``real.engine.engine.Engine`` has them, too

    @property
    def num_updates(self) -> int:
        """Number of steps; each counts as one update, here or on the servers."""
        return self.step

    @property
    def plan(self) -> Plan:
        """Plan without collectives."""
        trainers = self._options.trainers
        return Plan(trainers=trainers, buckets=(), exchange=(), groups=(("world", world_of(trainers)),))

    def report(self, loss: torch.Tensor) -> None:
        """Do nothing: servers do not use the loss."""

    def end_epoch(self) -> None:
        """Do nothing: servers count no epochs."""

    def recordings(self) -> list[Recording]:
        """Return the recordings of the trainer's and the sender's roles; empty without ``record`` in the options."""
        assert self._sender is not None
        if not self._options.record:
            return []
        return [self._role.recording(), self._sender.role.recording()]

    @property
    def bytes_sent(self) -> int:
        """Number of bytes sent so far, heads included."""
        return self._sender_links.bytes_sent + self._links.bytes_sent

    def finish(self) -> None:
        """Push everything that is left, leave the servers, and release all resources."""
        self._joined()
        try:
            self._tell(DataEnd())
        finally:
            self.close()

    def close(self) -> None:
        """Release hooks, threads and sockets, in any state."""
        self.has_ended = True
        self._unhook()
        self._update.close()
        self._open.close()

    def _hook(self) -> None:
        self._unhook()
        self._handles = [
            self.model.register_forward_pre_hook(living_hook(self._before_forward)),
            self.model.register_forward_hook(living_hook(lambda model, *_: self.stopwatch.forward_ends() if model.training else None)),
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]
        if self._geo is not None:  # the trainer has all rows itself
            return
        for module in sparse_embeddings(self.model):
            if module.weight.requires_grad:
                look_up = living_hook(functools.partial(self._before_embedding, self.parameters.table_of(module.weight)))
                self._handles.append(module.register_forward_pre_hook(look_up, with_kwargs=True))

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_forward(self, model: nn.Module, _inputs: tuple[Any, ...]) -> None:
        self._joined()
        if model.training and not self._state.in_step:
            self._read = {}  # rows that an evaluation looked up earlier are not this step's
            self._begin_step()

    def _begin_step(self) -> None:
        if self._state.in_step:
            return
        self.parameters.refuse_moved()
        self.step += 1
        if self.parameters.dense:
            for server, version in enumerate(self._joined().versions):
                self._note_read(server, version)
        if self._options.keep_times and self.step == 1:
            self._ask("counts")
        self.stopwatch.begin_step(self.step)
        self._tell(StepBegin(self.step))
        if self.on_step is not None:
            self.on_step(self.step)

    def _before_step(self, _optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        refuse_arguments(given_of(arguments, named))
        self._begin_step()  # for a loop that makes its gradients without the model's forward
        if self.on_compute_end is not None:
            self.on_compute_end()
        self.stopwatch.backward_ends()
        self.stopwatch.update_begins()
        refuse_changes(self._optimizer, self._fixed)
        if self.rules.mode != "geo_sgd":
            change = self.parameters.gradients()
            change.rate = rate_of(self._optimizer) * self._strategy.lr_scale
            change.versions = np.array([[self._read.get(server, 0) for server in range(self.rules.servers)]], VERSION)
            self._joined().hand(change)
        self.stopwatch.update_ends()
        if self.rules.mode == "synchronous":  # in the other modes trainers do not wait for one another
            self.stopwatch.arrives()
        with self.stopwatch.waits():
            self._tell(BackwardEnd())
        self.stopwatch.update_begins()
        by_servers = self.rules.mode != "geo_sgd"
        self._update.callback(
            hide(list(self.parameters.named.values())) if by_servers else scale_rates(self._optimizer, self._strategy.lr_scale)
        )

    def _after_step(self, _optimizer: torch.optim.Optimizer, _arguments: tuple[Any, ...], _named: dict[str, Any]) -> None:
        self._update.close()
        self._read = {}
        self.stopwatch.update_ends()
        if self.rules.mode == "synchronous":
            self.stopwatch.closes_round(1)
        self._settled()
        self._count_sent()

    def _count_sent(self) -> None:
        """Add the bytes sent since the last call to the current step, or the one that has just ended."""
        sent = self.bytes_sent
        self.stopwatch.sends(sent - self._told_bytes)
        self._told_bytes = sent

    def _before_embedding(self, number: int, _module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._look_up(number, (inputs[0] if inputs else named["input"]).long(), is_for_step=torch.is_grad_enabled())

    @torch.no_grad()
    def _look_up(self, number: int, rows: torch.Tensor, *, is_for_step: bool = False) -> None:
        """Pull rows of a table. ``is_for_step``: whether gradients will be computed from them."""
        wanted = torch.unique(rows)
        if not len(wanted) or not 0 <= int(wanted[0]) <= int(wanted[-1]) < len(self.parameters.tables[number]):
            return  # for a row that is missing, the module's own forward raises torch's error
        self._table, self._is_for_step = number, is_for_step
        self._asked = [shard_rows(wanted, self.rules.servers, server) for server in range(self.rules.servers)]
        with self.stopwatch.waits():
            self._tell(LookUp())

    @property
    def _state(self) -> TrainerState:
        assert isinstance(self._role.state, TrainerState)
        return self._role.state

    def _settled(self) -> Sender:
        """Finish the last step, and return the sender.

        In GeoSGD, the rows of an update that raised are marked as well, because it may have changed some.
        """
        sender = self._joined()
        self._update.close()
        rest, self._rest = self._rest, []
        for operation in rest:
            self._execute(operation)
        return sender

    def _tell(self, event: Event) -> None:
        """Pass an event to the role, execute its decisions, and wait as long as the role does."""
        sender = self._settled()
        while (word := sender.hear()) is not None:
            self._decide(word)
        self._decide(event)
        while (awaited := self._state.waits) is not None:
            if awaited != "rows":
                self._decide(sender.await_word())
                continue
            sender.raise_failure()
            for answer in self._links.poll(BEAT_S):
                if answer.kind == "rows":
                    self._install_rows(answer)
                    self._decide(Message("server", answer.server, "rows", version=answer.version))

    def _decide(self, event: Event) -> None:
        operations = self._role.on(time.monotonic_ns(), event)
        for index, operation in enumerate(operations):
            if operation.kind == "update":  # the optimizer's own step, between its two hooks
                assert self._geo is not None
                self._update.enter_context(self._geo.guard)
                self._touched = self.parameters.touched([parameter.grad for parameter in self.parameters.named.values()])
                self._rest = list(operations[index + 1 :])
                return
            self._execute(operation)

    def _execute(self, operation: Operation) -> None:
        sender = self._joined()
        if operation.kind == "send" and operation.message == "look_up":
            none = np.zeros(0, ROW)
            for server, (own, _) in enumerate(self._asked):
                self._links.ask(server, "look_up", [own if other == self._table else none for other in range(len(self.parameters.tables))])
        elif operation.kind == "send" and operation.message == "leave":
            sender.close()  # the servers end after the last trainer, and so do the sender's connections
            self._ask("leave")
        elif operation.kind == "send":
            assert operation.message is not None
            sender.tell(operation.message, urgent=operation.message != "step" or self._state.queued >= self.rules.k_steps)
        elif operation.kind == "mark":
            assert self._geo is not None
            self._geo.mark(self._touched)
        else:
            assert operation.kind in ("wait", "skip", "install"), operation

    @torch.no_grad()
    def _install_rows(self, answer: Answer) -> None:
        table = self.parameters.tables[self._table]
        table.index_copy_(0, self._asked[answer.server][1], read_values(answer.tensors[self._table], table))
        if self._is_for_step:
            self._note_read(answer.server, answer.version)

    def _note_read(self, server: int, version: int) -> None:
        self._read[server] = min(version, self._read.get(server, version))

    def _joined(self) -> Sender:
        if self._sender is None:
            raise ConfigError("this trainer has not joined its servers", "fleet.init_worker", hint="call it before the first step")
        if self.has_ended:
            hint = "call it last: after it the model is this process's own, to be evaluated or saved"
            raise ConfigError("this trainer has left its servers", "fleet.stop_worker", hint=hint)
        return self._sender
