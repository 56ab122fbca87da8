"""Engine: executes a strategy's operations on a model and an optimizer, through their hooks.

The engine decides nothing: it counts gradients down, tells the strategy what happened, and runs
what the strategy answers. A step's life: ``idle`` -> ``forward`` (the model's forward begins it)
-> ``backward`` (gradient hooks complete buckets; at the end of the backward the gradients'
collectives are waited for, so that ``.grad`` holds averages when ``backward()`` returns) ->
``update`` (the optimizer's step, and behind it the operations that wait for it) -> ``idle``.

The first step's plan takes the gradients in reverse registration order; then rank 0's observed
order of readiness is broadcast, and the plan that all ranks build from it stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from fleetbench.errors import ConfigError
from fleetbench.plan.build import Plan, build_plan
from fleetbench.plan.events import BackwardEnd, BucketReady, DataEnd, Event, Flush, StepBegin
from fleetbench.plan.family import family
from fleetbench.plan.layers import Gradient
from fleetbench.plan.operations import COLLECTIVES, Operation, Operations, wire_bytes
from fleetbench.plan.protocol import State, closed_round
from fleetbench.plan.replay import Decider, Recording
from fleetbench.quantities import Nanoseconds
from fleetbench.strategy import DistributedStrategy
from real.buckets import DeltaBucket, FlatBucket
from real.communicators import Communicators
from real.lanes import Ticket
from real.stopwatch import Stopwatch


class Engine:
    """Runs one strategy on one model. Every rank makes and closes its engines in the same order.

    Raises ``ConfigError`` in a step in which a parameter gets no gradient, or gets two.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        strategy: DistributedStrategy,
        communicators: Communicators,
        *,
        first_step: int = 1,
        record: bool = False,
        keep_times: bool = True,
    ) -> None:
        self.model = model
        self.strategy = strategy
        self.communicators = communicators
        self.stopwatch = Stopwatch(communicators.rank, keep_times)
        self.step = first_step - 1
        self.on_step: Callable[[int], None] | None = None
        """Hears of every step as it begins."""
        self.on_compute_end: Callable[[], None] | None = None
        """Runs where the backward's computation ends, before anything is waited for."""
        self._record = record
        self._initial: State | None = None
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._phase = "idle"
        self._order: list[str] = []
        self._seen: set[str] = set()
        self._tickets: dict[int, Ticket] = {}
        self._behind_update: Operations = ()
        self._buckets: list[FlatBucket] = []
        communicators.require(strategy.nccl_comm_num)
        self._decider = self._decide(list(reversed(self._parameters)), None)
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(lambda *_: self._forward_begins()),
            model.register_forward_hook(lambda *_: self._forward_ends()),
            *(parameter.register_post_accumulate_grad_hook(self._on_gradient(name)) for name, parameter in self._parameters.items()),
        ]

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._decider.strategy.plan

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let ``optimizer.step()`` be the update."""
        self._handles.append(optimizer.register_step_pre_hook(lambda *_: self._update_begins()))
        self._handles.append(optimizer.register_step_post_hook(lambda *_: self._update_ends()))

    def flush(self, *, end: bool = False) -> None:
        """Make the trainers agree, as a model that is read must; ``end``: no step follows.

        What that takes belongs to the step done last.
        """
        operations = self._tell_of_round(DataEnd() if end else Flush())
        if operations:
            self._tickets.clear()
            self.stopwatch.update_begins()
            self._start(operations)
            self.stopwatch.update_ends()

    def recording(self) -> Recording | None:
        """This rank's events and operations since the plan was settled, where asked for."""
        if self._initial is None or self._decider.log is None:
            return None
        return Recording(self.plan, self.communicators.rank, self._initial, tuple(self._decider.log))

    def close(self) -> None:
        """Remove every hook, and let go of gradients that live in buckets."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    def _agree(self) -> None:
        """Start all ranks from rank 0's parameters and buffers."""
        if self.communicators.trainers > 1:
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                self.communicators.broadcast(tensor.detach())

    def _compare(self, plan: Plan) -> None:
        """Raise ``ConfigError`` on a rank whose plan is not rank 0's: its collectives would not match."""
        own = torch.tensor(list(bytes.fromhex(plan.digest)), dtype=torch.uint8)
        first = own.clone()
        if self.communicators.trainers > 1:
            self.communicators.broadcast(first)
        if not torch.equal(own, first):
            raise ConfigError(
                "plans another exchange than rank 0",
                f"rank {self.communicators.rank}",
                plan.digest,
                "give every rank the same model and strategy",
            )

    def _decide(self, order: Sequence[str], state: State | None) -> Decider:
        gradients = [
            Gradient(name=name, numel=self._parameters[name].numel(), dtype=_dtype(self._parameters[name]), ready=Nanoseconds(position))
            for position, name in enumerate(order)
        ]
        plan = build_plan(self.strategy, gradients, self.communicators.trainers)
        self._compare(plan)
        if state is None:
            self._agree()
        origin = {name: parameter.detach() for name, parameter in self._parameters.items()}
        for bucket in self._buckets:
            if isinstance(bucket, DeltaBucket):
                origin |= dict(zip(bucket.names, bucket.snapshot, strict=True))
        strategy = family(self.strategy, plan)
        self._buckets = []
        for item in plan.buckets:
            parameters = [self._parameters[name] for name in item.gradients]
            if strategy.payload == "delta":
                self._buckets.append(DeltaBucket(item, parameters, [origin[name] for name in item.gradients]))
            else:
                self._buckets.append(FlatBucket(item, parameters))
        self._bucket_of = {name: bucket.id for bucket in plan.buckets for name in bucket.gradients}
        if state is None:
            return Decider.start(strategy, self.communicators.rank, first_step=self.step + 1)
        return Decider(strategy, state, [] if self._record else None)

    def _forward_begins(self) -> None:
        if self._phase != "idle" or not torch.is_grad_enabled() or not self.model.training:
            return
        self._phase = "forward"
        self.step += 1
        self._seen.clear()
        self._tickets.clear()
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        self._next_bucket = 0
        self.stopwatch.begin_step(self.step)
        self._start(self._decider.on(time.monotonic_ns(), StepBegin(self.step)))
        if self.on_step is not None:
            self.on_step(self.step)

    def _forward_ends(self) -> None:
        if self._phase == "forward":
            self.stopwatch.forward_ends()

    def _on_gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(_parameter: torch.Tensor) -> None:
            if self._phase == "forward":
                self._phase = "backward"
                Variable._execution_engine.queue_callback(self._backward_ends)  # noqa: SLF001  # as DDP learns of the backward's end
            if self._phase != "backward" or name in self._seen:
                raise ConfigError(
                    "got a gradient outside its step, or twice in one", f"parameter {name}", hint="one backward for each optimizer.step()"
                )
            if _is_sparse(self._parameters[name]):
                raise ConfigError(
                    "has a sparse gradient, which is not executed yet", f"parameter {name}", hint="build the embedding with sparse=False"
                )
            self._seen.add(name)
            if self._initial is None:
                self._order.append(name)
            self._missing[self._bucket_of[name]] -= 1
            self._start_ready_buckets()

        return hook

    def _start_ready_buckets(self) -> None:
        while self._next_bucket < len(self._buckets) and self._missing[self._next_bucket] == 0:
            operations = self._decider.on(time.monotonic_ns(), BucketReady(self._next_bucket))
            self._next_bucket += 1
            if operations:
                self.stopwatch.arrives()
                self._start(operations)

    def _backward_ends(self) -> None:
        if self.on_compute_end is not None:
            self.on_compute_end()
        self.stopwatch.backward_ends()
        unused = sorted(set(self._parameters) - self._seen)
        if unused:
            raise ConfigError(
                "got no gradient in this step",
                f"parameters {', '.join(unused[:5])}",
                f"{len(unused)} of {len(self._parameters)}",
                "let the loss reach every parameter, or set requires_grad = False on those",
            )
        operations = self._tell_of_round(BackwardEnd())
        assert operations[0].kind == "update"
        assert set(operations[0].after) <= set(self._tickets), "the update waits for operations that nobody started"
        self._behind_update = operations[1:]
        self._phase = "update"
        if self._tickets:
            self._wait()
            for bucket in self._buckets:
                bucket.expose_gradients()
            self.stopwatch.stall_ends()

    def _update_begins(self) -> None:
        if self._phase in ("forward", "backward"):
            raise ConfigError("the optimizer steps before a backward has ended", "optimizer.step()", hint="call loss.backward() first")
        if self._phase == "update":
            self.stopwatch.update_begins()

    def _update_ends(self) -> None:
        if self._phase != "update":
            return
        self._tickets.clear()
        self._start(self._behind_update)
        self.stopwatch.update_ends()
        self._behind_update = ()
        self._phase = "idle"
        if self._initial is None:
            self._settle()

    def _start(self, operations: Operations) -> None:
        for operation in operations:
            if operation.kind in COLLECTIVES:
                self._collect(operation)
            elif operation.kind == "merge":
                self._merge()
            else:
                raise AssertionError(f"nothing executes {operation.kind}")

    def _collect(self, operation: Operation) -> None:
        assert operation.bucket is not None
        bucket = self._buckets[operation.bucket]
        if operation.payload == "delta":
            assert isinstance(bucket, DeltaBucket)
            bucket.pack_delta()
        else:
            bucket.pack_gradients()
        self.stopwatch.sends(wire_bytes(operation, self.communicators.trainers))
        step = self.step

        def run() -> None:
            with self.stopwatch.collective(operation, step):
                self.communicators.average(bucket.buffer, operation.communicator)

        after = [self._tickets[other] for other in operation.after if other in self._tickets]
        self._tickets[operation.id] = self.communicators.lane(operation.communicator).submit(run, after)

    def _merge(self) -> None:
        if not self._tickets:  # one trainer: its parameters are the average
            return
        self.stopwatch.stall_begins()
        self._wait()
        self.stopwatch.stall_ends()
        for bucket in self._buckets:
            assert isinstance(bucket, DeltaBucket)
            bucket.merge_delta()

    def _tell_of_round(self, event: Event) -> Operations:
        """Tell the strategy of an event that may close a round, and note the round's length."""
        before = self._decider.state
        operations = self._decider.on(time.monotonic_ns(), event)
        local_steps = closed_round(before, self._decider.state)
        if local_steps is not None:
            self.stopwatch.closes_round(local_steps)
        return operations

    def _wait(self) -> None:
        for ticket in self._tickets.values():
            ticket.wait()

    def _settle(self) -> None:
        """Plan again from rank 0's order of readiness, the same on all ranks."""
        names = list(self._parameters)
        order = torch.tensor([names.index(name) for name in self._order], dtype=torch.int64)
        if self.communicators.trainers > 1:
            self.communicators.broadcast(order)
        self._initial = self._decider.state
        self._decider = self._decide([names[index] for index in order.tolist()], self._initial)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_sparse(parameter: torch.nn.Parameter) -> bool:
    return parameter.grad is not None and parameter.grad.is_sparse
