"""Ending: how a user's script ends behind its last leg, with exit code 0 and whatever the script does against it.

``training`` -> ``raised``: ``LegsDone``, which ``except Exception`` does not catch, leaves through the
user's own ``finally`` blocks; the process group stays until exit, because these may use it. A bare
``except:`` swallows it: then the script trains on and it is raised again, behind every step ->
``left``: after a few of these, or where the process still lives some time after the first (a thread that
is no daemon, a ``finally`` that waits for a rank that is gone), the process is left by ``os._exit``.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

MOST_RAISED = 3
"""So often is it raised before the process is left without asking."""
GRACE_S = 30.0
"""For the script's own way out, from the first time on."""


class LegsDone(SystemExit):
    """All legs of a tuning are done. Nothing is wrong: the exit code is 0."""

    def __init__(self) -> None:
        super().__init__(0)


class Ending:
    """See the module. ``leave`` ends the process."""

    def __init__(self, grace_s: float = GRACE_S, leave: Callable[[], None] | None = None) -> None:
        self._grace_s = grace_s
        self._leave = leave or leave_process
        self._num_raised = 0

    @property
    def begun(self) -> bool:
        """Whether the script has been told to end."""
        return self._num_raised > 0

    def end(self) -> NoReturn:
        """Raise ``LegsDone``, or leave where that was swallowed too often."""
        if self._num_raised >= MOST_RAISED:
            self._leave()
        if self._num_raised == 0:
            threading.Thread(target=self._watch, name="end-of-legs", daemon=True).start()
        self._num_raised += 1
        raise LegsDone

    def _watch(self) -> None:
        time.sleep(self._grace_s)
        self._leave()


def leave_process() -> None:
    """End at once with exit code 0; nothing but the standard streams is flushed."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)
