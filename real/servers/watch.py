"""Watch: for how long a server's trainers have been silent, and wait for each other.

Time in which this process itself stood still does not count.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

LOOK_S = 0.5
"""Between two looks."""
FELL_SILENT = "has fallen silent"
NEVER_CAME = "has never come"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A trainer that is gone without having left."""

    rank: int
    why: str
    """After its name: ``has fallen silent``."""
    code: int | None = None
    """Its exit code, negative for a signal, where its launcher saw it end."""

    @property
    def order(self) -> int:
        """Whom to blame first, of several: who was killed, who ended by itself, who fell silent, who never came."""
        if self.code is not None:
            return int(self.code >= 0)
        return {FELL_SILENT: 2, NEVER_CAME: 3}.get(self.why, 1)


class Watch:
    """Life cycle: made when the server is; ``hear`` whoever speaks; ``look`` where ``is_due``.

    ``timeout_s``: a trainer that has not been heard for so long is silent; one that was never heard, after ``startup_timeout_s``.
    """

    def __init__(self, trainers: int, timeout_s: float, startup_timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._looked = self._since = time.monotonic()
        self._heard = dict.fromkeys(range(trainers), self._looked + startup_timeout_s - timeout_s)
        self._spoken: set[int] = set()
        self._longest: object | None = None

    def hear(self, rank: int) -> None:
        """Trainer ``rank`` has spoken."""
        self._heard[rank] = time.monotonic()
        self._spoken.add(rank)

    def has_spoken(self, rank: int) -> bool:
        """Whether trainer ``rank`` was ever heard."""
        return rank in self._spoken

    @property
    def is_due(self) -> bool:
        """Whether it is time to look."""
        return time.monotonic() - self._looked > LOOK_S

    def look(self, longest: object | None) -> tuple[list[int], float]:
        """Who is silent, and for how many seconds ``longest``, what has waited longest of all, has been just that."""
        now = time.monotonic()
        stood_still_s = now - self._looked
        if stood_still_s > max(self._timeout_s / 2, 2 * LOOK_S):
            for rank, heard in self._heard.items():  # nobody can have been heard later than now; who has never spoken has until then
                self._heard[rank] = heard + stood_still_s if heard > now else min(now, heard + stood_still_s)
            self._since += stood_still_s
        self._looked = now
        if longest is not self._longest:
            self._longest, self._since = longest, now
        return [rank for rank, heard in self._heard.items() if now - heard > self._timeout_s], now - self._since
