"""Training by collectives: gradient accumulation, averaging schedule, exchange and loss scaling combined.

Synchronous training averages every bucket when it is ready, then updates once. This equals
DistributedDataParallel, and one process with the joint batch. With Local SGD, trainers update alone, and
average parameters when the cadence says so, by their delta from a snapshot: ``p = snapshot + mean(p -
snapshot)``. An outer optimizer may step on that mean, and fragments of the model may have their own rounds
(``fleetbench.plan.outer``). If training ends, or the model is read, between two averagings, trainers average
first (Fleet does not): fragments in flight are merged, then the rest is exchanged. With gradient merge,
several steps share an update; a cadence counts updates.
"""

from typing import Literal

from fleetbench.fields import named
from fleetbench.plan.build import Plan
from fleetbench.plan.combination import Combination
from fleetbench.plan.events import BackwardEnd, BlockBegin, BucketReady, DataEnd, EpochEnd, Event, Flush, Observed, StepBegin
from fleetbench.plan.operations import Operation, Operations
from fleetbench.plan.state import State
from fleetbench.plan.steps import StepKind, StepOperations, agreement_of, average_of, operations_of, remainder_of
from fleetbench.strategy import DistributedStrategy

PLANNED = named("plan")
"""Dotted names of the strategy's fields that executors of a plan carry out; changes to others are refused."""


