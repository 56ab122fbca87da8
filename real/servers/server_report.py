"""ServerReport: what one server did in its life."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class ServerReport:
    """Counted while the server runs."""

    updates: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """Gradients by the number of updates between what they were computed from and their own; see ``busy_s`` for which of them."""
    senseless: int = 0
    """Messages and requests that made no sense."""
    strangers: int = 0
    """Connections that were refused."""
    lost: list[int] = field(default_factory=list)
    bytes_received: int = 0
    bytes_sent: int = 0
    busy_s: float = 0.0
    """Reading, updating and answering, from the first gradient on; where trainers say when steps begin to count, from then on."""
    served_s: float = 0.0
    """From the same moment to the last gradient."""
    _since: float | None = None
    _is_restarted: bool = False

    def restart(self) -> None:
        """Steps count from now on, once for all trainers: forget the load of before. What the job did in all stays."""
        if not self._is_restarted:
            self._is_restarted, self._since = True, time.monotonic()
            self.staleness.clear()
            self.busy_s = self.served_s = 0.0

    def gradient(self, staleness: int) -> None:
        """One has come, computed from parameters that are so many updates old."""
        now = time.monotonic()
        self._since = self._since or now
        self.served_s = now - self._since
        self.staleness[staleness] += 1

    def worked(self, begin: float) -> None:
        """From ``begin`` on the monotonic clock until now."""
        if self._since is not None:
            self.busy_s += time.monotonic() - begin

    def __str__(self) -> str:
        stale = self.staleness
        mean = f", mean staleness {sum(lag * num for lag, num in stale.items()) / stale.total():.2f}" if stale else ""
        refused = f", {self.strangers} strangers refused" if self.strangers else ""
        senseless = f", {self.senseless} senseless messages" if self.senseless else ""
        return f"ended after {self.updates} updates{mean}{refused}{senseless}"
