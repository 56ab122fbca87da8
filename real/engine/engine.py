"""Engine: executes a strategy's operations on a model and an optimizer, through their hooks.

The engine decides nothing: it tells the strategy what happened, and runs its answers. torch's Reducer finds out when a
bucket is ready (``real.engine.reducer``); there is none if trainers update alone, or with one trainer. A forward begins a
step (``Phase``). At the end of its backward the engine waits for the collectives, so that ``.grad`` holds averages when
``backward()`` returns. Another backward before the update takes the strategy back to the step's begin, and repeats the exchange.

The first update's plan takes the gradients in reverse registration order; hooks note the order in which they become
ready. Rank 0's order is then broadcast, and all ranks keep the plan that they build from it.
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
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from fleetbench.plan.build import Plan
from fleetbench.plan.drive import Requests, tell
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
from real.engine.executor import Carried, Executor, started
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

if TYPE_CHECKING:
    from real.checkpoints.meeting import Meeting


class Engine:
    """Runs one strategy on one model. Every rank makes and closes its engines in the same order.

    ``fusion = "merged_gradient"`` or ``"optimal"`` plans by a ``forecast``, the cost of an all-reduce over all trainers and when each
    gradient is final, in ns from the backward's start; without it they are timed, and backwards before the plan settles are cold. Raises
    ``ConfigError`` in a step in which a parameter gets no gradient.
    """

    on_step: Callable[[int], None] | None = None
    """Called with the number of each step when it begins."""
    on_compute_end: Callable[[], None] | None = None
    """Called when the backward's computation has ended, before the engine waits for collectives."""
    on_failure: Callable[[BaseException], None] | None = None
    """Called with an exception that a step raised: the trainers are at different places from then on."""
    _behind = Phase.IDLE
    """Phase in which the backward under way began."""
    _comes = False
    """Whether the backward under way leaves gradients, unlike ``torch.autograd.grad``."""
    _keeps = False
    """Whether backwards keep their gradients on this rank, as inside ``no_sync``."""
    _is_passed = False
    """Whether the last backward passed through this model to another one, which was updated since: see ``FleetEngine``."""

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
        refuse_model(model, communicators.device, strategy)
        changes = strategy.changes().items()
        agree_on([f"{name} = {json.dumps(value)}" for name, value in changes], "the strategy", communicators)  # by which groups are made
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
        """Names of parameters without a gradient in the backward under way, if the strategy looks for them."""
        self._hidden: RemovableHandle | None = None
        """Hook on a backward's first gradient, for a model whose outputs contain no tensors."""
        self._keeps, self._holds, self._was_synced, self._num_moves = False, False, False, 0
        """Whether backwards keep their gradients on this rank; whether a backward of this step has; whether the
        step's last forward ran outside of ``no_sync``, so that the next one reads rank 0's buffers, as in DDP; how
        often parameters were replaced in the middle of a step."""
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
        communicators.prove(1 if strategy.sync_nccl_allreduce else strategy.nccl_comm_num)
        self._outside: OutsideChanges | None = None
        if self.executor.parts:
            host = self._device.type == "cpu" and not isinstance(communicators.lane(0), StreamLane)
            self._outside = OutsideChanges(self._parameters, reads=host)
        self._owners = owners_of(model)
        self.meeting: Meeting | None = None
        """Meeting of all ranks, which names ranks that do not come."""
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(living_hook(lambda *_: self._forward_begins())),
            model.register_forward_hook(living_hook(lambda _module, _inputs, output: self._forward_ends(output))),
            register_module_module_registration_hook(weakly(self._refuse_wrapper)),
            *self._updates.hear_others(),
        ]
        for handle in self._handles[2:]:  # of torch's lists, which outlive the model
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
        """Number of updates so far, which is also the number of the last one."""
        return self._decider.state.updates

    @property
    def loss_scale(self) -> float:
        """Factor of the loss in the backward under way, or the next one."""
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
        """Let ``optimizer.step()`` be the update, or a part of it, where there are others: then each step ends when all have stepped.

        It takes the place of those that hold some of its parameters. Raises ``ConfigError`` for one that the strategy cannot control, and
        in the middle of a step if there is one already.
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
        """Let what the script has done to the parameters since the last step be what training goes on from; see ``OutsideChanges``."""
        self._owners = refuse_replaced(self._owners, self._parameters, self.model)
        if self._outside is not None:
            self._outside.take_over(self.executor, self._agree, agreed=self.has_agreed, looks=looks)

    def _agree(self, lines: Sequence[str]) -> None:
        """Raise ``ConfigError``, on every rank, unless all have made one change."""
        if self.meeting is not None:
            self.meeting.meet(OUTSIDE)
        self.communicators.order_lanes()
        agree_on(lines, OUTSIDE, self.communicators, ALIKE)

    def note_parameters(self) -> None:
        """Take all writes to the parameters so far as fleet's own, see ``OutsideChanges``."""
        if self._outside is not None:
            self._outside.note()

    def report(self, loss: torch.Tensor | float) -> None:
        """Tell the step's loss, one number; adaptive steps need it before the optimizer's step. Raises ``ConfigError`` for several."""
        self.executor.loss = one_number(loss).to(self._device, non_blocking=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards inside leave their gradients in ``.grad``, on this rank alone; the next one outside exchanges the sum."""
        before, self._keeps = self._keeps, True
        try:
            yield
        finally:
            self._keeps = before

    def expect(self, *, synced: bool) -> None:
        """As in DistributedDataParallel, where the forward that comes now runs decides for its backward, and not where that runs.

        If it, or one before it that had no backward yet, runs outside of ``no_sync``, the backward exchanges.
        """
        self._keeps = not synced and not (self._phase == Phase.FORWARD and not self._keeps)

    def end_epoch(self) -> None:
        """The data of an epoch are used up; every trainer says so after the same step."""
        self._run_between(EpochEnd(), "fleet.end_epoch")

    def flush(self, *, end: bool = False) -> None:
        """Make the trainers agree, as a model that is read must; ``end``: no step follows. Its time belongs to the step done last."""
        self._run_between(DataEnd() if end else Flush(), "fleet.synchronize")

    def progress(self, where: str) -> Progress:
        """The progress that ``resume`` takes. Raises ``ConfigError`` within a step that has come to something; for renamed parameters."""
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
        """Go on where ``progress`` was taken, by the same plan, with what the step before it left.

        Every rank calls it, and puts parameters, buffers and the optimizer's state in place after it. Raises ``ConfigError``
        in the middle of a step, unless it has come to nothing, and if another plan would result.
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
        """One recording of this rank's events and operations since the plan was settled, or none without ``record``."""
        return [] if self._initial is None or self._decider.log is None else [self._decider.recording()]

    def close(self) -> None:
        """Remove every hook, and leave model and optimizer with storage of their own."""
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
        """Plan for gradients in this order, and make what the plan needs; ``carried`` takes the place of what the last step has left."""
        if state is None:
            agree_on(self._planning.lines(), "the model", self.communicators)
        plan = self._planning.plan(order)
        if state is not None and plan.buffers_nbytes:
            self._planning.take_buffers()
        self.communicators.require(self.strategy.nccl_comm_num, plan.parts)
        agree_on([plan.digest], "the plan of exchanges", self.communicators)
        if state is None:  # all ranks start from rank 0's parameters and buffers
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                self.communicators.broadcast(tensor.detach())
        strategy = family(self.strategy, plan)
        if self._reducer is not None:
            self._reducer.remove()
        self._reducer = None  # and its buffers, before there are new ones
        what = strategy.combination
        knows_all = not (what.merges and what.finds_unused)  # the Reducer looks for unused parameters in one backward alone
        if self.communicators.trainers > 1 and not what.is_local and knows_all:
            self._reducer = PlannedReducer(
                self.model,
                self._parameters,
                plan.buckets,
                self._planning.sparse,
                group=self.communicators.beside if what.finds_unused else self.communicators.world,
                finds_unused=what.finds_unused,
                on_bucket=self._or_fails(self._bucket_comes),
            )
        if self._executor is not None and carried is None and state is not None:
            carried = self._executor.carried()
        self._executor = None  # and its buffers, before there are new ones
        carried = carried or Carried()
        shared = (self.communicators, self.stopwatch, carried, self.optimizers, self._planning.buffers)
        self._executor = Executor(self.model, self._parameters, strategy, *shared, known=self._known)
        if state is None:
            return Decider.start(strategy, self.communicators.rank, first_step=self.step + 1)
        return Decider.start(strategy, self.communicators.rank, record=self._record, state=state)

    def _known(self) -> set[int]:
        """Ids of the parameters that fleet trains."""
        return set(map(id, self._members))

    def _or_fails(self, part: Callable[..., None]) -> Callable[..., None]:
        """Wrap a part of a step so that ``on_failure`` hears its exceptions; the wrapper does not keep the engine alive."""
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
        if self._reducer is not None and self.executor.combination.merges:  # which looks at the backward before an update alone
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
        if self.num_updates.bit_count() <= 1:  # now and then
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
            output = reducer._post_forward(output)  # type: ignore[no-untyped-call]  # noqa: SLF001  # which lets a part that no loss uses get its zeros
        outputs = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        for tensor in outputs:
            tensor.register_hook(partial(self._backward_begins, num_moves=self._num_moves))
        if not outputs and self.model.training:
            self.hear_backward()  # an object hides them
        return output

    def hear_backward(self) -> None:
        """Take the first gradient as the begin of a backward, for outputs without tensors and backwards within the forward."""
        if self._phase in (Phase.FORWARD, Phase.KEPT, Phase.UPDATE):
            self.stopwatch.forward_ends()
        if self._hidden is None:
            self._hidden = register_multi_grad_hook(self._members, self._backward_begins, mode="any")

    def _backward_begins(self, _gradient: torch.Tensor | None = None, num_moves: int | None = None) -> None:
        """A backward has reached an output of the model; ``num_moves``: the engine's count when the forward ran."""
        if self._phase == Phase.BACKWARD:
            return
        if num_moves not in (None, self._num_moves):
            refuse_late()
        if self._hidden is not None:
            self._hidden.remove()
            self._hidden = None
        if self._phase == Phase.IDLE:  # a forward in evaluation mode
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
        queue_callback(lambda: queue_callback(end))  # after the Reducer's own, which it queues in the backward

    def _backward_comes(self) -> None:
        """The backward under way turns out to leave gradients."""
        self._comes = True
        if self._behind == Phase.UPDATE:
            self._behind = Phase.FORWARD
            self._begin_again(dropped=self._dropped)

    def _begin_again(self, *, dropped: bool) -> None:
        """A backward comes before the last one's update: what lies in ``.grad`` is exchanged again, and nothing was decided before."""
        self._updates.refuse_partial()
        is_attached = bool(self.optimizers) or self._is_passed
        refuse_again(self.executor.combination, is_attached=is_attached, dropped=dropped)
        self._decider.rewind(self._before)
        self._next_bucket = 0
        self.executor.begin_again(started(self._tell(StepBegin(self.step))))

    def _is_final(self, name: str, parameter: torch.Tensor) -> None:
        """Note when a gradient is final, until the plan is settled."""
        refuse_unknown_sparse(name, parameter.grad, self._planning.sparse)
        if self._phase == Phase.BACKWARD:
            self._planning.order[name] = time.monotonic_ns() - self._backward_begin_ns

    def _bucket_comes(self, bucket: GradBucket) -> None:
        """All gradients of the next bucket are in the Reducer's buffer."""
        self._backward_begins()  # where no output was found to tell of it
        if not self._comes:
            self._backward_comes()
        assert bucket.index() == self._next_bucket, "buckets become ready in the plan's order"
        self.executor.storage.place(bucket.index(), bucket.buffer())
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
        """Start the buckets that the Reducer has not; of plain ones the strategy is told now, while the last are under way."""
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
        """Whether a step of this optimizer does not concern this model."""
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
        if self._initial is None and not state.merged and state.flight is None:  # what waits lies in this plan's buckets
            self._planning.settle()
            self._stay(state)
        self._updates.over()

    def _is_in_vain(self, *, may_wait: bool = False) -> bool:
        """Whether the step under way has come to nothing: no gradients were exchanged, or they were cleared.

        ``may_wait``: gradients that backwards inside ``no_sync`` have left in ``.grad`` do not count.
        """
        if self._phase == Phase.UPDATE:
            return is_dropped(self.executor.combination, self._members)
        holds = self._holds and not may_wait
        return self._phase in (Phase.FORWARD, Phase.KEPT) and not (holds and not is_cleared(self._members))

    def _between(self, where: str, *, may_wait: bool = False) -> bool:
        """End an open update. Returns whether a step has begun in vain; raises ``ConfigError`` in the middle of another one."""
        self._updates.end_open()
        if not (begun := self._is_in_vain(may_wait=may_wait)):
            refuse_in_step(self._phase, where)
        return begun

    def _run_between(self, event: Event, where: str) -> None:
        """Tell the strategy of an event between steps, and run its operations; gradients waiting in ``.grad`` stay."""
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
        """Give the stopwatch the length of a round of local steps that has ended since ``before``."""
        local_steps = closed_round(before, self._decider.state)
        if local_steps is not None:
            self.stopwatch.closes_round(local_steps)

    def _stay(self, state: State, carried: Carried | None = None) -> None:
        """Plan by the order of readiness that is known, and keep that plan."""
        self._initial = state
        while self._measuring:
            self._measuring.pop().remove()
        self._decider = self._decide(list(self._planning.order), state, carried)
