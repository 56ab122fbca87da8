"""ServerOptions, which a launcher or a session gives a server, and ServerReport, which the server gives back."""

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
    """``host:port`` to listen on; the host is an address of this machine or a name that leads to one."""
    timeout_s: float = 30.0
    """Seconds without an answer to a heartbeat after which a trainer has failed."""
    startup_timeout_s: float = 300.0
    """Seconds after which a trainer that has never spoken has failed."""
    round_timeout_s: float = math.inf
    """Synchronous: seconds that trainers wait for one that lives, but sends no gradient or does not come to their barrier.
    At a barrier, and before the first update, it is ``startup_timeout_s`` if that is more."""
    record: bool = False


@dataclass(slots=True)
class ServerReport:
    """Counts of one server's work, kept while it runs."""

    updates: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of gradients by staleness: the updates made since the parameters that a gradient was computed from. It
    covers the same period as ``busy_s``."""
    busy_s: float = 0.0
    """Seconds spent reading, updating and answering since the first gradient, or since ``restart`` if it was called."""
    served_s: float = 0.0
    """Seconds from the same moment to the last gradient."""
    _since: float | None = None
    _is_restarted: bool = False

    def restart(self) -> None:
        """Reset the load when counted steps begin; later calls do nothing. ``updates`` still counts the whole job."""
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
