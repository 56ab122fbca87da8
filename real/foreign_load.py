"""Foreign load: whether other programs computed while something was timed, and timing it again where they did.

A core that somebody else takes for a moment makes every trainer wait; what was measured then tells of that, and not of the strategy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from fleetbench.measurements import is_busy
from real.testbed import noise

BUSY = "FLEETBENCH_BUSY"
"""``accept``: do not look at what else the machine does, on one that is never quiet."""
TRIES = 3
"""So often is something timed at most."""
_SHORT_S = 1.0
"""The kernel counts time in ticks of 10 ms: what is shorter is judged as if it took so long."""

T = TypeVar("T")


class Load:
    """What others computed in the meantime; known after the ``with`` of ``watching``."""

    cores: float | None = None
    """Mean number of cores; none where it was not measured, or the system does not say."""


@contextmanager
def watching(mark: str | None = None) -> Iterator[Load]:
    """Look at the machine until the end of the ``with``. Processes that this one has started are not foreign.

    Nor are those with a variable that begins with ``mark``: a batch system starts a command's trainers itself.
    """
    load = Load()
    if os.environ.get(BUSY) == "accept" or not Path("/proc/stat").exists():
        yield load
        return
    before = noise.read({}, mark)
    yield load
    found = noise.between(before, noise.read({}, mark))
    load.cores = round(found.foreign_cores * found.seconds / max(found.seconds, _SHORT_S), 3)


def quietest(measure: Callable[[], T], load_of: Callable[[T], float | None]) -> T:
    """Measure, again where the machine was busy: the quietest of up to ``TRIES``. ``load_of``: foreign cores during one of them."""
    best = measure()
    for _ in range(TRIES - 1):
        if not is_busy(load_of(best)):
            break
        best = min(best, measure(), key=lambda value: load_of(value) or 0.0)
    return best