class CollectiveTraining:
    """Decides for trainers that communicate by collectives."""

    def __init__(self, plan: Plan, combination: Combination) -> None:
        self.plan = plan
        self.payload: Literal["gradient", "delta"] = "delta" if combination.is_local else "gradient"
        self.observes = combination.observes
        self.combination = combination
        """Settings that are the same in every step. Executors use them instead of the strategy's fields."""
        self._known: dict[StepKind, StepOperations] = {}

    def init(self, role: str, rank: int, first_step: int = 1) -> State:  # noqa: ARG002  # the protocol has other roles, too
        """Return the state before the first step, which has a number below 1 if training warms up."""
        before, phase = divmod(first_step - 1, self.combination.steps_per_update)
        cadence = self.combination.cadence
        return State(
            first_step=first_step,
            phase=phase,
            origin=before,
            updates=before,
            last_sync=before if cadence is not None and cadence.begin_step == 0 else None,
            rounds=self.combination.adaptive.start() if self.combination.adaptive else None,
            scale=self.combination.scaler.start() if self.combination.scaler else None,
        )

    def on(self, state: State, now_ns: int, event: Event) -> tuple[State, Operations]:  # noqa: ARG002, PLR0911  # nothing is decided from the clock; one line an event
        """Return the new state, and the operations to start now.

        ``fleetbench.plan.drive`` defines the events and their order.
        """
        match event:
            case StepBegin(step):
                assert not state.in_step, "a step ends before the next begins; found_inf is still to be told"
                begun = state._replace(step=step, in_step=True, step_id=state.next_id)
                return self._issue(begun, self._operations(self._kind(begun)).on_begin)
            case BlockBegin(block, phase):
                found = self._operations(self._kind(state))
                return self._issue(state, (found.on_forward if phase == "forward" else found.on_backward)[block])
            case BucketReady(bucket):
                return self._issue(state, self._operations(self._kind(state)).on_bucket[bucket])
            case BackwardEnd():
                return self._end_backward(state)
            case Observed():
                return self._observe(state, event)
            case EpochEnd():
                return self._end_epoch(state)
            case DataEnd() | Flush():
                return self._agree(state)
            case _:
                return state, ()

    def closes(self, state: State) -> bool:
        """Whether the current step ends an update, so that its backward may exchange gradients."""
        return self._kind(state).closes

    def has_agreed(self, state: State) -> bool:
        """Whether no trainer has updated alone since all of them last agreed on the whole model."""
        return state.updates in (state.last_sync if self.combination.fragments is None else state.agreed, state.origin)

    def whole_step(self, state: State) -> tuple[State, StepOperations | None]:
        """Decide the next step at once, with the same result as ``on`` for each of its events.

        ``state`` is between two steps. Returns None and the same state if the step observes a scalar. Only
        the executor knows when the learning rate changes, so it must not call this for a step whose ``merge``
        is followed by a new rate.
        """
        assert not state.in_step
        kind = self._kind(state)
        untold = kind.meets and state.rounds is not None and state.rounds.lr is None
        if kind.asks_loss or untold or (kind.closes and self.combination.scales):
            return state, None
        whole, first_id = self._operations(kind), state.next_id
        begun = state._replace(step=state.next_step, step_id=first_id, next_id=first_id + whole.num_operations)
        return self._after_update(begun, kind), whole

    def _kind(self, state: State, *, flushes: bool = False) -> StepKind:
        """Return the kind of the current or next step.

        ``flushes`` means the update at the end of an epoch, from the gradients summed so far.
        """
        what, update = self.combination, state.updates + 1
        closes = flushes or state.phase + 1 == what.steps_per_update
        k = state.rounds.k if state.rounds else 0
        meets = closes and what.cadence is not None and what.cadence.synchronises(update, state.last_sync, k, state.epoch)
        asks_loss = False
        if meets and what.adaptive is not None and state.rounds is not None:
            asks_loss = what.adaptive.wants_loss(state.rounds, update, state.epoch_ended)
        merged = state.merged + (not flushes)
        if not closes or what.fragments is None:
            return StepKind(closes=closes, merged=merged, meets=meets, asks_loss=asks_loss)
        if update < what.fragments.begin_step:  # the whole model is exchanged
            return StepKind(closes=True, merged=merged, meets=True, asks_loss=False)
        done = update - (state.origin if state.last_sync is None else state.last_sync)
        starts = done == what.fragments.period - what.fragments.overlap
        merges = done == what.fragments.period
        first_id = state.step_id if state.in_step else state.next_id
        return StepKind(
            closes=True,
            merged=merged,
            meets=False,
            asks_loss=False,
            starts=state.fragment if starts else None,
            merges=state.fragment if merges else None,
            flight=state.flight - first_id if merges and state.flight is not None else None,
        )

    def _operations(self, kind: StepKind) -> StepOperations:
        if kind not in self._known:
            self._known[kind] = operations_of(self.plan, self.combination, kind)
        return self._known[kind]

    def _issue(self, state: State, operations: Operations) -> tuple[State, Operations]:
        """Return the new state, and the operations of the current step with their final ids."""
        if not operations:
            return state, ()
        issued = tuple(operation.shifted(state.step_id) for operation in operations)
        return state._replace(next_id=issued[-1].id + 1), issued

    def _between(self, state: State, operations: Operations) -> tuple[State, Operations]:
        """Return the new state, and operations between steps with their final ids."""
        return self._issue(state._replace(step_id=state.next_id), operations)

    def _after_update(self, state: State, kind: StepKind) -> State:
        if not kind.closes:
            return state._replace(in_step=False, phase=state.phase + 1, merged=kind.merged)
        update, rounds = state.updates + 1, self.combination.fragments
        agreed = kind.meets or not self.combination.is_local
        last_sync = update if agreed or kind.merges is not None else state.last_sync
        epoch_ended = state.epoch_ended and not kind.asks_loss
        if rounds is not None:
            if kind.merges is not None:
                agreed = rounds.number == 1 and rounds.mixing == 0
                state = state._replace(flight=None, fragment=(kind.merges + 1) % rounds.number)
            elif kind.starts is not None:
                state = state._replace(flight=state.step_id + self._operations(kind).flight)
            state = state._replace(agreed=update if agreed else state.agreed)
        return state._replace(in_step=False, phase=0, merged=0, updates=update, last_sync=last_sync, epoch_ended=epoch_ended)

    def _end_backward(self, state: State) -> tuple[State, Operations]:
        assert state.in_step, "StepBegin comes before BackwardEnd"
        kind = self._kind(state)
        state, operations = self._issue(state, self._operations(kind).on_backward_end)
        waits = kind.closes and self.combination.scales
        return (state if waits else self._after_update(state, kind)), operations

    def _agree(self, state: State) -> tuple[State, Operations]:
        """Average trainers that have updated alone since they last agreed."""
        rounds = self.combination.fragments
        if not self.combination.is_local or self.has_agreed(state):
            return state, ()
        if rounds is not None:
            landing = None if state.flight is None else state.fragment
            flight = None if state.flight is None else state.flight - state.next_id
            fresh = state.updates == state.last_sync and not rounds.mixing
            merged = (state.fragment - 1) % rounds.number if fresh else None
            operations = agreement_of(self.plan, self.combination, landing=landing, flight=flight, agreed=merged)
            return self._between(state._replace(last_sync=state.updates, agreed=state.updates, flight=None, fragment=0), operations)
        return self._between(state._replace(last_sync=state.updates), average_of(self.plan, self.combination))

    def _observe(self, state: State, event: Observed) -> tuple[State, Operations]:
        scaler, adaptive = self.combination.scaler, self.combination.adaptive
        if event.name == "found_inf" and scaler is not None and state.scale is not None and state.in_step:
            kind = self._kind(state)
            found = self._operations(kind)
            overflow = event.value != 0
            scale = scaler.after(state.scale, overflow)
            state, operations = self._issue(state, found.on_overflow if overflow else found.on_finite)
            return self._after_update(state, kind)._replace(scale=scale), operations
        if event.name == "lr" and adaptive is not None and state.rounds is not None:
            return state._replace(rounds=adaptive.on_lr(state.rounds, event.value)), ()
        if event.name == "loss" and adaptive is not None and state.rounds is not None:
            return state._replace(rounds=adaptive.on_loss(state.rounds, event.value, state.updates)), ()
        return state, ()

    def _end_epoch(self, state: State) -> tuple[State, Operations]:
        """Carry merged gradients over to the next epoch (as Fleet does), apply them as an update, or drop them."""
        state = state._replace(epoch=state.epoch + 1, epoch_ended=True)
        if self.combination.remainder == "carry" or not state.merged:
            return state, ()
        if self.combination.remainder == "drop":
            dropped = Operation(id=0, kind="reset", payload="gradient")
            return self._between(state._replace(phase=0, merged=0), (dropped,))
        kind = self._kind(state, flushes=True)
        return self._between(self._after_update(state, kind), remainder_of(self.plan, self.combination, kind))


def begin_anew(saved: State, strategy: CollectiveTraining, rank: int, *, same_strategy: bool) -> State:
    """Return the state with which trainers restart from ``saved`` under ``strategy``, with equal parameters.

    What the old trainers had begun together ends: a round of Local SGD, because all start from the average; a
    gradient merge, because its sum is lost.

    Steps, epochs and the loss scale continue. With the same strategy, so do updates, and the K of an adaptive
    round with all that it depends on. With another strategy, the number of updates is computed from the
    number of steps, because an update may have another number of steps.
    """
    if same_strategy:
        agreed = saved.last_sync if saved.updates == saved.origin else saved.updates
        return saved._replace(in_step=False, phase=0, merged=0, last_sync=agreed, agreed=agreed, flight=None, fragment=0)
    fresh = strategy.init("trainer", rank, saved.next_step)
    scale = fresh.scale if fresh.scale is None or saved.scale is None else saved.scale
    return fresh._replace(phase=0, epoch=saved.epoch, epoch_ended=saved.epoch_ended, scale=scale)


def family(strategy: DistributedStrategy, plan: Plan) -> CollectiveTraining:
    """Return the object that decides for trainers under ``strategy``."""
    return CollectiveTraining(plan, Combination.of(strategy))
