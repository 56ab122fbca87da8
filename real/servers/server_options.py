"""ServerOptions, the options that a server starts with, and ServerReport, the counts that it returns."""

import math
import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of one server, given at its start."""

    server: int
    servers: int
    trainers: int
    endpoint: str
    """``host:port`` to listen on; the host is an address of this machine, or a name that resolves to one."""
    timeout_s: float = 30.0
    """Seconds without an answer to a heartbeat after which a trainer counts as failed."""
    startup_timeout_s: float = 300.0
    """Seconds from the server's creation after which a trainer that has sent no message counts as failed."""
    round_timeout_s: float = math.inf
    """Seconds for which synchronous trainers wait for a live trainer that sends no gradient or does not come to their
    barrier. At a barrier, and before the first update, the limit is at least ``startup_timeout_s``."""
    record: bool = False


@dataclass(slots=True)
class ServerReport:
    """Counts of one server's work, kept while it runs."""

    updates: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of gradients by staleness, which is the number of updates since the parameters from which a gradient
    was computed. It covers the same period as ``busy_s``."""
    busy_s: float = 0.0
    """Seconds spent reading, updating and answering since the first gradient, or since ``restart`` if it was called."""
    served_s: float = 0.0
    """Seconds from the start of the period of ``busy_s`` to the last gradient."""
    _since: float | None = None
    _is_restarted: bool = False

    def restart(self) -> None:
        """Reset all counts except ``updates``, because counted steps begin. Later calls do nothing."""
        if not self._is_restarted:
            self._is_restarted, self._since = True, time.monotonic()
            self.staleness.clear()
            self.busy_s = self.served_s = 0.0

    def gradient(self, staleness: int) -> None:
        """Count a gradient that was computed from parameters ``staleness`` updates old."""
        now = time.monotonic()
        self._since = self._since or now
        self.served_s = now - self._since
        self.staleness[staleness] += 1

    def worked(self, begin: float) -> None:
        """Add the time since ``begin``, in seconds on the monotonic clock, to ``busy_s``."""
        if self._since is not None:
            self.busy_s += time.monotonic() - begin

    def __str__(self) -> str:
        stale = self.staleness
        mean = f", mean staleness {sum(lag * num for lag, num in stale.items()) / stale.total():.2f}" if stale else ""
        return f"ended after {self.updates} updates{mean}"
