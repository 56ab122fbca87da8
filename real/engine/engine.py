"""Engine: executes a strategy's operations on a model and an optimizer, through their hooks.

The engine decides nothing: it finds out when a bucket is ready, tells the strategy what happened,
and runs what the strategy answers. A step's life: ``idle`` -> ``forward`` (the model's forward
begins it) -> ``backward`` (buckets become ready; at the end of the backward the gradients'
collectives are waited for, so that ``.grad`` holds averages when ``backward()`` returns) ->
``update`` (the optimizer's step, and after it the operations that wait for it) -> ``idle``.
A backward inside ``no_sync`` only leaves its gradients in ``.grad``: ``forward`` -> ``kept`` ->
``forward``. Another backward before the update takes the strategy back to the step's begin, and the
step's exchange is done again.

The first update's plan takes the gradients in reverse registration order; then rank 0's observed
order of readiness is broadcast, and the plan that all ranks build from it stays.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from fleetbench.errors import ConfigError
from fleetbench.plan.build import Plan
from fleetbench.plan.combination import Combination
from fleetbench.plan.drive import Requests, tell
from fleetbench.plan.events import BackwardEnd, BucketReady, DataEnd, EpochEnd, Event, Flush, StepBegin
from fleetbench.plan.fusion import Cost
from fleetbench.plan.replay import Decider, Recording
from fleetbench.plan.state import State, closed_round
from fleetbench.plan.training import family
from fleetbench.strategy import DistributedStrategy
from real.communication.clocks import clock_of
from real.communication.communicators import Communicators, agree_on
from real.compute.compute import apply_compute
from real.compute.living import living_hook
from real.engine.executor import Carried, Executor, started
from real.engine.optimizers import refuse_arguments
from real.engine.planning import Planning
from real.engine.refusals import (
    refuse_again,
    refuse_in_step,
    refuse_misplaced,
    refuse_moved,
    refuse_scaler,
    refuse_sparse,
    refuse_stray,
    refuse_unfinished,
    refuse_unused,
    refuse_update,
)
from real.engine.sparse import refuse_unknown_sparse
from real.engine.stopwatch import Stopwatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a strategy has come on a model, as plain data: with the tensors, all that another engine needs to go on."""

    state: State
    order: Mapping[str, int]
    """Gradients in their order of readiness as far as it is known, with when each was final, in ns from the start of the backward."""
    settled: bool = False
    """The plan in force was made from that order, and stays."""
    cost: Cost | None = None
    """Of an all-reduce, as the plan takes it."""
    plan: str | None = None
    """Digest of the plan in force; none where going on makes another."""


