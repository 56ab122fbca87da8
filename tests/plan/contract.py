"""The contract of every strategy, as a test class: a new strategy overrides ``strategy`` and inherits the tests."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbench.plan.drive import answers, events_of
from fleetbench.plan.events import BackwardEnd, DataEnd, EpochEnd, Event, Flush, Message, Observed, StepBegin, TimerFired
from fleetbench.plan.operations import COLLECTIVES, Operation, Operations
from fleetbench.plan.replay import Decider, Recording
from fleetbench.plan.state import State
from fleetbench.plan.steps import StepOperations
from fleetbench.plan.training import CollectiveTraining

STEPS_PER_EPOCH = 7
LR_PERIOD = 12
EXAMPLES = settings.default.max_examples // 3
"""Of each of sixty strategies: 8 in `make test`, 16 in `make test-all`, 50 in all."""

NEEDED = {"update": ("gradient", "rows", "unused", "found_inf"), "merge": ("delta", "state", "buffers", "agreement", "loss")}
"""Payloads that must have arrived before an operation of the rank."""

Source = Callable[[str, int], float]
"""A scalar by name and step."""


def scalar(name: str, step: int) -> float:
    """What the trainers of the contract observe: overflows now and then, a loss that falls to 0.7, a learning rate that halves."""
    if name == "found_inf":
        return float(step % 9 in (0, 2, 3))
    if name == "lr":
        return 0.1 * 0.5 ** (max(step - 1, 0) // LR_PERIOD)
    assert name == "loss"
    return 0.7 + 2 * math.exp(-step / 20)


def run(decider: Decider, event: Event, step: int, source: Source = scalar) -> tuple[Operations, ...]:
    """The operations of an event, and of each scalar told because of it."""
    return tuple(decided.operations for decided in answers(decider, event, lambda name: source(name, step), lambda: 1000 * step))


def run_step(decider: Decider, step: int, source: Source = scalar) -> tuple[Operations, ...]:
    """One whole step; the operations of its beginning, of each bucket, of its backward's end, and of each scalar told."""
    return tuple(operations for event in events_of(decider.strategy.plan, step) for operations in run(decider, event, step, source))


def drive(decider: Decider, steps: Iterable[int], source: Source = scalar) -> list[tuple[int, tuple[Operations, ...]]]:
    """Run whole steps; every step with the operations of each of its events."""
    return [(step, run_step(decider, step, source)) for step in steps]


def expanded(state: State, shape: StepOperations) -> tuple[Operations, ...]:
    """The step that follows ``state``: the operations of each of its events, ids as ``on`` gives them."""
    events = (shape.on_begin, *shape.on_bucket, shape.on_backward_end)
    return tuple(tuple(operation.shifted(state.next_id) for operation in event) for event in events)


def flat(events: Iterable[Operations]) -> Operations:
    """All operations, in order."""
    return tuple(operation for operations in events for operation in operations)


def closure(operation: int, after: dict[int, tuple[int, ...]]) -> set[int]:
    """All operations that one waits for, directly or not."""
    found: set[int] = set()
    open_ids = list(after[operation])
    while open_ids:
        current = open_ids.pop()
        if current not in found:
            found.add(current)
            open_ids += after[current]
    return found


def awaited(operations: Operations) -> set[int]:
    """The operations for which a rank waits: those before its own, and rank 0's buffers."""
    after = {operation.id: operation.after for operation in operations}
    needed = {operation.id for operation in operations if brings_buffers(operation)}
    return needed.union(*(closure(operation.id, after) for operation in operations if operation.kind not in COLLECTIVES))


def brings_buffers(operation: Operation) -> bool:
    """Whether it brings rank 0's, for which a rank waits at once."""
    return (operation.kind, operation.payload) == ("broadcast", "buffers")


def _record(strategy: CollectiveTraining, rank: int = 0) -> Recording:
    decider = Decider.start(strategy, rank, record=True, first_step=-4)
    for step in range(-4, 41):
        run_step(decider, step)
        if step > 0 and step % STEPS_PER_EPOCH == 0:
            run(decider, EpochEnd(), step)
        if step in (6, 30):
            run(decider, Flush(), step)
    run(decider, DataEnd(), 40)
    return decider.recording()


