"""How a rank of a user's script ends: with its driver, after its last leg, or by an error, which the driver is told.

A daemon thread looks at the job's folder, because the rank itself may hang in a collective, and
because its launcher (torchrun, srun) need not pass on a signal.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from dataclasses import asdict
from types import TracebackType
from typing import NoReturn

from fleetbench.errors import ConfigError
from real.job.folder import BeatWriter, RankSide
from real.processes.failures import rank_error
from real.processes.place import Place
from real.processes.roles import role_of

GRACE_S = 30.0
"""For a script's own way out after its last leg."""
_POLL_S = 0.5
SILENCE_S = 60.0
"""A driver on another host that shows no life for so long is gone."""


class Watch:
    """Whether a rank has somebody to work for; to be asked now and then."""

    def __init__(self, folder: RankSide) -> None:
        self._folder = folder
        self._driver = folder.driver()
        self._is_near = Place.here().shares_numbers(self._driver)
        self._life = ""
        self._seen_s = time.monotonic()

    def must_end(self) -> bool:
        """Whether the driver says so, or is gone."""
        return self._folder.is_aborted() or not self.driver_lives()

    def driver_lives(self) -> bool:
        """Whether the driver's process is there; one of another host is known by the file that it changes."""
        if self._is_near:
            return self._driver.lives()
        life, now = self._folder.driver_life(), time.monotonic()
        if life != self._life:
            self._life, self._seen_s = life, now
        return now - self._seen_s < SILENCE_S


def watch_driver(rank: int) -> None:
    """From now on this rank ends with the driver of its job, which hears of its errors, also while it waits for the others to join.

    Raises ``ConfigError`` where ``FLEETBENCH_TUNING`` names no job's folder.
    """
    folder = RankSide.of_environment()
    BeatWriter(folder.beats, rank).beat(-1, 0)  # so that a rank that never comes is told from those that wait for it
    report_errors(folder, rank)
    watch = Watch(folder)

    def run() -> None:
        while not watch.must_end():
            time.sleep(_POLL_S)
        with contextlib.suppress(OSError):  # the folder may be gone, too
            folder.abort()  # for ranks of other hosts
        os._exit(1)

    threading.Thread(target=run, name="tuning-watch", daemon=True).start()


def report_errors(folder: RankSide, rank: int) -> None:
    """From now on an uncaught exception is also written to the job's folder."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        with contextlib.suppress(OSError):  # the driver may have taken its folder away
            folder.fail(rank, asdict(rank_error(error)))
        before(kind, error, traceback)

    sys.excepthook = hook


def refuse_served() -> NoReturn:
    """Raise ``ConfigError``, which the driver hands on, in a script with parameter servers, before it trains to its end in vain."""
    what = "a script with parameter servers is neither profiled nor tuned: legs change the strategies of trainers that meet in collectives"
    error = ConfigError(what, "strategy.mode", "'ps'", "compare runs of fleetbench sim or real with different a_sync_configs")
    RankSide.of_environment().fail(role_of(os.environ).rank, asdict(rank_error(error)))
    raise error


class LegsDone(SystemExit):
    """All legs of a tuning are done. Nothing is wrong: the exit code is 0."""

    def __init__(self) -> None:
        super().__init__(0)


class Ending:
    """The end of a script after its last leg, with exit code 0 even if the script resists.

    ``training`` -> ``raised``: ``LegsDone``, which ``except Exception`` does not catch, leaves through the user's own ``finally`` blocks;
    the process group stays until exit, because these may use it. Where a bare ``except:`` swallows it, it is raised again after every
    step -> ``left``: a process that still lives after the grace (it swallows, has a thread that is no daemon, or waits for a rank that
    is gone) ends by ``os._exit``.
    """

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
