"""Watch: a rank of a script ends when its driver says so or is gone, and says why it ends by itself.

A daemon thread looks at the tuning directory, because the rank itself may hang in a collective, and
because whoever started it (torchrun, srun) need not pass on a signal.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from types import TracebackType
from typing import NoReturn

from fleetbench.errors import ConfigError
from real.job.folder import RankSide
from real.processes.failures import rank_error
from real.processes.place import Place
from real.processes.roles import role_of

_POLL_S = 0.5
SILENCE_S = 60.0
"""A driver on another host that shows no beat for so long is gone."""


class Watch:
    """Looks from ``start`` on, until the process ends."""

    def __init__(self, folder: RankSide, leave: Callable[[], None] | None = None) -> None:
        self._folder = folder
        self._driver = folder.driver()
        self._is_near = Place.here().shares_numbers(self._driver)
        self._leave = leave or _leave
        self._beat = ""
        self._seen_s = time.monotonic()

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._run, name="tuning-watch", daemon=True).start()

    def must_end(self) -> bool:
        """Whether this rank has nobody to work for."""
        return self._folder.is_aborted() or not self._driver_lives()

    def _driver_lives(self) -> bool:
        if self._is_near:
            return self._driver.lives()
        beat, now = self._folder.driver_beat(), time.monotonic()
        if beat != self._beat:
            self._beat, self._seen_s = beat, now
        return now - self._seen_s < SILENCE_S

    def _run(self) -> None:
        while not self.must_end():
            time.sleep(_POLL_S)
        if not self._driver_lives():
            with contextlib.suppress(OSError):  # the directory may be gone, too
                self._folder.abort()  # for ranks of other hosts
        self._leave()


def watch_driver() -> None:
    """From now on this rank ends with the driver of its tuning, also while it waits for the others to join.

    Raises ``ConfigError`` where ``FLEETBENCH_TUNING`` names no tuning directory.
    """
    Watch(RankSide.of_environment()).start()


def _leave() -> None:
    os._exit(1)


def report_errors(folder: RankSide, rank: int) -> None:
    """From now on an exception that nobody catches is also written to the tuning directory."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not isinstance(error, KeyboardInterrupt):
            with contextlib.suppress(OSError):  # the driver may have taken its directory away
                folder.fail(rank, asdict(rank_error(error)))
        before(kind, error, traceback)

    sys.excepthook = hook


def refuse_served() -> NoReturn:
    """Raise ``ConfigError``, which the driver hands on, in a script with parameter servers, before it trains to its end in vain."""
    what = "a script with parameter servers is neither profiled nor tuned: legs change the strategies of trainers that meet in collectives"
    error = ConfigError(what, "strategy.mode", "'ps'", "compare runs of fleetbench sim or real with different a_sync_configs")
    RankSide.of_environment().fail(role_of(os.environ).rank, asdict(rank_error(error)))
    raise error
