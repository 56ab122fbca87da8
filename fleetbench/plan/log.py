"""Log: what a strategy was told, when, and what it decided; as plain data, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from fleetbench.plan.events import EVENTS, Event
from fleetbench.plan.operations import Operation, Operations

Entry = tuple[int, Event, Operations]
"""``now_ns``, an event, and the operations that it started."""


def encoded(log: Iterable[Entry]) -> list[dict[str, Any]]:
    """Plain data: one mapping an entry, in which the event's fields stand beside its name."""
    return [
        {
            "now_ns": now,
            "event": type(event).__name__,
            **dataclasses.asdict(event),
            "operations": [dataclasses.asdict(operation) for operation in operations],
        }
        for now, event, operations in log
    ]


def decoded(data: Iterable[Mapping[str, Any]]) -> tuple[Entry, ...]:
    """What ``encoded`` gave, also through JSON; and logs of roles as older versions wrote them, with ``fields`` of their own."""
    log = []
    for item in data:
        entry = {**item, **item.get("fields", {})}
        entry.pop("fields", None)
        now, kind, operations = entry.pop("now_ns"), EVENTS[entry.pop("event")], entry.pop("operations")
        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
        decided = tuple(Operation(**{**operation, "after": tuple(operation["after"])}) for operation in operations)
        log.append((now, kind(**fields), decided))
    return tuple(log)
