"""Engine: executes a strategy's operations on a model and an optimizer, through their hooks.

The engine decides nothing: it reports events to the strategy and runs the operations that the strategy returns. torch's
Reducer detects when a bucket is ready (``real.engine.reducer``); there is none if trainers update alone, or with one
trainer. A forward begins a step (``Phase``). At the end of the backward the engine waits for the collectives, so that
``.grad`` holds averages when ``backward()`` returns. Another backward before the update repeats the exchange.

The first update's plan takes the gradients in reverse registration order; hooks record the order in which they become
ready. Rank 0's order is then broadcast, and all ranks keep the plan built from it.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from fleetbench.errors import ConfigError
from fleetbench.plan.build import Plan
from fleetbench.plan.drive import Requests, started, tell
from fleetbench.plan.events import BackwardEnd, BucketReady, DataEnd, EpochEnd, Event, Flush, StepBegin
from fleetbench.plan.fusion import Cost
from fleetbench.plan.replay import Decider, Recording
from fleetbench.plan.state import State, closed_round
from fleetbench.plan.training import family
from fleetbench.strategy import DistributedStrategy
from real.communication.clocks import clock_of
from real.communication.communicators import Communicators, agree_on
from real.communication.lanes import StreamLane
from real.compute.compute import apply_compute
from real.compute.living import living_hook, weakly
from real.engine.carried import Carried
from real.engine.executor import Executor
from real.engine.gradients import is_cleared, is_dropped, tensors_of, versions
from real.engine.outside import ALIKE, OUTSIDE, OutsideChanges, owners_of, refuse_renamed, refuse_replaced
from real.engine.phase import Phase
from real.engine.planning import Planning, Progress
from real.engine.reducer import PlannedReducer, leaves_gradients, nodes_of
from real.engine.refusals import (
    one_number,
    refuse_again,
    refuse_frozen,
    refuse_graph_of_gradients,
    refuse_in_step,
    refuse_late,
    refuse_missing,
    refuse_model,
    refuse_moved,
    refuse_optimizer,
    refuse_sparse,
    refuse_unfinished,
    refuse_unfrozen,
    refuse_wrapper_around,
    refuse_wrappers,
)
from real.engine.sparse import refuse_unknown_sparse
from real.engine.stopwatch import Stopwatch
from real.engine.updates import Updates
from real.supported import refuse_elastic

if TYPE_CHECKING:
    from real.checkpoints.meeting import Meeting


class Engine:
    """Runs one strategy on one model. Every rank creates and closes its engines in the same order.

    With ``fusion = "merged_gradient"`` or ``"optimal"``, the plan follows ``forecast``: the cost of an all-reduce over
    all trainers, and when each gradient is final, in ns since the backward's start. Without it, both are measured, the
    latter in the first update's cold backwards. Raises ``ConfigError`` in a step in which a parameter gets no gradient.
    """

    on_step: Callable[[int], None] | None = None
    """Called with the number of each step when it begins."""
    on_compute_end: Callable[[], None] | None = None
    """Called when the backward's computation has ended, before the engine waits for collectives."""
    on_failure: Callable[[BaseException], None] | None = None
    """Called with an exception that a step raises, after which trainers are at different points of training."""
    _behind = Phase.IDLE
    """Phase of the engine when the current backward began."""
    _comes = False
    """Whether the current backward leaves gradients in ``.grad``, unlike ``torch.autograd.grad``."""
    _keeps = False
    """Whether backwards keep their gradients on this rank without an exchange, as inside ``no_sync``."""
    _is_passed = False
    """Whether the last backward also reached another model, which has been updated since; see ``FleetEngine``."""

    def __init__(
        self,
        model: nn.Module,
        strategy: DistributedStrategy,
        communicators: Communicators,
        *,
        first_step: int = 1,
        record: bool = False,
        keep_times: bool = True,
        trainers_per_node: int = 1,
        forecast: tuple[Cost, Mapping[str, int]] | None = None,
    ) -> None:
        if communicators.workers is None:
            refuse_elastic(strategy)
        refuse_model(model, communicators.device, strategy)
        changes = strategy.changes().items()
        agree_on([f"{name} = {json.dumps(value)}" for name, value in changes], "the strategy", communicators)  # from which groups are made
        self.model = model
        self.strategy = strategy
        self.communicators = communicators
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._members = list(self._parameters.values())
        self._frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
        self._device = self._members[0].device
        self._dtype = self._members[0].dtype
        self.stopwatch = Stopwatch(communicators.rank, keep_times, clock_of(self._device), strategy.fetch_every_n_steps)
        self.step, self._record = first_step - 1, record
        self._initial: State | None = None
        self._planning = Planning(model, self._parameters, strategy, communicators, trainers_per_node, forecast)
        self._phase = Phase.IDLE
        self._nodes = nodes_of(self._members)
        self._unused: list[str] = []
        """Names of parameters without a gradient in the current backward, if the strategy looks for them."""
        self._hidden: RemovableHandle | None = None
        """Hook on a backward's first gradient, for a model whose outputs contain no tensors."""
        self._keeps, self._holds, self._was_synced, self._num_moves = False, False, False, 0
        """``_holds``: whether a backward of this step has kept its gradients on this rank. ``_was_synced``: whether the
        step's last forward ran outside ``no_sync``, so that the next one reads rank 0's buffers, as in DDP.
        ``_num_moves``: number of changes after which backwards of earlier forwards are refused."""
        self._executor: Executor | None = None
        self._reducer: PlannedReducer | None = None
        self._next_bucket = 0
        ends = self._or_fails(self._update_ends)
        asked = (lambda: self.executor, lambda: self._phase, self._rests)
        self._updates = Updates(model, self._parameters, self.stopwatch, *asked, ends)
        self._decider = self._decide(self._planning.registered(), None)
        self._before = self._decider.mark()
        self._undo = apply_compute(
            model,
            strategy,
            device=self._device,
            group=communicators.beside if strategy.sync_batch_norm else None,
            errors=communicators.errors,
            scale=lambda: self.loss_scale,
        )
        refuse_sparse(self._planning.sparse, self.executor.combination)
        communicators.prove(1 if strategy.sync_nccl_allreduce else strategy.nccl_comm_num, beside=strategy.worker_trainers > 1)
        self._outside: OutsideChanges | None = None
        if self.executor.parts:
            host = self._device.type == "cpu" and not isinstance(communicators.lane(0), StreamLane)
            self._outside = OutsideChanges(self._parameters, reads=host)
        self._owners = owners_of(model)
        self.meeting: Meeting | None = None
        """Meeting of all ranks, whose errors name the ranks that are missing; None outside of ``fleet``."""
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(living_hook(lambda *_: self._forward_begins())),
            model.register_forward_hook(living_hook(lambda _module, _inputs, output: self._forward_ends(output))),
            register_module_module_registration_hook(weakly(self._refuse_wrapper)),
            *self._updates.hear_others(),
        ]
        for handle in self._handles[2:]:  # in torch's global lists, which outlive the model
            finalize(self, handle.remove)
        self._measuring = [
            parameter.register_post_accumulate_grad_hook(partial(self._or_fails(self._is_final), name))
            for name, parameter in self._parameters.items()
        ]

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._decider.strategy.plan

    @property
    def num_updates(self) -> int:
        """Number of the last update, counted from 1; warm-up updates are numbered up to 0."""
        return self._decider.state.updates

    @property
    def loss_scale(self) -> float:
        """Factor on the loss in the current or next backward; 1 without loss scaling."""
        scale = self._decider.state.scale
        return 1.0 if scale is None else scale.value

    @property
    def has_agreed(self) -> bool:
        """Whether no trainer has updated alone since all of them last agreed."""
        return self._decider.strategy.has_agreed(self._decider.state)

    @property
    def executor(self) -> Executor:
        """The executor of the plan in force."""
        assert self._executor is not None
        return self._executor

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The attached optimizers, whose steps are the updates, in the order in which they were attached."""
        return self._updates.optimizers

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Make ``optimizer.step()`` the update; with several optimizers, an update ends when all have stepped.

        ``optimizer`` replaces attached ones that hold some of its parameters. Raises ``ConfigError`` if the strategy
        cannot control it, or in the middle of a step if an optimizer is already attached.
        """
        refuse_wrappers(self.model)
        refuse_optimizer(optimizer, self.executor.combination)
        if self.optimizers:
            self._between("fleet.distributed_optimizer")
        self.take_over()
        optimizers = self._updates.joined_by(optimizer)
        slots = self.executor.attach(optimizers)
        self._updates.hear(optimizers)
        if slots > self.plan.num_state_slots:
            self._planning.setting = dataclasses.replace(self._planning.setting, num_state_slots=slots)
            if self._initial is None:
                self._decider = self._decide(self._planning.registered(), self._decider.state)
            else:
                self._stay(self._decider.state)
            self.note_parameters()

    def take_over(self, *, looks: bool = True) -> None:
        """Continue from parameters that the script changed since the last step; see ``OutsideChanges.take_over``."""
        self._owners = refuse_replaced(self._owners, self._parameters, self.model)
        if self._outside is not None:
            self._outside.take_over(self.executor, self._agree, agreed=self.has_agreed, looks=looks)

    def _agree(self, lines: Sequence[str]) -> None:
        """Raise ``ConfigError`` on every rank unless all ranks describe the same change by ``lines``."""
        if self.communicators.workers is not None:
            hint = "load weights before fleet.distributed_model: the first worker's become those of all"
            raise ConfigError("elastic workers do not meet to change them alike", OUTSIDE, f"{len(lines)} parameters", hint)
        if self.meeting is not None:
            self.meeting.meet(OUTSIDE)
        self.communicators.order_lanes()
        agree_on(lines, OUTSIDE, self.communicators, ALIKE)

    def note_parameters(self) -> None:
        """Record the parameters, so that earlier writes do not count as outside changes; see ``OutsideChanges``."""
        if self._outside is not None:
            self._outside.note()

    def report(self, loss: torch.Tensor | float) -> None:
        """Report the step's loss, which adaptive steps need. Raises ``ConfigError`` unless it is a single number."""
        self.executor.loss = one_number(loss).to(self._device, non_blocking=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards inside add to ``.grad`` on this rank alone; the next one outside exchanges the sum."""
        before, self._keeps = self._keeps, True
        try:
            yield
        finally:
            self._keeps = before

    def expect(self, *, synced: bool) -> None:
        """Set whether the next backward exchanges gradients; as in DDP, this depends on where its forward runs.

        It does if the forward now beginning (``synced``), or an earlier one without backward, is outside ``no_sync``.
        """
        self._keeps = not synced and not (self._phase == Phase.FORWARD and not self._keeps)

    def end_epoch(self) -> None:
        """Report that an epoch's data are used up; every trainer calls it after the same step."""
        self._run_between(EpochEnd(), "fleet.end_epoch")

    def flush(self, *, end: bool = False) -> None:
        """Make trainers agree before the model is read; the time counts to the last step. ``end``: no step follows."""
        self._run_between(DataEnd() if end else Flush(), "fleet.synchronize")

    def progress(self, where: str) -> Progress:
        """Return progress for ``resume``. Raises ``ConfigError`` in a step with gradients or for renamed parameters."""
        begun = self._between(where)
        refuse_renamed(self._parameters, self.model, where)
        return Progress(
            state=self._before[0] if begun else self._decider.state,
            order=dict(self._planning.order),
            settled=self._initial is not None,
            cost=self._planning.setting.cost,
            plan=self.plan.digest,
        )

    def resume(self, progress: Progress, carried: Carried, where: str) -> None:
        """Continue from ``progress``, by the same plan; ``carried``: the executor's state at that time.

        Every rank calls it, and then restores parameters, buffers and the optimizer's state. Raises ``ConfigError`` in
        a step that has gradients, and if the plan would differ.
        """
        self._between(where)
        order = self._planning.resume(progress, where)
        if progress.settled:
            self._stay(progress.state, carried)
        else:
            self._initial = None
            self._decider = self._decide(order, None, carried)
            self._decider.state = progress.state
            self._planning.order = dict(progress.order)
        self.step, self._phase = progress.state.next_step - 1, Phase.IDLE
        self._num_moves += 1
        for parameter in self._parameters.values():
            parameter.grad = None

    def recordings(self) -> list[Recording]:
        """Return one recording of this rank's events since the plan was settled; empty without ``record``."""
        return [] if self._initial is None or self._decider.log is None else [self._decider.recording()]

    def close(self) -> None:
        """Remove all hooks, undo the strategy's changes to the model, and set gradients to None."""
        for handle in (*self._handles, *self._measuring):
            handle.remove()
        self._handles.clear()
        self._updates.hear([])
        if self._reducer is not None:
            self._reducer.remove()
        self.communicators.order_lanes()
        self._undo()
        for parameter in self._parameters.values():
            parameter.grad = None

    def _decide(self, order: Sequence[str], state: State | None, carried: Carried | None = None) -> Decider:
        """Plan for gradients in ``order``, and make what the plan needs; ``carried`` replaces the last executor's."""
        if state is None:
            agree_on(self._planning.lines(), "the model", self.communicators)
        plan = self._planning.plan(order)
        if state is not None and plan.buffers_nbytes:
            self._planning.take_buffers()
        self.communicators.require(self.strategy.nccl_comm_num + (self.strategy.worker_trainers > 1), plan.parts)
        agree_on([plan.digest], "the plan of exchanges", self.communicators)
        if state is None:  # all ranks start from rank 0's parameters and buffers
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                self.communicators.broadcast(tensor.detach())
        strategy = family(self.strategy, plan)
        if self._reducer is not None:
            self._reducer.remove()
        self._reducer = None  # frees its buffers before new ones are made
        what = strategy.combination
        knows_all = not (what.merges and what.finds_unused)  # the Reducer finds unused parameters of a single backward
        if self.communicators.trainers > 1 and what.exchanges_gradients and knows_all:
            shared = (self.communicators, what, self._or_fails(self._bucket_comes))
            self._reducer = PlannedReducer(self.model, self._parameters, plan.buckets, self._planning.sparse, *shared)
        if self._executor is not None and carried is None and state is not None:
            carried = self._executor.carried()
        self._executor = None  # frees its buffers before new ones are made
        carried = carried or Carried()
        others = (self.communicators, self.stopwatch, carried, self.optimizers, self._planning.buffers)
        self._executor = Executor(self.model, self._parameters, strategy, *others, known=self._known)
        if state is None:
            return Decider.start(strategy, self.communicators.rank, first_step=self.step + 1)
        return Decider.start(strategy, self.communicators.rank, record=self._record, state=state)

    def _known(self) -> set[int]:
        """Return the ids of the parameters that fleet trains."""
        return set(map(id, self._members))

    def _or_fails(self, part: Callable[..., None]) -> Callable[..., None]:
        """Wrap a part of a step to report exceptions to ``on_failure``; the wrapper does not keep the engine alive."""
        own, call = ref(self), weakly(part)

        def run(*arguments: Any) -> None:
            try:
                call(*arguments)
            except Exception as error:
                if (engine := own()) is not None and engine.on_failure is not None:
                    engine.on_failure(error)
                raise

        return run

    def _forward_begins(self) -> None:
        refuse_unfinished(self._phase, self.communicators.rank)
        if not torch.is_grad_enabled() or not self.model.training:
            return
        self._updates.end_open()
        if self._phase == Phase.KEPT:
            self._phase = Phase.FORWARD
        if self._phase == Phase.IDLE:
            self._begin_step()
        elif self._was_synced and self._decider.strategy.closes(self._decider.state):
            self.executor.forward_goes_on()

    def _begin_step(self) -> None:
        refuse_moved(self._members[0], self._dtype, self._device)
        refuse_unfrozen(self._frozen)
        if self._reducer is not None and self.executor.combination.merges:  # the Reducer checks only the last backward before an update
            refuse_frozen(self._parameters)
        refuse_wrapper_around(self._members, DistributedDataParallel._active_ddp_module)  # noqa: SLF001  # one whose forward is running
        self.take_over(looks=self._decider.state.step is None)
        self._phase = Phase.FORWARD
        self.step += 1
        self._next_bucket = 0
        self._updates.begin()
        self._holds = self._was_synced = False
        self.stopwatch.begin_step(self.step)
        self._before = self._decider.mark()
        if self.num_updates.bit_count() <= 1:  # after 0, 1, 2, 4, 8, ... updates
            refuse_wrappers(self.model)
        self.executor.begin_step(self.step, started(self._tell(StepBegin(self.step))))
        if self.on_step is not None:
            self.on_step(self.step)

    def _forward_ends(self, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        if self.model.training and self._phase in (Phase.FORWARD, Phase.KEPT, Phase.UPDATE):
            self.stopwatch.forward_ends()
            self._was_synced = not self._keeps
        reducer = self._reducer if self.executor.combination.finds_unused else None
        if reducer is not None and not self._keeps:
            output = reducer._post_forward(output)  # type: ignore[no-untyped-call]  # noqa: SLF001  # gives zeros to unused parts
        outputs = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        for tensor in outputs:
            tensor.register_hook(partial(self._backward_begins, num_moves=self._num_moves))
        if not outputs and self.model.training:
            self.hear_backward()  # an object may hide them
        return output

    def hear_backward(self) -> None:
        """Take the next gradient as a backward's start, for outputs without tensors and backwards inside a forward."""
        if self._phase in (Phase.FORWARD, Phase.KEPT, Phase.UPDATE):
            self.stopwatch.forward_ends()
        if self._hidden is None:
            self._hidden = register_multi_grad_hook(self._members, self._backward_begins, mode="any")

    def _backward_begins(self, _gradient: torch.Tensor | None = None, num_moves: int | None = None) -> None:
        """Begin a backward that has reached a model output; ``num_moves``: value of ``_num_moves`` in its forward."""
        if self._phase == Phase.BACKWARD:
            return
        if num_moves not in (None, self._num_moves):
            refuse_late()
        if self._hidden is not None:
            self._hidden.remove()
            self._hidden = None
        if self._phase == Phase.IDLE:  # after a forward in evaluation mode
            self._begin_step()
        if self._keeps:
            if self._phase == Phase.UPDATE:
                self._begin_again(dropped=False)
            self._phase, self._holds = Phase.KEPT, True
            return
        self._behind, self._phase = self._phase, Phase.BACKWARD
        is_alone = self.executor.combination.is_local and not self._is_passed
        self._dropped = self._behind == Phase.UPDATE and is_alone and is_cleared(self._members)
        self._backward_begin_ns = time.monotonic_ns()
        self.executor.begin_backward()
        self._comes = False
        self._unused.clear()
        if leaves_gradients(self._nodes):
            self._backward_comes()
            refuse_graph_of_gradients(self._reducer is not None)
        self._versions = [] if self._comes else versions(self._members)
        if self._reducer is not None and self._decider.strategy.closes(self._decider.state):
            self._reducer.expect(self._nodes)
        end = self._or_fails(self._backward_ends)
        queue_callback = Variable._execution_engine.queue_callback  # noqa: SLF001  # as DDP learns of the backward's end
        queue_callback(lambda: queue_callback(end))  # after the Reducer's own callback, which it queues in the backward

    def _backward_comes(self) -> None:
        """Note that the current backward leaves gradients; if an update is due, begin the exchange again."""
        self._comes = True
        if self._behind == Phase.UPDATE:
            self._behind = Phase.FORWARD
            self._begin_again(dropped=self._dropped)

    def _begin_again(self, *, dropped: bool) -> None:
        """Rewind the step for another backward before the update, which exchanges what is in ``.grad`` again."""
        self._updates.refuse_partial()
        is_attached = bool(self.optimizers) or self._is_passed
        refuse_again(self.executor.combination, is_attached=is_attached, dropped=dropped)
        self._decider.rewind(self._before)
        self._next_bucket = 0
        self.executor.begin_again(started(self._tell(StepBegin(self.step))))

    def _is_final(self, name: str, parameter: torch.Tensor) -> None:
        """Record when a gradient is final; called until the plan is settled."""
        refuse_unknown_sparse(name, parameter.grad, self._planning.sparse)
        if self._phase == Phase.BACKWARD:
            self._planning.order.pop(name, None)  # of a parameter that is reached twice, the last time counts
            self._planning.order[name] = time.monotonic_ns() - self._backward_begin_ns

    def _bucket_comes(self, bucket: int, buffer: torch.Tensor) -> None:
        """Start the next bucket, whose gradients are all in the Reducer's ``buffer``."""
        self._backward_begins()  # if no hook on an output has reported it
        if not self._comes:
            self._backward_comes()
        assert bucket == self._next_bucket, "buckets become ready in the plan's order"
        self.executor.storage.place(bucket, buffer)
        self._start_bucket()

    def _start_bucket(self) -> None:
        bucket, begin = self._next_bucket, self.stopwatch.now()
        self._next_bucket += 1
        if self.executor.is_plain:
            self.executor.start_plain(bucket)
            self.stopwatch.started(bucket, begin)
            return
        if self.executor.looks_for_unused:
            self._unused += [name for name in self.plan.buckets[bucket].gradients if self._parameters[name].grad is None]
        operations = started(self._tell(BucketReady(bucket)))
        self.executor.start(operations)
        if operations:
            self.stopwatch.started(bucket, begin)

    def _start_last(self) -> None:
        """Start the buckets that the Reducer has not; report plain ones to the strategy while they are in flight."""
        while self._next_bucket < len(self.plan.buckets):
            self._start_bucket()
        if self.executor.is_plain:
            self.executor.note_plain([started(self._tell(BucketReady(bucket.id))) for bucket in self.plan.buckets])

    def _backward_ends(self) -> None:
        if not self._comes:
            if versions(self._members) == self._versions:  # it has left no gradient
                self._phase = self._behind
                return
            self._backward_comes()
        if self.on_compute_end is not None:
            self.on_compute_end()
        self.stopwatch.backward_ends()
        if self._reducer is not None:
            refuse_missing(self._reducer, self.plan, self._parameters)
        self._start_last()
        unused = tuple(sorted(self._unused))
        requests = self._tell(BackwardEnd(unused=unused))
        self._phase = Phase.UPDATE
        self.executor.end_backward(requests, unused, self.loss_scale)

    def _rests(self, _optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimizer's step does not concern this model."""
        return False

    def _refuse_wrapper(self, wrapper: nn.Module, _name: str, module: nn.Module | None) -> None:
        refuse_wrapper_around(self._members, wrapper, module)

    def _update_ends(self) -> None:
        self.executor.finish_update()
        self.stopwatch.update_ends()
        self._note_round(self._before[0])
        self.note_parameters()
        self._phase = Phase.IDLE
        state = self._decider.state
        if self._initial is None and not state.merged and state.flight is None:  # sums and distances that wait lie in this plan's buckets
            self._planning.settle()
            self._stay(state)
        self._updates.over()

    def _is_in_vain(self, *, may_wait: bool = False) -> bool:
        """Whether the current step can be discarded: no gradients were exchanged, or they were dropped.

        ``may_wait``: ignore gradients that backwards inside ``no_sync`` have left in ``.grad``.
        """
        if self._phase == Phase.UPDATE:
            return is_dropped(self.executor.combination, self._members)
        holds = self._holds and not may_wait
        return self._phase in (Phase.FORWARD, Phase.KEPT) and not (holds and not is_cleared(self._members))

    def _between(self, where: str, *, may_wait: bool = False) -> bool:
        """End an open update; return whether a discardable step has begun. Raises ``ConfigError`` in any other step."""
        self._updates.end_open()
        if not (begun := self._is_in_vain(may_wait=may_wait)):
            refuse_in_step(self._phase, where)
        return begun

    def _run_between(self, event: Event, where: str) -> None:
        """Report an event between steps, and run the strategy's operations; gradients waiting in ``.grad`` stay."""
        begun = self._between(where, may_wait=not self.executor.combination.merges)
        if begun:
            self._decider.rewind(self._before)
        self.take_over()
        state = self._decider.state
        has_moved = self.executor.run_between(self._tell(event))
        self._note_round(state)
        self.note_parameters()
        if begun:
            self._num_moves += has_moved
            self._before = self._decider.mark()
            self.executor.begin_again(started(self._tell(StepBegin(self.step))))

    def _tell(self, event: Event) -> Requests:
        return tell(self._decider, event, time.monotonic_ns)

    def _note_round(self, before: State) -> None:
        """Pass the length of a round of local steps that has ended since ``before`` to the stopwatch."""
        local_steps = closed_round(before, self._decider.state)
        if local_steps is not None:
            self.stopwatch.closes_round(local_steps)

    def _stay(self, state: State, carried: Carried | None = None) -> None:
        """Plan for the observed order of readiness, and keep that plan."""
        self._initial = state
        while self._measuring:
            self._measuring.pop().remove()
        self._decider = self._decide(list(self._planning.order), state, carried)
