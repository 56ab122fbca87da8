"""The contract of every strategy, as a test class: a new strategy overrides ``strategy`` and inherits the tests."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbench.plan.events import BackwardEnd, BucketReady, DataEnd, EpochEnd, Event, Flush, Message, StepBegin, TimerFired
from fleetbench.plan.operations import COLLECTIVES, Operations
from fleetbench.plan.protocol import State, Strategy
from fleetbench.plan.replay import Decider, Recording, replay


def step_events(strategy: Strategy, step: int) -> list[Event]:
    """What an executor tells a strategy in one step."""
    return [StepBegin(step), *(BucketReady(bucket.id) for bucket in strategy.plan.buckets), BackwardEnd()]


def drive(decider: Decider, steps: range) -> list[tuple[int, tuple[Operations, ...]]]:
    """Run whole steps; every step with the operations of its bucket events and of its backward's end."""
    done = []
    for step in steps:
        begin, *rest = (decider.on(1000 * step + index, event) for index, event in enumerate(step_events(decider.strategy, step)))
        assert begin == ()
        done.append((step, tuple(rest)))
    return done


class StrategyContract:
    """What an executor relies on, for any strategy of a trainer."""

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls) -> Strategy:
        """The strategy under test: one for all tests, because it holds no state."""
        raise NotImplementedError

    @pytest.fixture
    def recorded(self, strategy: Strategy) -> Recording:
        """A run of three warm-up and 40 counted steps, read twice and ended."""
        decider = Decider.start(strategy, 0, record=True, first_step=-2)
        initial = decider.state
        for steps, behind in ((range(-2, 6), Flush()), (range(6, 31), Flush()), (range(31, 41), DataEnd())):
            drive(decider, steps)
            decider.on(0, behind)
        return Recording(strategy.plan, 0, initial, tuple(decider.log or ()))

    def test_a_recorded_run_replays_to_the_same_operations(self, strategy: Strategy, recorded: Recording) -> None:
        """The same events give the same operations, at whatever time they come."""
        expected = [operations for _, _, operations in recorded.log]
        assert replay(strategy, recorded.initial, [(now, event) for now, event, _ in recorded.log]) == expected
        assert replay(strategy, recorded.initial, [(7 * now + 1, event) for now, event, _ in recorded.log]) == expected
        assert any(expected)

    def test_a_recording_survives_its_file(self, recorded: Recording, tmp_path: Path) -> None:
        """Plan, state, events and operations are JSON and come back equal."""
        recorded.save(tmp_path / "recording.json")
        assert Recording.load(tmp_path / "recording.json") == recorded

    @given(data=st.data())
    def test_the_state_survives_its_saved_form(self, strategy: Strategy, data: st.DataObject) -> None:
        """A state saved anywhere, in the middle of a step or of a round, decides on as if nothing had happened."""
        events = [(0, event) for step in range(1, 15) for event in step_events(strategy, step)]
        cut = data.draw(st.integers(0, len(events)))
        decider = Decider.start(strategy, 0)
        before = [decider.on(now, event) for now, event in events[:cut]]
        restored = State.from_dict(json.loads(json.dumps(decider.state.to_dict())))
        assert restored == decider.state
        assert before + replay(strategy, restored, events[cut:]) == replay(strategy, strategy.init("trainer", 0), events)

    @given(first=st.integers(-6, 3), before=st.integers(0, 12), limits=st.lists(st.integers(0, 15), min_size=1, max_size=4))
    def test_a_segment_equals_folding_on(self, strategy: Strategy, first: int, before: int, limits: list[int]) -> None:
        """Segments of any lengths, one behind the other, are the steps that ``on`` decides, and leave its state."""
        decider = Decider.start(strategy, 0, first_step=first)
        drive(decider, range(first, first + before))
        state, start = decider.state, first + before
        for limit in limits:
            assert state.next_step == start
            state, segment = strategy.segment(state, limit)
            assert segment.expand() == drive(decider, range(start, start + limit))
            assert state == decider.state
            assert segment.first_step == start
            start += limit

    @given(a=st.integers(0, 12), b=st.integers(0, 12))
    def test_two_segments_are_one(self, strategy: Strategy, a: int, b: int) -> None:
        """segment(a), then segment(b), is segment(a + b)."""
        initial = dataclasses.replace(strategy.init("trainer", 0), first_step=-1)
        middle, first = strategy.segment(initial, a)
        last, second = strategy.segment(middle, b)
        joint_last, joint = strategy.segment(initial, a + b)
        assert last == joint_last
        assert first.expand() + second.expand() == joint.expand()

    def test_ids_are_unique_and_increasing(self, recorded: Recording) -> None:
        """An operation's id is larger than those of all operations before it."""
        ids = [operation.id for _, _, operations in recorded.log for operation in operations]
        assert ids == sorted(set(ids))

    def test_operations_wait_only_for_earlier_ones(self, recorded: Recording) -> None:
        """``after`` names operations that were decided before, so that no order can deadlock."""
        seen: set[int] = set()
        for _, _, operations in recorded.log:
            for operation in operations:
                assert set(operation.after) <= seen
                seen.add(operation.id)

    def test_every_step_updates_once(self, strategy: Strategy, recorded: Recording) -> None:
        """Each step has one update; an update, or a merge behind it, waits for all collectives it needs."""
        steps = [operations for _, event, operations in recorded.log if isinstance(event, BackwardEnd)]
        assert all([operation.kind for operation in operations].count("update") == 1 for operations in steps)
        everything = [operation for _, _, operations in recorded.log for operation in operations]
        reached = {operation.id: operation.after for operation in everything}
        pending: set[int] = set()
        for operation in everything:
            if operation.kind in COLLECTIVES:
                pending.add(operation.id)
            elif pending:
                assert pending <= closure(operation.id, reached) or operation.kind == "update"
                pending -= closure(operation.id, reached)
        assert not pending
        assert strategy.plan.buckets

    def test_collectives_carry_every_bucket_of_the_plan(self, strategy: Strategy, recorded: Recording) -> None:
        """Every exchange carries each bucket once, in the plan's order, on the plan's communicators."""
        carried = [op for _, _, operations in recorded.log for op in operations if op.kind in COLLECTIVES]
        planned = [(op.kind, op.bucket, op.nbytes, op.communicator, op.group) for op in strategy.plan.exchange]
        assert len(carried) % len(planned) == 0
        assert [(op.kind, op.bucket, op.nbytes, op.communicator, op.group) for op in carried] == planned * (len(carried) // len(planned))
        assert len(carried) > 0

    def test_reading_the_model_averages_once_and_only_if_needed(self, strategy: Strategy) -> None:
        """Flush and DataEnd average what trainers did since they last agreed; a second one finds nothing to do."""
        for behind in (Flush(), DataEnd()):
            for steps in range(12):
                decider = Decider.start(strategy, 0, first_step=-1)
                done = drive(decider, range(-1, -1 + steps))
                agreed = steps == 0 or any(operation.kind in COLLECTIVES for event in done[-1][1] for operation in event)
                operations = decider.on(0, behind)
                assert bool(operations) == (not agreed)
                if operations:
                    carried = [operation.bucket for operation in operations if operation.kind in COLLECTIVES]
                    assert carried == [operation.bucket for operation in strategy.plan.exchange]
                    assert operations[-1].kind == "merge"
                assert decider.on(0, behind) == ()

    def test_ranks_decide_alike(self, strategy: Strategy) -> None:
        """All trainers issue the same operations in the same order."""
        deciders = [Decider.start(strategy, rank) for rank in range(3)]
        first, *others = [drive(decider, range(1, 10)) for decider in deciders]
        assert all(other == first for other in others)

    def test_an_unknown_event_changes_nothing(self, strategy: Strategy) -> None:
        """A strategy leaves events alone that are not its business: nothing starts, and the state stays, between steps and within one."""
        decider = Decider.start(strategy, 0)
        between = decider.state
        drive(decider, range(1, 4))
        behind = decider.state
        decider.on(0, StepBegin(4))
        for state in (between, behind, decider.state):
            for event in (TimerFired(), EpochEnd(), Message(role="server", rank=0, kind="rows", nbytes=8)):
                assert strategy.on(state, 0, event) == (state, ())


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
