"""Waiting until others have left the cores alone."""

from __future__ import annotations

import time

from fleetbench.measurements import FOREIGN_LIMIT
from real.testbed.noise import between, read


def await_quiet(patience_s: float) -> None:
    """Return after two quiet seconds in a row, or when patience ends."""
    quiet, deadline = 0, time.monotonic() + patience_s
    before = read({})
    while quiet < 2 and time.monotonic() < deadline:
        time.sleep(1.0)
        after = read({})
        quiet = quiet + 1 if between(before, after).foreign_cores < FOREIGN_LIMIT else 0
        before = after