class StrategyContract:
    """What an executor relies on, for any strategy of a trainer."""

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls) -> CollectiveTraining:
        """The strategy under test: one for all tests, because it holds no state."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def recorded(cls, strategy: CollectiveTraining) -> Recording:
        """A run of five warm-up and 40 counted steps in epochs of seven, read twice and ended."""
        return _record(strategy)

    @pytest.fixture(scope="class")
    @classmethod
    def updates(cls, recorded: Recording, strategy: CollectiveTraining) -> list[Operations]:
        """The operations of the recorded run, cut after each step and each event between steps."""
        cut: list[Operations] = []
        for _, event, operations in recorded.log:
            if isinstance(event, StepBegin | EpochEnd | Flush | DataEnd):
                cut.append(operations)
            else:
                cut[-1] += operations
        assert strategy.plan.buckets
        return cut

    def test_a_recorded_run_replays_to_the_same_operations(self, strategy: CollectiveTraining, recorded: Recording) -> None:
        """The same events give the same operations, at whatever time they come."""
        expected = [operations for _, _, operations in recorded.log]
        assert recorded.replayed(strategy) == expected
        later = tuple((7 * now + 1, event, operations) for now, event, operations in recorded.log)
        assert dataclasses.replace(recorded, log=later).replayed(strategy) == expected
        assert any(expected)

    def test_a_recording_survives_its_part_file(self, recorded: Recording) -> None:
        """Plan, state, events and operations are JSON and come back equal."""
        assert Recording.from_dict(json.loads(json.dumps(recorded.to_dict()))) == recorded

    @settings(max_examples=EXAMPLES)
    @given(data=st.data())
    def test_the_state_survives_its_saved_form(self, strategy: CollectiveTraining, recorded: Recording, data: st.DataObject) -> None:
        """A state saved anywhere, in the middle of a step, of an update or of a round, decides on as if nothing had happened."""
        log = recorded.log
        cut = data.draw(st.integers(0, len(log)))
        decider = Decider(strategy, recorded.initial)
        for now, event, operations in log[:cut]:
            assert decider.on(now, event) == operations
        restored = State.from_dict(json.loads(json.dumps(decider.state.to_dict())))
        assert restored == decider.state
        assert dataclasses.replace(recorded, initial=restored, log=log[cut:]).replayed(strategy) == [
            operations for _, _, operations in log[cut:]
        ]

    @settings(max_examples=EXAMPLES)
    @given(first=st.integers(-6, 3), before=st.integers(0, 12), count=st.integers(1, 40))
    def test_whole_steps_equal_folding_on(self, strategy: CollectiveTraining, first: int, before: int, count: int) -> None:
        """Steps at a stroke are those that ``on`` decides, and leave its state; only an observed scalar keeps one from being had so."""
        decider = Decider.start(strategy, 0, first_step=first)
        drive(decider, range(first, first + before))
        for step in range(first + before, first + before + count):
            state = decider.state
            assert state.next_step == step
            told = state.rounds.lr if state.rounds else None
            after, shape = strategy.whole_step(state)
            if shape is None:
                assert after == state
            if shape is None or told not in (None, scalar("lr", step)):
                events = run_step(decider, step)
                assert shape is not None or len(events) > len(strategy.plan.buckets) + 2, "a scalar was observed"
            else:
                assert expanded(state, shape) == run_step(decider, step, lambda name, step: _untold(decider, name, step))
                assert decider.state == after

    def test_a_step_is_had_whole_where_nothing_is_observed(self, strategy: CollectiveTraining) -> None:
        """One after the other, all with the shapes of the strategy."""
        state = strategy.init("trainer", 0)
        for _ in range(30):
            state, shape = strategy.whole_step(state)
            assert strategy.observes or shape is not None

    def test_ids_are_unique_and_increasing(self, recorded: Recording) -> None:
        """Operations are numbered from 0 without a gap, also after an overflow and between steps."""
        ids = [operation.id for _, _, operations in recorded.log for operation in operations]
        assert ids == list(range(len(ids)))

    def test_operations_wait_only_for_earlier_ones_of_their_step(self, updates: list[Operations]) -> None:
        """``after`` names operations decided before, so that no order can deadlock, and none of another step."""
        for operations in updates:
            seen: set[int] = set()
            for operation in operations:
                assert set(operation.after) <= seen
                assert len(set(operation.after)) == len(operation.after)
                seen.add(operation.id)

    def test_every_update_happens_once(self, strategy: CollectiveTraining, recorded: Recording) -> None:
        """A step that ends an update has one ``update`` of all or one a bucket, or a ``skip`` by overflow; any other has a ``skip``."""
        decider = Decider(strategy, recorded.initial)
        buckets = [bucket.id for bucket in strategy.plan.buckets]
        whole, skipped = 0, 0
        for step in range(-4, 41):
            before = decider.state.updates
            operations = flat(run_step(decider, step))
            assert not decider.state.in_step
            updated = [operation.bucket for operation in operations if operation.kind == "update"]
            skips = sum(operation.kind == "skip" for operation in operations)
            assert decider.state.updates - before in (0, 1)
            if decider.state.updates == before:
                assert (updated, skips) == ([], 1)
                assert {operation.kind for operation in operations} <= {"hold", "accumulate", "skip"}
            elif "found_inf" in strategy.observes and scalar("found_inf", step):
                assert (updated, skips) == ([], 1)
                skipped += 1
            else:
                assert updated in ([None], buckets)
                assert skips == 0
                whole += 1
        assert whole > 0
        assert (skipped > 0) == ("found_inf" in strategy.observes)

    def test_every_collective_is_waited_for(self, updates: list[Operations]) -> None:
        """After each collective comes an operation of the rank that waits for it: nothing is left in flight after a step."""
        for operations in updates:
            assert {operation.id for operation in operations if operation.kind in COLLECTIVES} <= awaited(operations)

    def test_the_update_waits_for_the_gradients_it_applies(self, strategy: CollectiveTraining, updates: list[Operations]) -> None:
        """An update of all waits for every gradient on the wire, a bucket's for its own, and a merge for all that is averaged."""
        for operations in updates:
            after = {operation.id: operation.after for operation in operations}
            for operation in operations:
                if operation.kind not in NEEDED:
                    continue
                needed = {
                    other.id
                    for other in operations
                    if other.payload in NEEDED[operation.kind] and other.kind in COLLECTIVES and operation.bucket in (None, other.bucket)
                }
                assert needed <= closure(operation.id, after)
                if operation.kind == "merge" and strategy.plan.exchange:
                    assert needed

    def test_only_plain_all_reduces_go_beside_each_other(self, strategy: CollectiveTraining, updates: list[Operations]) -> None:
        """On a communicator each collective waits, directly or not, for those before it, but a bucket's only all-reduce for such."""
        dtypes = {bucket.id: bucket.dtype for bucket in strategy.plan.buckets}

        def is_plain(operation: Operation) -> bool:
            bucket = operation.bucket
            if bucket is None or len(strategy.plan.chain(bucket, operation.payload or "")) > 1:
                return False
            return operation.kind == "all_reduce" and operation.wire_dtype == dtypes[bucket]

        for operations in updates:
            after = {operation.id: operation.after for operation in operations}
            before: dict[int, list[Operation]] = {}
            for operation in operations:
                if operation.kind in COLLECTIVES:
                    waited = closure(operation.id, after)
                    others = before.get(operation.communicator, [])
                    assert all(other.id in waited or (is_plain(operation) and is_plain(other)) for other in others)
                    before.setdefault(operation.communicator, []).append(operation)

    def test_a_summed_gradient_travels_behind_its_release(self, updates: list[Operations]) -> None:
        """Where steps share an update, each bucket is released once before it travels, and what carries it waits for that."""
        for operations in updates:
            after = {operation.id: operation.after for operation in operations}
            released = {operation.bucket: operation.id for operation in operations if operation.kind == "release"}
            for operation in operations:
                if operation.payload in ("gradient", "rows") and released:
                    assert released[operation.bucket] in closure(operation.id, after)

    def test_collectives_carry_every_bucket_of_the_plan(self, strategy: CollectiveTraining, updates: list[Operations]) -> None:
        """What a step carries is the plan's exchange: once, in its order, on its groups and communicators, in its types; states in turn."""

        def what(operation: Operation, factor: int = 1) -> tuple[object, ...]:
            place = (operation.kind, operation.bucket, operation.communicator, operation.group, operation.wire_dtype)
            return (*place, operation.nbytes * factor)

        carried = 0
        for operations in updates:
            of_buckets = [operation for operation in operations if operation.kind in COLLECTIVES and operation.bucket is not None]
            states = [operation for operation in of_buckets if operation.payload == "state"]
            gradients = [operation for operation in of_buckets if operation.payload in ("gradient", "rows")]
            deltas = [operation for operation in of_buckets if operation.payload == "delta"]
            apart = [operation for operation in strategy.plan.exchange if operation.payload != "delta"]
            for own, planned in ((gradients, apart), (deltas, strategy.plan.averaging)):
                if own:
                    assert [what(operation) for operation in own] == [what(operation) for operation in planned]
                    carried += 1
            assert not gradients or strategy.combination.exchanges_gradients
            assert not deltas or strategy.combination.is_local
            assert len(gradients) + len(deltas) + len(states) == len(of_buckets)
            if states:
                slots = strategy.plan.num_state_slots
                assert [what(operation) for operation in states] == [what(operation, slots) for operation in strategy.plan.averaging]
            small = [operation for operation in operations if operation.kind in COLLECTIVES and operation.bucket is None]
            small = [operation for operation in small if not brings_buffers(operation)]
            gathers = {"agreement", "loss"}
            assert all(operation.kind == ("all_gather" if operation.payload in gathers else "all_reduce") for operation in small)
            assert all(operation.group == "world" and operation.nbytes > 0 for operation in small)
            assert len({operation.payload for operation in small}) == len(small)
        assert carried > 0 or not strategy.plan.exchange

    def test_reading_the_model_averages_once_and_only_if_needed(self, strategy: CollectiveTraining) -> None:
        """Flush and DataEnd average what trainers did since they last agreed; a second one finds nothing to do."""
        for behind in (Flush(), DataEnd()):
            for steps in range(14):
                decider = Decider.start(strategy, 0, first_step=-1)
                met = decider.state.updates
                for step in range(-1, -1 + steps):
                    if any(operation.kind == "merge" for operation in flat(run_step(decider, step))):
                        met = decider.state.updates
                operations = decider.on(0, behind)
                assert bool(operations) == (strategy.payload == "delta" and decider.state.updates > met)
                if operations:
                    carried = [operation.bucket for operation in operations if operation.payload == "delta"]
                    assert carried == [operation.bucket for operation in strategy.plan.averaging]
                    assert [operation.kind for operation in operations].count("merge") == 1
                assert decider.on(0, behind) == ()

    def test_ranks_decide_alike(self, strategy: CollectiveTraining, recorded: Recording) -> None:
        """All trainers issue the same operations in the same order."""
        first = [operations for _, _, operations in recorded.log]
        assert all([operations for _, _, operations in _record(strategy, rank).log] == first for rank in (1, 2))

    def test_an_unknown_event_changes_nothing(self, strategy: CollectiveTraining) -> None:
        """A strategy leaves events alone that are not its business: nothing starts, and the state stays, between steps and within one."""
        decider = Decider.start(strategy, 0)
        between = decider.state
        drive(decider, range(1, 4))
        behind = decider.state
        decider.on(0, StepBegin(4))
        for state in (between, behind, decider.state):
            for event in (TimerFired(), Message(role="server", rank=0, kind="rows", nbytes=8), Observed("temperature", 40.0)):
                assert strategy.on(state, 0, event) == (state, ())

    def test_events_out_of_order_are_a_bug(self, strategy: CollectiveTraining) -> None:
        """An executor that forgets a step's beginning or its end is told so at once."""
        state = strategy.init("trainer", 0)
        with pytest.raises(AssertionError):
            strategy.on(state, 0, BackwardEnd())
        begun, _ = strategy.on(state, 0, StepBegin(1))
        with pytest.raises(AssertionError):
            strategy.on(begun, 0, StepBegin(2))
        with pytest.raises(AssertionError):
            strategy.whole_step(begun)


def _untold(decider: Decider, name: str, step: int) -> float:
    """A scalar that may be looked at without being told: the learning rate, where it has not changed."""
    rounds = decider.state.rounds
    assert name == "lr"
    assert rounds is not None
    assert rounds.lr == scalar("lr", step)
    return scalar(name, step)
