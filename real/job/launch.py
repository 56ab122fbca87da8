"""Launch: the ranks of a job, started once, which run one leg after another as they are ordered, and are watched until they end."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetbench.errors import FleetbenchError
from real.job.folder import DriverSide, Order, RankPlace
from real.job.workers import QUIET, Workers, require_free
from real.leg import Leg
from real.processes.beats import BeatReader
from real.processes.diagnosis import diagnose

_POLL_S = 0.05
_OTHERS_S = 8.0
"""From the first rank's error until the others have met it too."""
_LAST_PARTS_S = 5.0
"""For the parts of ranks that other hosts started, after the command's own end."""
_MARGIN_S = 15.0  # a collective's own timeout comes first and says more

Progress = Callable[[int, int], None]


class Launch(ABC):
    """``started`` -> ``joined`` (every rank has met the others) -> legs, one order after another -> ``ended``.

    A rank that dies, raises, or falls silent past the timeout ends the launch with an error that names it.
    """

    def __init__(self, folder: Path, log: Path, *, startup_timeout_s: float, timeout_s: float, num_ranks: int = 0) -> None:
        """``num_ranks``: as many will join, where that is known before."""
        self._folder = DriverSide(folder)
        self._num_expected = num_ranks
        self._startup_timeout_s = startup_timeout_s
        self._timeout_s = timeout_s
        self._beats = BeatReader(self._folder.beats)
        self._begin_s = self._ordered_s = time.monotonic()
        self._first_error_s: float | None = None
        self._codes: dict[int, int] = {}
        """Exit codes of ranks that had ended when the first error was seen; who lived then is not to blame for its own end."""
        self.log = log
        """Where the output is."""
        self.ranks: dict[int, RankPlace] = {}
        """Once all have joined."""
        self.startup_s = 0.0
        """Until all have joined."""
        self.num_orders = 0
        self.num_steps = 0
        """Steps that were done in orders so far."""

    @property
    def code(self) -> int | None:
        """Exit code of what was started, where that is one command; none while it runs. Workers that end before they are told to fail."""
        return None

    @abstractmethod
    def kill(self) -> None:
        """End all that was started, whatever state it is in; returns when it is gone."""

    def run(self, order: Order, progress: Progress | None = None, check: Callable[[], None] | None = None) -> dict[int, dict[str, Any]]:
        """Give an order and wait for it: every rank's part; where a script ends first, what there is of them.

        ``check`` is called now and then, and may raise. Raises what ``_failure`` finds when a rank breaks.
        """
        number = self.num_orders
        self.num_orders += 1
        self._folder.order(number, order)
        self._ordered_s = time.monotonic()
        parts = self._wait_for(number, order.leg, progress, check)
        self.num_steps += min((part["num_steps"] for part in parts.values()), default=0)
        return parts

    def _wait_for(self, number: int, leg: Leg, progress: Progress | None, check: Callable[[], None] | None) -> dict[int, dict[str, Any]]:
        """The parts of an order: of all ranks, or what there is after the command's end."""
        last_s: float | None = None
        while True:
            code = self.code  # before the parts, which are written before the end
            self._join()
            has_all = bool(self.ranks) and self._folder.num_parts(number) == len(self.ranks)
            if has_all or code is not None:
                parts = self._folder.parts(number)
                if has_all and all(part["complete"] for part in parts.values()):
                    return parts
            if code is None:
                self._check()
            elif code:
                raise self._failure()
            else:
                last_s = last_s or time.monotonic() + _LAST_PARTS_S
                if has_all or not self.ranks or time.monotonic() > last_s:
                    return parts
            if check is not None:
                check()
            if progress is not None:
                beat = self._beats.read(1)[0]
                progress(max(0, self._num_counted(beat.step, leg)) if beat.leg == number else 0, leg.steps)
            time.sleep(_POLL_S)

    def _join(self) -> None:
        if not self.ranks:
            self.ranks = self._folder.joined()
            self.startup_s = time.monotonic() - self._begin_s

    def _num_counted(self, step: int, leg: Leg) -> int:  # noqa: ARG002  # a script's command needs it
        """Counted steps of a leg, from the step of a beat."""
        return step

    def _check(self) -> None:
        """Raise where a rank has died, has raised, or has been silent for too long."""
        has_error, now = any(self._folder.errors.iterdir()), time.monotonic()
        is_broken = self._look()  # after the errors: whoever caused one has ended before it was written
        if self._first_error_s is None and (has_error or self._codes):
            self._first_error_s = now
        is_overdue = self._first_error_s is not None and now - self._first_error_s > _OTHERS_S
        if is_broken or is_overdue or self._is_silent():
            raise self._failure()

    def _is_silent(self) -> bool:
        now, beats = time.monotonic(), self._beats.read(self._num_expected or len(self.ranks))
        if not any(beat.leg >= 0 for beat in beats):  # nobody trains yet
            return now - self._ordered_s > self._startup_timeout_s
        latest_s = max(self._ordered_s, *(beat.time_ns * 1e-9 for beat in beats))
        return now - latest_s > self._timeout_s + _MARGIN_S

    @abstractmethod
    def _look(self) -> bool:
        """Note who has ended, until the first error is seen; whether the launch is broken for good."""

    @abstractmethod
    def _failure(self) -> FleetbenchError:
        """End all, and say whose fault it was."""


class WorkerLaunch(Launch):
    """Ranks that are processes of this machine and programs of this project. ``start``; ``meet``; ``run``; ``end`` or ``kill``."""

    def __init__(self, folder: Path, trainers: int, *, startup_timeout_s: float, timeout_s: float) -> None:
        super().__init__(folder, folder / "log", startup_timeout_s=startup_timeout_s, timeout_s=timeout_s, num_ranks=trainers)
        self._workers = Workers(self.log, trainers)

    def start(self, command: Sequence[str], environment: Mapping[str, str], port: int | None = None, *, forks: bool = False) -> None:
        """Start the workers, as forks of this process's fork server if ``forks``. Raises ``EnvironmentLacks`` when the port is taken."""
        if port is not None:
            require_free(port)
        self._folder.make()
        self._workers.start(command, {**QUIET, **environment}, port=port, forks=forks)

    def meet(self) -> None:
        """Wait until all ranks have joined."""
        while not self.ranks:
            self._check()
            time.sleep(_POLL_S)
            self._join()

    def end(self) -> None:
        """Let the ranks end. Raises ``WorkerFailed`` if they do not end well."""
        self._folder.stop()
        deadline = time.monotonic() + self._timeout_s + _MARGIN_S
        while not self._look() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if self._codes or len(self._workers.codes()) < self._workers.num:
            raise self._failure()

    def kill(self) -> None:
        """See ``Launch``."""
        self._workers.end()

    def _look(self) -> bool:
        codes = self._workers.codes()
        if self._first_error_s is None:
            self._codes = {rank: code for rank, code in codes.items() if code}
        return self._workers.is_over(codes)

    def _failure(self) -> FleetbenchError:
        beats, now_ns = self._beats.read(self._workers.num), time.monotonic_ns()
        self.kill()
        return diagnose(self._codes, self._folder.failures(), beats, now_ns, str(self.log))
