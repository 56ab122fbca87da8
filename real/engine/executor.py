"""Executor: runs the operations of one plan on one model.

Collectives start on their communicators' lanes as soon as they are decided, each after the operations that it depends
on. Local operations run at once, after waiting for what they need.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from fleetbench.errors import ConfigError
from fleetbench.plan.drive import Decided, Requests, Wanted, started
from fleetbench.plan.operations import COLLECTIVES, Operation, Operations, wire_bytes
from fleetbench.plan.steps import exchanges_plainly
from fleetbench.plan.training import CollectiveTraining
from real.communication.communicators import Communicators
from real.communication.lanes import Flight, InlineLane, Joined, Started, Ticket, host_reads
from real.compute.mixed_precision import own_gradients, unscale
from real.compute.recompute import hold_statistics
from real.engine.buckets import DeltaBucket, ModelBuffers, Storage, Transfer
from real.engine.carried import Carried
from real.engine.gradients import Marks, are_same, marks_of
from real.engine.optimizers import Controls
from real.engine.refusals import refuse_apart
from real.engine.sparse import SparseBucket, gather_rows
from real.engine.stopwatch import Stopwatch


class Executor:
    """Executes the operations of one plan. Each new plan gets a new executor, with the old one's ``carried``."""

    buffers_from: Callable[[], int] | None = None
    """Announces a broadcast of buffers to trainers without data, and returns its source rank; None with even inputs."""

    def __init__(  # noqa: PLR0913  # what outlives a plan, one by one
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        strategy: CollectiveTraining,
        communicators: Communicators,
        stopwatch: Stopwatch,
        carried: Carried,
        optimizers: Sequence[torch.optim.Optimizer],
        buffers: ModelBuffers,
        *,
        known: Callable[[], Collection[int]],
    ) -> None:
        """Take ``carried`` and ``optimizers`` of the last plan or a checkpoint; ``known``: see ``OptimizerControl``."""
        self._known = known
        self.loss = carried.loss
        """Loss of the current step; None if it was not reported."""
        self._model = model
        self.combination = strategy.combination
        self._plan = strategy.plan
        self._communicators = communicators
        self._stopwatch = stopwatch
        self._parameters = parameters
        self._device = next(iter(self._parameters.values())).device
        self._inline = InlineLane() if self.combination.is_sequential else None
        self._buffers = buffers
        self._tickets: dict[int, Ticket] = {}
        self._flying: dict[int, Ticket] = {}
        """Tickets of the exchanges of distances in flight, by operation id; a fragment's lasts for several steps."""
        self._updates: list[Ticket] = []
        self._scalars: dict[str, torch.Tensor] = {}
        self._updates_now = False
        self._behind_update: Operations = ()
        self._requests: Requests = iter(())
        self._losses: Sequence[float] = ()
        self._taken: list[Marks] = []
        """Marks of each optimizer's gradients, taken after a backward in which updates ran; empty otherwise.
        ``begin_update`` checks that the gradients have not changed since."""
        self._release_statistics: Callable[[], None] | None = None
        self._row_bytes: list[int] = []
        self._used = set(carried.used)
        self._absent: set[str] = set()
        self._step = 0
        self.storage = Storage(
            self._plan,
            parameters,
            communicators,
            what=self.combination,
            gathers=self.combination.exchanges_gradients or self.combination.merges,
            origin=carried.origin if self.combination.is_local else None,
            sums=carried.sums,
            merged=carried.merged,
        )
        for delta in self.storage.deltas:
            delta.restore(carried.velocity, carried.landed, carried.residual)
        self._waiting = {bucket.id for bucket in self._plan.buckets if set(bucket.gradients) <= carried.landed.keys()}
        """Ids of buckets whose distances were packed and are not merged yet."""
        self.is_plain = exchanges_plainly(self._plan, self.combination)
        """Whether a ready bucket needs nothing but one all-reduce of its gradients; see ``start_plain``."""
        self._in_turn = communicators.in_turn if self.is_plain and any(one.after for one in self._plan.exchange) else None
        self._plain: list[Ticket] = []
        """Tickets of all-reduces in flight whose operations have no ids yet, by bucket."""
        self.attach(optimizers)

    @property
    def has_parted(self) -> bool:
        """Whether this trainer's parameters differ from the values that deltas are measured from.

        With one trainer, this is only possible under an outer optimizer, with fragments or among elastic workers.
        """
        return self._agrees and not all(delta.is_at_rest for delta in self.storage.deltas)

    @property
    def parts(self) -> bool:
        """Whether updates move this trainer's parameters away from the values that all trainers last agreed on."""
        return self.combination.is_local and self._agrees

    @property
    def _agrees(self) -> bool:
        """Whether what trainers agree on may differ from this trainer's own parameters."""
        return self._communicators.trainers > 1 or self.steps_outside or self.combination.elastic is not None

    @property
    def looks_for_unused(self) -> bool:
        """Whether the engine looks for parameters without a gradient in each backward."""
        return self.combination.finds_unused or self._merges_unused

    @property
    def _merges_unused(self) -> bool:
        """Whether the executor collects, over all steps of an update, which parameters were used.

        Within a single backward, the Reducer finds the unused ones.
        """
        return self.combination.merges and (self.combination.finds_unused or not self.combination.exchanges_gradients)

    @property
    def in_flight(self) -> set[str]:
        """Names of parameters whose distances were packed and are not merged yet."""
        return {name for delta in self.storage.deltas if delta.id in self._waiting for name in delta.names}

    @property
    def steps_outside(self) -> bool:
        """Whether trainers agree on something other than their parameters' plain average.

        They do so under an outer optimizer or with fragments.
        """
        return self.combination.outer is not None or self.combination.fragments is not None

    def averages(self) -> dict[str, torch.Tensor]:
        """Return the parameters that an averaging would give all trainers now, without changing any.

        Every rank calls it, between steps. With an outer optimizer or fragments, it returns what trainers last agreed
        on.
        """
        self._communicators.order_lanes()
        if self.steps_outside:
            return self.storage.snapshot()
        found: dict[str, torch.Tensor] = {}
        for delta in self.storage.deltas:
            delta.pack()
            self._communicators.all_reduce(delta.buffer, "mean")
            found.update(zip(delta.names, delta.averages(), strict=True))
        self._communicators.order_lanes()
        return found

    def carried(self) -> Carried:
        """Return the state for the next executor."""
        self._communicators.order_lanes()
        sums = self.storage.sums()
        merged = next((gradients.merged for gradients in self.storage.gradients), 0)
        landed = [delta for delta in self.storage.deltas if delta.id in self._waiting]

        def by_name(deltas: Iterable[DeltaBucket], kind: str) -> dict[str, torch.Tensor]:
            return {name: own for delta in deltas for name, own in zip(delta.names, getattr(delta, kind), strict=False)}

        return Carried(
            origin=self.storage.snapshot(),
            velocity=by_name(self.storage.deltas, "velocity"),
            landed=by_name(landed, "distances"),
            residual=by_name(self.storage.deltas, "residuals"),
            sums=sums,
            merged=merged if sums else 0,
            used=frozenset(self._used),
            loss=self.loss,
        )

    def attach(self, optimizers: Sequence[torch.optim.Optimizer]) -> int:
        """Control these optimizers, and return the largest number of state tensors that are averaged per parameter."""
        own = (self.storage, self._parameters, self._plan.num_state_slots, self._known)
        self._controls = Controls(optimizers, self.combination, *own)
        if self._communicators.workers is not None:
            self._communicators.workers.scale_lr(self._controls, self.combination.lr_scale)
        return self._controls.num_slots

    def begin_step(self, step: int, operations: Operations) -> None:
        """Begin a step with the operations of its ``StepBegin``."""
        self._step = step
        self.loss = None
        self.begin_again(operations)

    def forward_goes_on(self) -> None:
        """Begin another forward of the step, for which rank 0's buffers are sent, as in DDP."""
        if self._plan.buffers_nbytes and not self.combination.is_local:
            with self._stopwatch.waits():
                is_even = self.buffers_from is None
                nbytes = self._buffers.send(self._communicators, read=is_even, source=self._source_of_buffers())
            self._stopwatch.sends((self._communicators.trainers - 1) * nbytes // self._communicators.trainers)

    def send_buffers(self, source: int) -> None:
        """Take part in a broadcast of rank ``source``'s buffers."""
        self._buffers.send(self._communicators, source=source)

    def _source_of_buffers(self) -> int:
        return 0 if self.buffers_from is None else self.buffers_from()

    def begin_again(self, operations: Operations = ()) -> None:
        """Reset the exchange so that another can begin; the reported loss stays."""
        self.release_statistics()
        self._tickets.clear()
        self._plain.clear()
        self._updates.clear()
        if any(operation.kind == "hold" for operation in operations):
            self._release_statistics = hold_statistics(self._model)

    def begin_backward(self) -> None:
        """Note which parameters have no gradient yet, before a backward whose gradients are exchanged."""
        if self._merges_unused:
            self._absent = {name for name, parameter in self._parameters.items() if parameter.grad is None}

    def release_statistics(self) -> None:
        """Restore batch-norm statistics that were held during a forward and backward."""
        if self._release_statistics is not None:
            self._release_statistics()
            self._release_statistics = None

    def start(self, operations: Operations) -> None:
        """Run operations in order; collectives, and updates of single buckets, are only started."""
        for operation in operations:
            self._run(operation)

    def start_plain(self, bucket: int) -> None:
        """Start a bucket's all-reduce before reporting the bucket as ready to the strategy, whose answer is known.

        Each process group runs its all-reduces in the order of their starts. That is the plan's order on every rank,
        because the Reducer hands buckets over in that order, on one thread. If the plan has one in flight, all use one
        group that carries one at a time. On NCCL this is the communicator's own group, whose stream orders them; on
        gloo it has one thread, and shares no thread or connection with the groups of batch norm and of what follows the
        backward.
        """
        operation = self._plan.of_bucket[bucket][0]
        if bucket == len(self._plan.buckets) - 1:
            self._stopwatch.arrives()
        lane, transfer = self._communicators.lane(operation.communicator), self.storage.transfer("gradient", bucket)
        self._plain.append(lane.submit(self._flight(operation, transfer), ()))

    def note_plain(self, decided: Sequence[Operations]) -> None:
        """Take the strategy's answers to all buckets that ``start_plain`` has started."""
        for (operation,), ticket in zip(decided, self._plain, strict=True):  # one each, as ``is_plain`` says
            self._tickets[operation.id] = ticket
            self._stopwatch.sends(wire_bytes(operation, self._communicators.trainers))
        self._plain.clear()

    def end_backward(self, requests: Requests, unused: Sequence[str], scale: float) -> None:
        """Wait until ``.grad`` holds unscaled averages, and prepare the update; ``requests`` answer ``BackwardEnd``."""
        operations = started(requests)
        self.release_statistics()
        if self._merges_unused:
            self._used |= self._parameters.keys() - set(unused)
        closes = not any(operation.kind == "skip" for operation in operations)
        scales = self.combination.scales
        if scales and self.combination.is_local:
            self._scalars["found_inf"] = unscale(own_gradients(self._parameters.values()), scale, self._device)
        for operation in itertools.takewhile(lambda operation: operation.kind not in ("update", "skip"), operations):
            self._collect(operation)
        if self._tickets or self._updates:
            self.wait(self._tickets)
            for ticket in self._updates:  # whoever reads parameters or gradients from now on finds them complete
                ticket.wait()
            self._stopwatch.stall_ends()
        self._finish_rows()
        self._taken = self._marks() if self._updates else []
        if scales and not self.combination.is_local:
            self._scalars["found_inf"] = unscale(own_gradients(self._parameters.values()), scale, self._device)
        if closes:
            self._forget_unused()
        decided = operations
        if closes and scales:
            self._answer(next(requests))
            decided = started(requests)
        kinds = [operation.kind for operation in decided]
        local = next((index for index, kind in enumerate(kinds) if kind in ("update", "skip")), len(decided))
        self._updates_now = kinds[local : local + 1] == ["update"]
        self._behind_update, self._requests = decided[local + 1 :], requests

    def begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare a step of one of the user's optimizers."""
        place = self._controls.place(optimizer)
        if self._taken and not are_same(self._taken[place], self._marks()[place]):
            what = "gradients were changed after the backward, which has updated the parameters already"
            hint = "set it to true to clip or change gradients"
            raise ConfigError(what, "build_strategy.enable_backward_optimizer_op_deps", "false", hint)
        self._controls.refuse_shared()
        self._controls.each[place].begin(updates=self._updates_now or self.combination.leaves_averages)

    def end_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo ``begin_update``, after the step."""
        self._controls.each[self._controls.place(optimizer)].end()

    def finish_update(self) -> None:
        """Run the operations after the update, once the user's optimizers have stepped."""
        self._taken.clear()
        self._tickets.clear()
        self._count_update()
        behind, self._behind_update = self._behind_update, ()
        self._finish(behind, self._requests)

    def run_between(self, requests: Requests) -> bool:
        """Run operations that belong to no step, and return whether there were any."""
        operations = started(requests)
        if not operations:
            return False
        self._stopwatch.update_begins()
        self.begin_again()
        whole = (index for index, operation in enumerate(operations) if operation.kind == "update" and operation.bucket is None)
        update = next(whole, None)
        if update is not None:
            self.begin_backward()
            self.start(operations[:update])
            self.wait(self._tickets)
            self._finish_rows()
            self._forget_unused()
            self._controlled().step_between()
            self._updates_now = True
            self._count_update()
            self._tickets.clear()
            operations = operations[update + 1 :]
        self._finish(operations, requests)
        for ticket in self._updates:
            ticket.wait()
        if update is not None or self._updates:  # the user's loop has cleared gradients already, and would add to these
            for parameter in self._parameters.values():
                parameter.grad = None
        self._stopwatch.update_ends()
        return True

    def _count_update(self) -> None:
        """Count an update that belongs to the round of elastic workers, unless it was skipped."""
        if self._communicators.workers is not None and self._updates_now:
            self._communicators.workers.num_steps += 1

    def _marks(self) -> list[Marks]:
        """Return marks of each optimizer's gradients; with a single optimizer, they are taken by bucket."""
        held = self._controls.held()
        buckets = [bucket.values for bucket in self.storage.gradients] if len(held) == 1 else None
        return [marks_of(parameters, buckets, self._device) for parameters in held]

    def _controlled(self) -> Controls:
        if not self._controls.optimizers:
            hint = "call it before training; updates by hand need gradients that are averaged in every step"
            raise ConfigError("there is no optimizer yet", "fleet.distributed_optimizer", hint=hint)
        return self._controls

    def _finish(self, operations: Operations, requests: Requests) -> None:
        self.start(operations)
        for request in requests:
            if isinstance(request, Wanted):
                self._answer(request)
            else:
                self._finish(request.operations, iter(()))

    def _answer(self, request: Decided | Wanted) -> None:
        """Set the value of a requested scalar, which is the same on every rank."""
        assert isinstance(request, Wanted)
        if request.name == "found_inf":
            with host_reads():
                request.value = float(self._scalars["found_inf"])
        elif request.name == "lr":
            request.value = self._mean_lr()
        else:
            request.value = math.fsum(self._losses) / len(self._losses)

    def _mean_lr(self) -> float:
        """Return the mean of the trainers' learning rates, and keep the losses that were exchanged with them."""
        rates: Sequence[float] = (self._controlled().lr,)
        if (agreement := self._scalars.pop("agreement", None)) is not None:
            with host_reads():
                places, rates, self._losses = agreement.reshape(-1, 3).T.tolist()
            refuse_apart([int(place) for place in places])
        return rates[0] if min(rates) == max(rates) else math.fsum(rates) / len(rates)

    def _run(self, operation: Operation) -> None:
        kind = operation.kind
        if kind in COLLECTIVES:
            self._collect(operation)
        elif kind in ("difference", "outer", "merge"):
            self._meet(operation)
        elif kind == "reset" and operation.payload == "state":
            self._controlled().reset()
        elif kind == "reset":
            self._used.clear()
            for gradients in self.storage.gradients:
                gradients.drop()
        elif operation.bucket is None:
            raise AssertionError(f"nothing executes {kind} here")
        elif kind == "accumulate":
            self.storage.gradients[operation.bucket].accumulate()
        elif kind == "release":
            self.storage.gradients[operation.bucket].release(operation.divisor)
        elif kind == "update":
            self._update_bucket(operation, operation.bucket)
        else:
            raise AssertionError(f"nothing executes {kind}")

    def _update_bucket(self, operation: Operation, bucket: int) -> None:
        gradients, controls = self.storage.gradients[bucket], self._controlled()

        def run() -> None:
            if isinstance(gradients, SparseBucket) and operation.after:
                gradients.finish()
            controls.step_some(self.storage.parameters[bucket])

        lane = self._inline or self._communicators.update_lane
        self._updates.append(lane.submit(run, self._after(operation)))

    def _collect(self, operation: Operation) -> None:
        tickets = self._flying if operation.payload == "delta" else self._tickets
        if operation.payload == "unused" and not self.combination.merges:
            tickets[operation.id] = Joined(self._after(operation))  # the Reducer exchanges the flags
            return
        if not self._communicators.part(operation.group):
            tickets[operation.id] = Joined(self._after(operation))  # this rank takes no part in it
            return
        flight = self._flight(operation, self._transfer(operation))
        self._stopwatch.arrives(of_average=operation.payload == "delta")
        self._stopwatch.sends(wire_bytes(operation, len(self._communicators.part(operation.group))) if operation.payload != "rows" else 0)

        lane = self._inline or self._communicators.lane(operation.communicator)
        tickets[operation.id] = lane.submit(flight, self._after(operation))

    def _flight(self, operation: Operation, transfer: Transfer | None) -> Flight:
        """Return an operation's collective, for a lane; without a ``transfer``, its data are packed now."""
        step = self._step
        timed = partial(self._stopwatch.collective, operation, step)
        work = self._work(operation) if transfer is None else partial(transfer.run, operation, timed)

        def run() -> None:
            with timed():
                work()

        def start() -> Started | None:
            if transfer is None or not transfer.is_plain:
                return None
            number, depth = (operation.communicator, self._plan.queue_depth) if self._in_turn is None else (self._in_turn, 1)
            return transfer.begin(number, operation.group, self._stopwatch.handed_over(operation, step, depth))

        return Flight(run, start)

    def _transfer(self, operation: Operation) -> Transfer | None:
        """Return the operation's transfer, packed before its first operation; None if there is no flat buffer."""
        payload, bucket = operation.payload, operation.bucket
        if payload not in ("gradient", "delta", "state"):
            return None
        assert bucket is not None
        transfer = self.storage.transfer(payload, bucket)
        if transfer.is_first(operation):
            if payload == "delta":
                self._waiting.add(bucket)
                self.storage.deltas[bucket].pack()
            elif payload == "state":
                self._controlled().pack_state(bucket, transfer.buffer)
        return transfer

    def _after(self, operation: Operation) -> list[Ticket]:
        return [tickets[other] for other in operation.after for tickets in (self._tickets, self._flying) if other in tickets]

    def _work(self, operation: Operation) -> Callable[[], object]:
        """Pack the data of a collective without a transfer, and return the function that its lane runs."""
        payload, communicators = operation.payload, self._communicators
        if payload == "rows":
            assert operation.bucket is not None
            sparse = self.storage.gradients[operation.bucket]
            assert isinstance(sparse, SparseBucket)
            sparse.pack()
            return lambda: self._row_bytes.append(gather_rows(sparse, operation, communicators))
        if payload == "buffers" and operation.kind == "broadcast":
            return partial(self._buffers.send, communicators, source=self._source_of_buffers())
        if payload == "buffers":
            self._buffers.pack()
            return lambda: self._buffers.run(operation, communicators)
        if payload in ("agreement", "loss"):
            own = self._scalars["own"] = self._agreement(operation)  # kept until the next one, because a lane reads it
            told = self._scalars["agreement"] = own.new_empty(own.numel() * communicators.trainers)
            return lambda: communicators.all_gather(told, own, operation.group, operation.communicator)
        assert payload is not None
        if payload == "unused":
            flags = [1 if name in self._used else 0 for name in self._parameters]
            own = torch.tensor(flags, dtype=torch.uint8, device="cpu")
            self._scalars["unused"] = own.to(self._device, non_blocking=True)
        scalar = self._scalars[payload]
        return lambda: communicators.all_reduce(scalar, "max", operation.group, operation.communicator)

    def _agreement(self, operation: Operation) -> torch.Tensor:
        """Return three FP64 numbers: the operation's id as the trainer's progress, its learning rate, its loss or 0."""
        numbers = torch.tensor([operation.id, self._controlled().lr, 0.0], dtype=torch.float64, device="cpu")
        told = numbers.to(self._device, non_blocking=True)
        if operation.payload == "loss":
            if self.loss is None:
                hint = "call fleet.report(loss=loss) before optimizer.step()"
                what = "adaptive steps follow the loss, which was not reported"
                raise ConfigError(what, "strategy.adaptive_localsgd", hint=hint)
            told[2:].copy_(self.loss.reshape(1))
        return told

    def _meet(self, operation: Operation) -> None:
        """Compute a single trainer's distances, step the outer optimizer, or merge: a fragment or the whole model."""
        what, fragment = self.combination, operation.fragment
        own = self.storage.deltas if fragment is None else [self.storage.deltas[bucket] for bucket in self._plan.fragments[fragment]]
        if operation.kind == "difference":
            for delta in own:
                self._waiting.add(delta.id)
                delta.pack()
            return
        if self._flying or self._tickets:
            self._stopwatch.stall_begins()
            self.wait(self._flying)
            self.wait(self._tickets)
            self._stopwatch.stall_ends()
            self._flying.clear()
        any_steps = operation.kind != ("merge" if what.outer is None else "outer") or self._meet_workers(own)
        if operation.kind == "outer":
            assert what.outer is not None
            for delta in own if any_steps else ():
                delta.step(what.outer)
        elif self._agrees:  # else its parameters are the average
            self._merge(operation, own)

    def _meet_workers(self, own: Sequence[DeltaBucket]) -> bool:
        """Average the distances with the elastic workers that arrive; return whether any of them had steps."""
        workers, outer = self._communicators.workers, self.combination.outer
        if workers is None:
            return True
        for delta in own:
            if outer is None:  # else the plan's ``difference`` has packed it
                delta.pack()
            elif outer.momentum:
                delta.hold_velocity()
        self._stopwatch.stall_begins()
        any_steps = workers.average(own)
        self._stopwatch.stall_ends()
        workers.scale_lr(self._controls, self.combination.lr_scale)  # their number may have changed
        return any_steps

    @torch.no_grad()
    def _merge(self, operation: Operation, own: Sequence[DeltaBucket]) -> None:
        what = self.combination
        for control in self._controls.each:
            control.refuse_unaveraged()
        share = what.fragments.mixing if what.fragments is not None and operation.payload == "mixture" else 0.0
        for delta in own:
            self._waiting.discard(delta.id)
            delta.merge(1.0 if what.outer is None else what.outer.lr, share)
        if self._plan.num_state_slots:
            for bucket in self._plan.of_bucket:
                self._controlled().unpack_state(bucket, self.storage.transfer("state", bucket).buffer)
        if self.combination.averages_buffers:
            self._buffers.unpack()

    def wait(self, tickets: Mapping[int, Ticket]) -> None:
        """Wait for the tickets of collectives and of what follows them."""
        for ticket in reversed([*tickets.values()]):  # the last first: waking for each of the others would delay the lanes' threads
            ticket.wait()

    def _finish_rows(self) -> None:
        """Count the bytes of exchanged rows, and make the rows the gradients."""
        if not self._row_bytes:
            return
        self._stopwatch.sends(sum(self._row_bytes))
        self._row_bytes.clear()
        if not self._updates:
            for gradients in self.storage.gradients:
                if isinstance(gradients, SparseBucket):
                    gradients.finish()

    def _forget_unused(self) -> None:
        """Remove gradients of parameters that no rank has used since the last update, so that they get no weight decay.

        A parameter that had a gradient before, such as zeros, keeps it, as in DistributedDataParallel.
        """
        if not self._merges_unused:
            return
        used, self._used = self._used, set()
        flags = [name in used for name in self._parameters]
        if "unused" in self._scalars:
            with host_reads():
                flags = [flag != 0 for flag in self._scalars.pop("unused").tolist()]
        for (name, parameter), reached in zip(self._parameters.items(), flags, strict=True):
            if not reached and name in self._absent:
                parameter.grad = None
