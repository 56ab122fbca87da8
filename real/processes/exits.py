"""Exits: whether this process ends because of an error, for what runs at its exit, which Python does not tell."""

from __future__ import annotations

import sys
from typing import NoReturn


class ExitWatch:
    """Notes what ``sys.exit`` is called with, from when it is made until ``end``. A bare ``raise SystemExit(1)`` it does not see."""

    def __init__(self) -> None:
        self._status: object = None
        self._exit, self._noted = sys.exit, self._note
        sys.exit = self._noted  # whoever calls it comes by here

    @property
    def has_failed(self) -> bool:
        """Whether the process ends by an exception that nobody caught, or by ``sys.exit`` with anything but 0 or none."""
        return hasattr(sys, "last_value") or self._status not in (None, 0)

    def end(self) -> None:
        """Let ``sys.exit`` be what it was, unless somebody else has put something in its place since."""
        if sys.exit is self._noted:
            sys.exit = self._exit

    def _note(self, status: object = None) -> NoReturn:
        self._status = status
        self._exit(status)  # type: ignore[arg-type]  # as given
