"""Remarks: what may happen very often is counted, and only its beginning logged."""

from __future__ import annotations

from collections.abc import Callable

_LOGGED = 20


class Remarks:
    """Of one kind; ``say`` hears of the first 20."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.num = 0
        self._say = say

    def add(self, what: str) -> None:
        """It has happened once more."""
        self.num += 1
        if self.num <= _LOGGED:
            self._say(what)
