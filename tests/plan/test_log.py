"""Logs of what was heard and decided, as they are stored."""

from __future__ import annotations

import json

import pytest

from fleetbench.plan.events import BackwardEnd, BucketReady, DataEnd, Event, Message, Observed, StepBegin, TimerFired
from fleetbench.plan.operations import Operation
from fleetbench.plan.replay import decoded, encoded

EVENTS: list[Event] = [
    StepBegin(-1),
    BucketReady(3),
    BackwardEnd(("a", "b")),
    Observed("loss", 0.1),
    Message("sender", 2, "gradient", rows=(1, 5), count=4, version=9),
    TimerFired(),
    DataEnd(),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_entry_survives_being_written(event: Event) -> None:
    """Its time, its event and its operations come back from JSON as they were, tuples among them."""
    log = ((7, event, (Operation(id=4, kind="wait"), Operation(id=5, kind="merge", count=3, after=(4,)))),)
    assert decoded(json.loads(json.dumps(encoded(log)))) == log


def test_an_events_fields_stand_beside_its_name() -> None:
    """And lists are read as tuples."""
    operation = {"id": 1, "kind": "skip", "after": [0]}
    message = {"role": "server", "rank": 1, "kind": "parameters", "rows": [2], "version": 6}
    entry = {"now_ns": 5, "event": "Message", **message, "operations": [operation]}
    expected = ((5, Message("server", 1, "parameters", rows=(2,), version=6), (Operation(id=1, kind="skip", after=(0,)),)),)
    assert decoded([entry]) == expected
