"""Protocol between executors and strategies: which events a trainer reports, when, and what it does then.

Both engines of the simulator, the real engine and the contract test all run this code. An executor iterates
over ``events_of`` a step, makes each event happen (for example, computes until a bucket's gradients are
ready), and then does what ``tell`` yields, one after the other:

    for request in tell(decider, event, now):
        if isinstance(request, Wanted):
            request.value = ...  # the scalar of that name
        else:
            ...  # execute request.operations

``Flush`` is also reported between steps, whenever the model is read. A strategy never handles two events at
once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from fleetbench.plan.build import Plan
from fleetbench.plan.events import BackwardEnd, DataEnd, EpochEnd, Event, Observed, StepBegin
from fleetbench.plan.operations import Operations
from fleetbench.plan.replay import Decider

Scalar = Literal["found_inf", "lr", "loss"]


@dataclass(frozen=True, slots=True)
class Decided:
    """The strategy's answer to an event: operations to start now, in this order."""

    event: Event
    operations: Operations


@dataclass(slots=True)
class Wanted:
    """A scalar that the strategy observes. The executor sets ``value``, which must be equal on every rank.

    ``found_inf`` is not 0 if some trainer's gradients overflowed, which is known once everything started by
    the end of the backward has ended. ``lr`` and ``loss`` are means over the trainers, after a merge.
    """

    name: Scalar
    value: float = 0.0


Requests = Iterator[Decided | Wanted]


def events_of(plan: Plan, step: int, steps_per_epoch: int | None = None, last_step: int | None = None) -> Iterator[Event]:
    """Yield the events of one step, and those before the next step."""
    yield StepBegin(step)
    yield from plan.moments
    yield BackwardEnd()
    if ends_epoch(step, steps_per_epoch):
        yield EpochEnd()
    if step == last_step:
        yield DataEnd()


def ends_epoch(step: int, steps_per_epoch: int | None) -> bool:
    """Whether an epoch's data are used up after ``step``; warm-up steps, below 1, belong to no epoch."""
    return steps_per_epoch is not None and step >= 1 and step % steps_per_epoch == 0


def tell(decider: Decider, event: Event, now: Callable[[], int]) -> Requests:
    """Report an event to the strategy, then each scalar that the strategy observes as a result.

    Yields decisions to execute (``Decided``) and scalars to provide (``Wanted``). ``now`` returns the time in
    ns.
    """
    operations = decider.on(now(), event)
    yield Decided(event, operations)
    observes = decider.strategy.observes
    kinds = {operation.kind for operation in operations}
    if isinstance(event, BackwardEnd) and "found_inf" in observes and not kinds & {"update", "skip"}:  # the update depends on it
        yield from _observe(decider, "found_inf", now)
    if "merge" in kinds and "lr" in observes:
        yield from _observe(decider, "lr", now)
    if "loss" in observes and any(operation.payload == "loss" for operation in operations):
        yield from _observe(decider, "loss", now)


def started(requests: Requests) -> Operations:
    """Return the operations that an event starts: its first request."""
    decided = next(requests)
    assert not isinstance(decided, Wanted)
    return decided.operations


def _observe(decider: Decider, name: Scalar, now: Callable[[], int]) -> Requests:
    wanted = Wanted(name)
    yield wanted
    rounds = decider.state.rounds
    if name == "lr" and rounds is not None and rounds.lr == wanted.value:
        return  # already reported
    yield from tell(decider, Observed(name, wanted.value), now)


def answers(decider: Decider, event: Event, source: Callable[[Scalar], float], now: Callable[[], int] = lambda: 0) -> Iterator[Decided]:
    """Yield all decisions that follow from an event, for an executor that knows all scalars.

    ``source`` returns the value of a scalar by its name; ``now`` returns the time in ns.
    """
    for request in tell(decider, event, now):
        if isinstance(request, Wanted):
            request.value = source(request.name)
        else:
            yield request
