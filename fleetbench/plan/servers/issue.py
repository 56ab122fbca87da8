"""Issue: operations of a role, numbered as they are decided."""

from __future__ import annotations

from typing import Any

from fleetbench.plan.operations import Operation, Operations


class Issue:
    """Collects what one event starts. Each operation waits for the one before it, unless told otherwise."""

    def __init__(self, next_id: int) -> None:
        self.next_id = next_id
        self._operations: list[Operation] = []

    def add(self, **fields: Any) -> None:
        """One more operation, after the last."""
        after = (self._operations[-1].id,) if self._operations else ()
        self._operations.append(Operation(id=self.next_id, after=after, **fields))
        self.next_id += 1

    @property
    def operations(self) -> Operations:
        """In the order in which they start."""
        return tuple(self._operations)
