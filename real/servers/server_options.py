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
    """Gradients by the number of updates between what they were computed from and their own; see ``busy_s`` for which of them."""
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
        return f"ended after {self.updates} updates{mean}"
