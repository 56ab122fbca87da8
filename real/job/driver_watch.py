"""How a rank of a user's script ends: with its driver, after its last leg, or by an error that it reports.

A daemon thread watches the job's folder, because the rank itself may hang in a collective, and because its
launcher (torchrun, srun) need not forward a signal.
"""

import contextlib
import os
import threading
import time
from dataclasses import asdict
from typing import NoReturn

from real.job.folder import BeatWriter, RankSide
from real.processes.exits import end_now, on_uncaught
from real.processes.failures import rank_error
from real.processes.place import Place

GRACE_S = 30.0
"""Seconds for a script to exit by itself after its last leg."""
_POLL_S = 0.5
SILENCE_S = 60.0
"""Seconds without a sign of life after which a driver on another host is considered dead."""


class Watch:
    """Checks whether a rank still has a driver; call it regularly."""

    def __init__(self, folder: RankSide) -> None:
        self._folder = folder
        self._driver = folder.driver()
        self._is_near = Place.here().shares_numbers(self._driver)
        self._life = ""
        self._seen_s = time.monotonic()

    def must_end(self) -> bool:
        """Whether this rank must end, because the driver says so or is gone."""
        return self._folder.is_aborted() or not self.driver_lives()

    def driver_lives(self) -> bool:
        """Whether the driver's process exists or, for a driver on another host, still rewrites its file."""
        if self._is_near:
            return self._driver.lives()
        with contextlib.suppress(OSError):
            life = (self._folder.path / "driver").read_text(encoding="ascii")
            if life != self._life:
                self._life, self._seen_s = life, time.monotonic()
        return time.monotonic() - self._seen_s < SILENCE_S


def watch_driver(rank: int) -> None:
    """Make this rank end with its job's driver, and report its errors to it, even while it waits for others.

    Raises ``ConfigError`` if ``FLEETBENCH_TUNING`` names no job's folder.
    """
    folder = RankSide.of_environment()
    BeatWriter(folder.beats, rank).beat(-1, 0)  # distinguishes a rank that never comes from those that wait for it
    watch = Watch(folder)

    def report(error: BaseException) -> None:
        with contextlib.suppress(OSError):  # the driver may have taken its folder away
            folder.fail(rank, asdict(rank_error(error)))

    def run() -> None:
        while not watch.must_end():
            time.sleep(_POLL_S)
        with contextlib.suppress(OSError):  # the folder may be gone, too
            folder.abort()  # for ranks of other hosts
        os._exit(1)

    on_uncaught(report)
    threading.Thread(target=run, name="tuning-watch", daemon=True).start()


def end_script(grace_s: float = GRACE_S) -> NoReturn:
    """Raise ``SystemExit`` after a script's last leg, so that the process ends with exit code 0.

    ``except Exception`` does not catch it, and the user's own ``finally`` blocks run; the process group stays
    until exit, because they may use it. A process that still runs after the grace period (a bare ``except:``
    swallows it, a thread is no daemon, or it waits for a rank that is gone) ends by ``os._exit``.
    """
    left = threading.Timer(grace_s, end_now, [0])
    left.daemon = True
    left.start()
    raise SystemExit(0)
