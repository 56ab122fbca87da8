"""FleetEngine: the engine of one of several models that a process trains."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fleetbench.plan.drive import started
from fleetbench.plan.events import BackwardEnd, StepBegin
from fleetbench.plan.state import State
from real.engine.buckets import GradientBucket
from real.engine.engine import Engine
from real.engine.gradients import is_cleared
from real.engine.phase import Phase
from real.engine.refusals import refuse_in_step, refuse_open, refuse_uneven


class FleetEngine(Engine):
    """An engine that knows the engines of the process's other models.

    A backward may pass through several models, as a generator's loss passes through the discriminator; all of them
    exchange their gradients in it. If another model is then updated and this one is not, this model's step counts as
    not begun: the script may discard the gradients, or leave them for the next backward to add to.
    """

    announce: Callable[[], None] | None = None
    """Announces an exchange of gradients to trainers without data; None with even inputs."""
    _task = -1
    """Autograd's number of the last backward that left gradients in this model."""

    def __init__(self, *arguments: Any, company: Iterable["FleetEngine"] = (), **named: Any) -> None:
        """See ``Engine``; ``company``: the engines of all of the process's models, iterated anew at each use."""
        self._company = company
        super().__init__(*arguments, **named)

    def retire(self, where: str) -> None:
        """Close between two steps, so that another engine can take over the model; gradients stay.

        Raises ``ConfigError`` in the middle of a step, a round of local steps or a gradient merge.
        """
        if self._updates.has_begun:
            refuse_in_step(self._phase, where)
        self._between(where)
        refuse_open(self.has_agreed, self._decider.state.merged, where)
        self._num_moves += 1  # a backward of an earlier forward would find no hooks
        gradients = [parameter.grad for parameter in self.model.parameters()]
        self.close()
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient

    def inherit(self, optimizers: Iterable[Optimizer]) -> None:
        """Attach those optimizers of the previous engine whose trained parameters are all known to fleet."""
        for optimizer in optimizers:
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if {id(parameter) for parameter in held if parameter.requires_grad} <= self._known():
                self.attach_optimizer(optimizer)

    def hear_update(self, task: int) -> None:
        """Note that another model was updated after the backward with autograd's number ``task``."""
        what = self.executor.combination
        takes_back = not (what.merges or what.updates_by_bucket or what.scales)
        self._is_passed |= takes_back and (self._phase, self._task) == (Phase.UPDATE, task)

    def begin_uneven(self, where: str) -> None:
        """Settle the plan before trainers with different numbers of batches take different steps."""
        refuse_uneven(self.executor.combination, self.strategy, where)
        self._between(where)
        if self._initial is None:
            self._planning.settle()
            self._stay(self._decider.state)

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward has reached this model and has not ended."""
        return self._phase == Phase.BACKWARD

    @property
    def is_exchanging(self) -> bool:
        """Whether the current backward has started the exchange of some buckets, but not of all."""
        return self._phase == Phase.BACKWARD and 0 < self._next_bucket < len(self.plan.buckets)

    def shadow_backward(self) -> None:
        """Take part, with zeros, in a backward of the trainers that have data; gradients and state stay as they are."""
        mark, gradients, storage = self._decider.mark(), [parameter.grad for parameter in self._members], self.executor.storage
        if self._phase != Phase.IDLE:
            self._decider.rewind(self._before)
        for parameter in self._members:
            parameter.grad = None
        for gathered in storage.gradients:
            if isinstance(gathered, GradientBucket):
                storage.place(gathered.id, torch.zeros_like(gathered.buffer))
        started(self._tell(StepBegin(self._decider.state.next_step)))
        self._next_bucket = 0
        self._start_last()
        if self._reducer is not None:
            self._reducer.shadow_flags()
        self.executor.end_backward(self._tell(BackwardEnd()), (), 1.0)
        self._unused.clear()
        self.executor.begin_again()
        self._decider.rewind(mark)
        for parameter, gradient in zip(self._members, gradients, strict=True):
            parameter.grad = gradient

    def end_uneven(self, source: int) -> None:
        """Take the parameters, buffers and training state of rank ``source``, on every rank."""
        state = self._decider.state if self._phase == Phase.IDLE else self._before[0]
        buffers = self.model.buffers() if self.plan.buffers_nbytes else ()
        for tensor in (*self.model.parameters(), *buffers):
            self.communicators.broadcast(tensor.detach(), source=source)
        if self.meeting is not None:
            told = self.meeting.texts(json.dumps(state.to_dict()))
            self._decider.state = State.from_dict(json.loads(told[source]))
            self.step, self._phase = self._decider.state.next_step - 1, Phase.IDLE

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that this engine trains."""
        return self._members

    def _known(self) -> set[int]:
        return {id(parameter) for engine in (self, *self._company) for parameter in engine.trained()}

    def _rests(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer also steps another model, and this model has no gradients now."""
        what = self.executor.combination
        is_shared = any(engine is not self and any(own is optimizer for own in engine.optimizers) for engine in self._company)
        if self._phase not in (Phase.IDLE, Phase.FORWARD, Phase.KEPT) or not is_shared:
            return False
        return is_cleared(self._members) if what.leaves_averages else all(parameter.grad is None for parameter in self._members)

    def _backward_comes(self) -> None:
        super()._backward_comes()
        if any(other is not self and other.is_in_backward for other in self._company):
            self.communicators.order_several()
        if self.announce is not None:
            with self._taken_back():
                self.announce()
        self._task, self._is_passed = torch._C._current_graph_task_id(), False  # noqa: SLF001  # as register_multi_grad_hook asks

    def _update_ends(self) -> None:
        super()._update_ends()
        for other in self._company:
            other.hear_update(self._task)

    def _between(self, where: str, *, may_wait: bool = False) -> bool:
        """See ``Engine``; a step whose backward was for another model, which was updated, is taken back first."""
        self._updates.end_open()
        if self._is_passed and self._phase == Phase.UPDATE:
            self._take_back()
        return super()._between(where, may_wait=may_wait)

    def _begin_step(self) -> None:
        with self._taken_back():
            super()._begin_step()

    @contextmanager
    def _taken_back(self) -> Iterator[None]:
        """Take the current step back if torch's ``Join`` raises because a trainer has no more data."""
        try:
            yield
        except RuntimeError:
            if self.announce is not None:
                self._take_back()
            raise

    def _take_back(self) -> None:
        """Count the current step as not begun; gradients stay where they are."""
        self._decider.rewind(self._before)
        self.executor.begin_again()
        self.step, self._phase, self._is_passed = self.step - 1, Phase.IDLE, False
