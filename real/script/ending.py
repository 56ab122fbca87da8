"""Ending: how a user's script ends after its last leg, with exit code 0 and whatever the script does against it.

``training`` -> ``raised``: ``LegsDone``, which ``except Exception`` does not catch, leaves through the user's own ``finally`` blocks;
the process group stays until exit, because these may use it. Where a bare ``except:`` swallows it, it is raised again after every
step -> ``left``: where the process still lives some time after the first (a loop that swallows it, a thread that is no daemon, a
``finally`` that waits for a rank that is gone), ``os._exit`` ends it.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import NoReturn

GRACE_S = 30.0
"""For the script's own way out, from the first time on."""


class LegsDone(SystemExit):
    """All legs of a tuning are done. Nothing is wrong: the exit code is 0."""

    def __init__(self) -> None:
        super().__init__(0)


class Ending:
    """See the module."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._left = threading.Timer(grace_s, _leave)
        self._left.daemon = True

    @property
    def begun(self) -> bool:
        """Whether the script has been told to end."""
        return self._left.ident is not None

    def end(self) -> NoReturn:
        """Raise ``LegsDone``."""
        if not self.begun:
            self._left.start()
        raise LegsDone


def _leave() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)