class Engine:
    """Runs one strategy on one model. Every rank makes and closes its engines in the same order.

    ``fusion = "merged_gradient"`` or ``"optimal"`` plans by a ``forecast``, the cost of an all-reduce over all trainers and when each
    gradient is final, in ns from the backward's start; without it they are timed, and backwards before the plan settles are cold. Raises
    ``ConfigError`` in a step in which a parameter gets no gradient.
    """

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
        changes = strategy.changes().items()
        agree_on([f"{name} = {json.dumps(value)}" for name, value in changes], "the strategy", communicators)  # by which groups are made
        self.model = model
        self.strategy = strategy
        self.communicators = communicators
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._members = list(self._parameters.values())
        self._device = self._members[0].device
        self._dtype = self._members[0].dtype
        self.stopwatch = Stopwatch(communicators.rank, keep_times, clock_of(self._device), strategy.fetch_every_n_steps)
        self.step = first_step - 1
        self.on_step: Callable[[int], None] | None = None
        """Hears of every step as it begins."""
        self.on_compute_end: Callable[[], None] | None = None
        """Runs where the backward's computation ends, before anything is waited for."""
        self.on_failure: Callable[[BaseException], None] | None = None
        """Hears of an exception in the middle of a step, after which trainers cannot agree again."""
        self._record = record
        self._initial: State | None = None
        self._planning = Planning(model, self._parameters, strategy, communicators, trainers_per_node, forecast)
        self._phase = "idle"
        self._seen: set[str] = set()
        self._reached: set[str] = set()
        self._keeps = False
        self._executor: Executor | None = None
        self._next_bucket = 0
        agree_on(self._planning.lines(), "the model", communicators)
        refuse_misplaced(model, communicators.device)
        self._num_stepping = 0
        self._decider = self._decide(self._planning.registered(), None)
        self._before = self._decider.mark()
        self._undo = apply_compute(
            model,
            strategy,
            device=self._device,
            group=communicators.statistics if strategy.sync_batch_norm else None,
            errors=communicators.errors,
            scale=lambda: self.loss_scale,
        )
        refuse_sparse(self._planning.sparse, self.executor.combination)
        communicators.prove(1 if strategy.sync_nccl_allreduce else strategy.nccl_comm_num)
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(living_hook(lambda *_: self._forward_begins())),
            model.register_forward_hook(living_hook(lambda _module, _inputs, output: self._forward_ends(output))),
        ]
        hear = self._or_fails(self._gradient_is_there)
        self._nodes = [get_gradient_edge(parameter).node for parameter in self._members]  # which autograd would forget, hooks and all
        for node, (name, parameter) in zip(self._nodes, self._parameters.items(), strict=True):
            self._handles.append(node.register_hook(partial(hear, name, parameter)))  # as DDP: after all hooks of the script's own

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._decider.strategy.plan

    @property
    def num_updates(self) -> int:
        """The last update, counted from 1 as steps are."""
        return self._decider.state.updates

    @property
    def loss_scale(self) -> float:
        """By what the loss is multiplied in the backward under way, or the next."""
        scale = self._decider.state.scale
        return 1.0 if scale is None else scale.value

    @property
    def executor(self) -> Executor:
        """What runs the plan in force."""
        assert self._executor is not None
        return self._executor

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let ``optimizer.step()`` be the update. Raises ``ConfigError`` for one that the strategy cannot control."""
        self._handles.append(optimizer.register_step_pre_hook(lambda _optimizer, arguments, named: self._update_begins(arguments, named)))
        self._handles.append(optimizer.register_step_post_hook(lambda *_: self._or_fails(self._update_ends)()))
        slots = self.executor.attach(optimizer)
        if slots:
            self._planning.setting = dataclasses.replace(self._planning.setting, num_state_slots=slots)
            self._decider = self._decide(self._planning.registered(), None)

    def report(self, loss: torch.Tensor | float) -> None:
        """Tell the step's loss, one number; adaptive steps need it before the optimizer's step. Raises ``ConfigError`` for several."""
        told = torch.as_tensor(loss).detach()
        if told.numel() != 1:
            raise ConfigError(
                "the loss is one number", "fleet.report(loss=...)", f"a tensor of shape {list(told.shape)}", "report loss.mean()"
            )
        self.executor.loss = told.to(self._device, non_blocking=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards inside leave their gradients in ``.grad``, on this rank alone; the next one outside exchanges the sum."""
        before, self._keeps = self._keeps, True
        try:
            yield
        finally:
            self._keeps = before

    def end_epoch(self) -> None:
        """The data of an epoch are used up; every trainer says so after the same step."""
        self._run_between(EpochEnd())

    def flush(self, *, end: bool = False) -> None:
        """Make the trainers agree, as a model that is read must; ``end``: no step follows. Its time belongs to the step done last."""
        self._run_between(DataEnd() if end else Flush())

    def progress(self, where: str) -> Progress:
        """What ``resume`` needs; ``where`` asks. Raises ``ConfigError`` in the middle of a step, unless its gradients were thrown away."""
        dropped = self._phase == "update" and _is_dropped(self.executor.combination, self._members)
        if not dropped:
            refuse_in_step(self._phase, where)
        return Progress(
            state=self._before[0] if dropped else self._decider.state,
            order=dict(self._planning.order),
            settled=self._initial is not None,
            cost=self._planning.setting.cost,
            plan=self.plan.digest,
        )

    def resume(self, progress: Progress, carried: Carried, where: str) -> None:
        """Go on where ``progress`` was taken, by the same plan, with what the step before it left.

        Every rank calls it; parameters, buffers and the optimizer's state are put in place after it.

        Raises ``ConfigError`` in the middle of a step, and where another plan would come of it.
        """
        refuse_in_step(self._phase, where)
        planning = self._planning
        order = list(progress.order) if progress.settled else planning.registered()
        before = planning.order, planning.setting
        planning.resume(progress.order if progress.settled else {}, progress.cost)
        plan = planning.plan(order)
        if progress.plan is not None and plan.digest != progress.plan:
            planning.order, planning.setting = before
            what = "this model and these trainers make another plan than was saved"
            hint = "start as many trainers a node, with the same model, as were saved"
            raise ConfigError(what, where, f"plan {plan.digest}, saved {progress.plan}", hint)
        if progress.settled:
            self._stay(progress.state, carried)
        else:
            self._initial = None
            self._decider = self._decide(order, None, carried)
            self._decider.state = progress.state
            planning.order = dict(progress.order)
        self.step = progress.state.next_step - 1
        for parameter in self._parameters.values():
            parameter.grad = None

    def recordings(self) -> list[Recording]:
        """This rank's events and operations since the plan was settled, where asked for: one, or none."""
        if self._initial is None or self._decider.log is None:
            return []
        return [self._decider.recording()]

    def close(self) -> None:
        """Remove every hook, and leave model and optimizer with storage of their own."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()
        self.communicators.order_lanes()
        self._undo()
        for parameter in self._parameters.values():
            parameter.grad = None

    def _decide(self, order: Sequence[str], state: State | None, carried: Carried | None = None) -> Decider:
        """Plan for gradients in this order, and make what the plan needs; ``carried`` takes the place of what the last step has left."""
        plan = self._planning.plan(order)
        self.communicators.require(self.strategy.nccl_comm_num, plan.parts)
        agree_on([plan.digest], "the plan of exchanges", self.communicators)
        if state is None:  # all ranks start from rank 0's parameters and buffers
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                self.communicators.broadcast(tensor.detach())
        self._bucket_of = {name: bucket.id for bucket in plan.buckets for name in bucket.gradients}
        strategy = family(self.strategy, plan)
        optimizer = None
        if self._executor is not None:
            carried, optimizer = carried or self._executor.carried(), self._executor.optimizer
        self._executor = None  # and its buffers, before there are new ones
        carried = carried or Carried()
        self._executor = Executor(self.model, self._parameters, strategy, self.communicators, self.stopwatch, carried, optimizer)
        if state is None:
            return Decider.start(strategy, self.communicators.rank, first_step=self.step + 1)
        return Decider.start(strategy, self.communicators.rank, record=self._record, state=state)

    def _or_fails(self, part: Callable[..., None]) -> Callable[..., None]:
        """A part of a step that tells ``on_failure`` what it raises."""

        def run(*arguments: Any) -> None:
            try:
                part(*arguments)
            except Exception as error:
                if self.on_failure is not None:
                    self.on_failure(error)
                raise

        return run

    def _forward_begins(self) -> None:
        self._num_stepping = 0  # the optimizer's step may have raised, and the loop goes on
        refuse_unfinished(self._phase, self.communicators.rank)
        if not torch.is_grad_enabled() or not self.model.training:
            return
        if self._phase == "kept":
            self._phase = "forward"
        if self._phase != "idle":
            return
        refuse_moved(self._members[0], self._dtype, self._device)
        self._phase = "forward"
        self.step += 1
        self._reached.clear()
        self._next_bucket = self._num_stepping = 0
        self.stopwatch.begin_step(self.step)
        self._before = self._decider.mark()
        self.executor.begin_step(self.step, started(self._tell(StepBegin(self.step))))
        if self.on_step is not None:
            self.on_step(self.step)

    def _forward_ends(self, output: Any) -> None:
        if self._phase not in ("forward", "kept", "update") or not torch.is_grad_enabled():
            return
        if self.model.training:
            self.stopwatch.forward_ends()
        for tensor in _tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _gradient: self._backward_begins())

    def _backward_begins(self) -> None:
        if self._phase not in ("forward", "kept", "update"):
            return
        if self._keeps:
            if self._phase == "update":
                self._begin_again(dropped=False)
            self._phase = "kept"
            return
        self._behind, self._phase = self._phase, "backward"
        what = self.executor.combination
        self._dropped = self._behind == "update" and (what.is_local or what.finds_unused) and _is_cleared(self._members)
        if what.updates_by_bucket:
            self._comes()  # before autograd finds that the parameters it has saved were updated
        self._seen.clear()
        self._num_missing = [len(bucket.gradients) for bucket in self.plan.buckets]
        self._backward_begin_ns = time.monotonic_ns()
        self.executor.begin_backward()
        Variable._execution_engine.queue_callback(self._or_fails(self._backward_ends))  # noqa: SLF001  # as DDP learns of the backward's end

    def _begin_again(self, *, dropped: bool) -> None:
        """A backward comes before the last one's update: what lies in ``.grad`` is exchanged again, and nothing was decided before."""
        refuse_again(self.executor.combination, is_attached=self.executor.optimizer is not None, dropped=dropped)
        if dropped:
            self._reached.clear()  # what a loss reached whose gradients were thrown away is unused all the same
        self._decider.rewind(self._before)
        self._next_bucket = 0
        started(self._tell(StepBegin(self.step)))
        self.executor.begin_again()

    def _comes(self) -> None:
        """The backward under way is one, and not a ``torch.autograd.grad``: it has left a gradient."""
        if self._behind == "update":
            self._behind = "forward"
            self._begin_again(dropped=self._dropped)

    def _gradient_is_there(self, name: str, parameter: torch.Tensor, *_: object) -> None:
        """Autograd has left a gradient; called for every parameter, so what happens in nearly every call comes first."""
        if self._phase != "backward":
            self._backward_begins()
        if self._phase not in ("backward", "kept") or (name in self._seen and self._phase == "backward"):
            refuse_stray(name, self.model)
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse != (name in self._planning.sparse):
            refuse_unknown_sparse(name, gradient, self._planning.sparse)
        if self._phase == "kept":
            self._reached.add(name)
            return
        self._comes()  # before the name is noted: where a step begins again, what was reached is forgotten
        self._reached.add(name)
        self._seen.add(name)
        if self._initial is None:
            self._planning.order[name] = time.monotonic_ns() - self._backward_begin_ns
        self._num_missing[self._bucket_of[name]] -= 1
        while self._next_bucket < len(self._num_missing) and self._num_missing[self._next_bucket] == 0:
            self._start_bucket()

    def _start_bucket(self) -> None:
        bucket, begin = self._next_bucket, self.stopwatch.now()
        operations = started(self._tell(BucketReady(bucket)))
        self._next_bucket += 1
        self.executor.start(operations)
        if operations:
            self.stopwatch.started(bucket, begin)

    def _backward_ends(self) -> None:
        if not self._seen:  # it has left no gradient
            self._phase = self._behind
            return
        self._comes()
        if self.on_compute_end is not None:
            self.on_compute_end()
        self.stopwatch.backward_ends()
        unused = tuple(sorted(self._parameters.keys() - self._reached))
        if unused and not self.executor.combination.finds_unused:
            refuse_unused(unused, len(self._parameters))
        while self._next_bucket < len(self.plan.buckets):
            self._start_bucket()
        requests = self._tell(BackwardEnd(unused=unused))
        self._phase = "update"
        self.executor.end_backward(requests, unused, self.loss_scale)

    def _update_begins(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
        if self._num_stepping == 0:
            refuse_arguments(arguments, named)
            refuse_update(self._phase, self._members, self.model)
            refuse_scaler(self.executor.combination)
        self._num_stepping += 1
        if self._phase == "update" and self._num_stepping == 1:  # a subclass's step calls that of its base, hooks and all
            self.stopwatch.update_begins()
            self.executor.begin_update()

    def _update_ends(self) -> None:
        self._num_stepping = max(0, self._num_stepping - 1)
        if self._phase != "update" or self._num_stepping:
            return
        self.executor.end_update()
        self.stopwatch.update_ends()
        self._note_round(self._before[0])
        self._phase = "idle"
        state = self._decider.state
        if self._initial is None and not state.merged and state.flight is None:  # what waits lies in this plan's buckets
            self._planning.settle()
            self._stay(state)

    def _run_between(self, event: Event) -> None:
        """Tell the strategy of an event between steps, and do what it says; gradients that wait in ``.grad`` wait on."""
        what = self.executor.combination
        dropped = self._phase == "update" and _is_dropped(what, self._members)
        begun = dropped or (self._phase == "kept" and not what.merges)
        if begun:
            self._decider.rewind(self._before)
        else:
            refuse_in_step(self._phase, type(event).__name__)
        state = self._decider.state
        self.executor.run_between(self._tell(event))
        self._note_round(state)
        if begun:
            self._before = self._decider.mark()
            started(self._tell(StepBegin(self.step)))
            self.executor.begin_again()

    def _tell(self, event: Event) -> Requests:
        return tell(self._decider, event, time.monotonic_ns)

    def _note_round(self, before: State) -> None:
        """Note the length of a round that lies closed since ``before``."""
        local_steps = closed_round(before, self._decider.state)
        if local_steps is not None:
            self.stopwatch.closes_round(local_steps)

    def _stay(self, state: State, carried: Carried | None = None) -> None:
        """Plan by the order of readiness that is known, and keep that plan."""
        self._initial = state
        self._decider = self._decide(list(self._planning.order), state, carried)


def _tensors_of(output: Any) -> list[torch.Tensor]:
    """The tensors of a model's output, in any nest of containers and dataclasses."""
    found = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += _tensors_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return found


def _is_dropped(what: Combination, gradients_of: Sequence[nn.Parameter]) -> bool:
    """Whether the gradients of a backward are thrown away, and its step never was: cleared, or no numbers, which a GradScaler leaves out.

    Only where a second backward could take their place.
    """
    if not what.leaves_averages:
        return False
    return _is_cleared(gradients_of) or not all(values.isfinite().all() for values in _values(gradients_of))


def _is_cleared(gradients_of: Sequence[nn.Parameter]) -> bool:
    return not any(values.any() for values in _values(gradients_of))


def _values(gradients_of: Sequence[nn.Parameter]) -> Iterator[torch.Tensor]:
    gradients = (parameter.grad for parameter in gradients_of if parameter.grad is not None)
    return (gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients)
