"""Queues: when each of the collectives began that one communicator was handed at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from real.communication.clocks import Mark


@dataclass(slots=True, eq=False)
class _Place:
    begin: Mark | None = None
    """None while it waits."""


class Queue:
    """First in, first out, and ``depth`` under way at once: the others wait until one of those ends.

    The backend says when a collective ended, and not when it began; but which of them begins then is
    known. ``mark`` marks a moment.
    """

    def __init__(self, depth: int, mark: Callable[[], Mark]) -> None:
        self._depth = depth
        self._mark = mark
        self._lock = Lock()
        self._waiting: deque[_Place] = deque()
        self._num_under_way = 0

    def join(self) -> Callable[[], tuple[Mark, Mark]]:
        """One is handed over. What is returned is called as it ends, on any thread, and gives its begin and end."""
        place = _Place()
        with self._lock:
            if self._num_under_way < self._depth:
                self._begin(place, self._mark())
            else:
                self._waiting.append(place)
        return lambda: self._end(place)

    def _begin(self, place: _Place, now: Mark) -> None:
        place.begin = now
        self._num_under_way += 1

    def _end(self, place: _Place) -> tuple[Mark, Mark]:
        with self._lock:
            now = self._mark()
            if place.begin is None:  # the backend carries more than was thought
                self._waiting.remove(place)
                self._begin(place, now)
            self._num_under_way -= 1
            if self._waiting and self._num_under_way < self._depth:
                self._begin(self._waiting.popleft(), now)
            return place.begin, now
