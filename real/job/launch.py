"""Launch: starts the ranks of a job once, orders one leg after another, and watches the ranks until they end.

``WorkerLaunch`` starts programs of this project as child processes. ``CommandLaunch`` starts a user's
command, whose ranks join by ``fleet.init``. Other processes that the command starts are recognised by the
job's folder in their environment, and end when that folder says so.

The starter of a command's rank reports how the rank ended: ``fleetbench launch`` and a driver inside the job
write its exit code into the job's folder, torch's agent reports it at its own end. If a launcher reports
nothing, the rank that fell silent is taken to be the one that was killed.
"""

import contextlib
import os
import re
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fleetbench.errors import EnvironmentLacks, FleetbenchError, WorkerFailed
from fleetbench.experiment import Run
from real.job.driver_watch import GRACE_S
from real.job.folder import NEVER, BeatReader, DriverSide
from real.job.inside import SHARED, trainer_environment
from real.processes.attached import why_unattached
from real.processes.diagnosis import LegFailed, LegLost, diagnose, how_it_ended
from real.processes.place import processes_with
from real.processes.roles import TUNING
from real.processes.started import QUIET, Started, end, meeting_variables, start, start_process, torchrun_variables

_POLL_S = 0.05
_OTHERS_S = 8.0
"""Seconds from the first reported failure to the end of the launch, so that other ranks can report theirs."""
_LAST_PARTS_S = 5.0
"""Seconds to wait for parts of ranks on other hosts after the command itself has ended."""
_MARGIN_S = 15.0  # seconds beyond the timeout of collectives, whose own error says more
_KILL_S = 5.0

_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception)(?:: .*)?)$", re.MULTILINE)
"""Pattern of errors as Python writes them, also with torch's rank prefix."""
_OF_AGENT = re.compile(r"^\s*rank\s*:\s*(\d+) \(local_rank: \d+\)\n\s*exitcode\s*:\s*(-?\d+) ", re.MULTILINE)
"""Pattern of a rank in the report of torch's agent."""

Progress = Callable[[int, int], None]


class Order(Protocol):
    """An order to ranks: a leg, or a ``Look`` of ``fleetbench why`` at the script."""

    @property
    def steps(self) -> int:
        """Number of counted steps."""
        ...

    @property
    def warmup_steps(self) -> int:
        """Number of steps before the counted ones."""
        ...


class Launch(ABC):
    """One launch of a job's ranks.

    Life cycle: ``started`` -> ``joined`` (every rank has met the others) -> legs, one order after another ->
    ``ended``. A rank that dies, raises, or is silent beyond the timeout ends the launch with an error that
    names it.
    """

    _beats_count_process = False  # whether steps in beats count from the process's start; otherwise from the leg's

    def __init__(self, folder: Path, run: Run, num_ranks: int = 0) -> None:
        """``run``: gives the timeouts. ``num_ranks``: number of ranks that will join; 0 if not known in advance."""
        self._folder = DriverSide(folder)
        self._num_expected = num_ranks
        self._startup_timeout_s, self._timeout_s = run.startup_timeout * 1e-9, run.timeout * 1e-9
        self._beats = BeatReader(self._folder.beats)
        self._begin_s = self._ordered_s = time.monotonic()
        self._end_s: float | None = None
        self._first_error_s: float | None = None
        self._processes: list[Started] = []
        """Processes that were started: the ranks, or a command."""
        self.ranks: dict[int, str] = {}
        """Host of each rank; empty until all have joined."""
        self.startup_s = 0.0
        """Seconds until all ranks had joined."""
        self.num_orders = 0
        self.orders_s: list[float] = []
        """Seconds that each order took; the first includes what ranks do before their first step."""
        self.num_steps = 0
        """Number of steps done in orders so far."""

    @property
    def code(self) -> int | None:
        """Exit code of the first process that has failed; 0 once all have ended well, ``None`` before."""
        codes = [process.popen.poll() for process in self._processes]
        return next((code for code in codes if code), None if None in codes else 0)

    def run(self, leg: Order, progress: Progress | None = None, check: Callable[[], None] | None = None) -> dict[int, dict[str, Any]]:
        """Order a leg, wait for it, and return every rank's part; if a script ends first, the parts that exist.

        ``check`` is called regularly, and may raise. Raises the error that ``_failure`` returns if a rank fails.
        """
        number = self.num_orders
        self.num_orders += 1
        self._folder.order(number, leg)
        self._ordered_s = time.monotonic()
        parts = self._wait_for(number, leg, progress, check)
        self.orders_s.append(time.monotonic() - self._ordered_s)
        self.num_steps += min((part["num_steps"] for part in parts.values()), default=0)
        return parts

    def end(self) -> None:
        """Let the ranks end after the last leg.

        Raises the error that ``_failure`` returns if they do not end, or end with an error.
        """
        self._folder.stop()
        deadline = time.monotonic() + max(self._timeout_s, GRACE_S) + _MARGIN_S
        while self.code is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if self.code != 0:
            raise self._failure()

    def kill(self) -> None:
        """Kill everything that was started; return when it is gone from this host, or cannot be killed."""
        self._folder.abort()
        end(self._processes)
        deadline = time.monotonic() + _KILL_S
        while left := started_with(self._folder.path):  # one may start another between the search and the signal
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        self._end_s = self._end_s or time.monotonic()

    def _wait_for(self, number: int, leg: Order, progress: Progress | None, check: Callable[[], None] | None) -> dict[int, dict[str, Any]]:
        """Return the parts of an order: all ranks', or those that exist after the processes have ended."""
        last_s: float | None = None
        while True:
            code = self.code  # read before the parts, which ranks write before they end
            self._join()
            has_all = bool(self.ranks) and self._folder.num_parts(number) == len(self.ranks)
            if has_all or code is not None:
                parts = self._folder.parts(number)
                if has_all and all(part["complete"] for part in parts.values()):
                    return parts
            if code is None:
                self._check()
            elif code or self._num_expected:  # workers that end before they are told to have failed
                raise self._failure()
            else:
                last_s = last_s or time.monotonic() + _LAST_PARTS_S
                if has_all or not self.ranks or time.monotonic() > last_s:
                    return parts
            if check is not None:
                check()
            if progress is not None:
                beat = self._beats.read(1)[0]
                before = self.num_steps + leg.warmup_steps if self._beats_count_process else 0
                progress(max(0, beat.step - before) if beat.leg == number else 0, leg.steps)
            time.sleep(_POLL_S)

    def _join(self) -> None:
        if not self.ranks:
            self.ranks = self._folder.joined()
            self.startup_s = time.monotonic() - self._begin_s

    def _check(self) -> None:
        """Raise if a rank failed ``_OTHERS_S`` seconds ago, or if all have been silent for too long."""
        if self._first_error_s is None and any(any(told.iterdir()) for told in (self._folder.errors, self._folder.codes)):
            self._first_error_s = time.monotonic()
        is_overdue = self._first_error_s is not None and time.monotonic() - self._first_error_s > _OTHERS_S
        if is_overdue or self._is_silent():
            raise self._failure()

    def _is_silent(self) -> bool:
        now, beats = time.monotonic(), self._beats.read(self._num_expected or len(self.ranks))
        if not any(beat.leg >= 0 for beat in beats):  # nobody trains yet
            return now - self._ordered_s > self._startup_timeout_s
        latest_s = max(self._ordered_s, *(beat.time_ns * 1e-9 for beat in beats))
        return now - latest_s > self._timeout_s + _MARGIN_S

    @abstractmethod
    def _failure(self) -> FleetbenchError:
        """Kill all processes, and return the error that names the cause."""


class WorkerLaunch(Launch):
    """Launch of ranks that run a program of this project on this machine.

    Life cycle: ``start``; ``run`` for each leg; ``end`` or ``kill``.
    """

    def __init__(self, folder: Path, run: Run, num_ranks: int) -> None:
        super().__init__(folder, run, num_ranks)
        self.log = folder / "log"
        """Folder of the ranks' output."""

    def start(self, command: list[str], environment: Mapping[str, str]) -> None:
        """Start the workers, and wait until they have joined; rank N's output goes to ``workerlog.N``.

        ``environment`` takes precedence over torchrun's variables.
        """
        self._folder.make()
        self.log.mkdir(parents=True, exist_ok=True)
        base, own = {**os.environ, **QUIET}, {**meeting_variables(self._folder.path), **environment, TUNING: str(self._folder.path)}
        for rank in range(self._num_expected):
            variables, log = {**base, **torchrun_variables(rank, self._num_expected), **own}, self.log / f"workerlog.{rank}"
            self._processes.append(start("trainer", rank, command, variables, log))
        while not self.ranks:
            if self.code is not None:
                raise self._failure()
            self._check()
            time.sleep(_POLL_S)
            self._join()

    def _failure(self) -> FleetbenchError:
        beats, now_ns = self._beats.read(self._num_expected), time.monotonic_ns()
        codes = {process.rank: code for process in self._processes if (code := process.popen.poll())}
        stopped = [process.rank for process in self._processes if process.is_stopped]
        self.kill()
        found = diagnose(codes, self._folder.failures(), beats, now_ns, str(self.log), stopped)
        return WorkerFailed(*found.args) if isinstance(found, LegFailed) else found  # no leg follows in this launch


class CommandLaunch(Launch):
    """Launch of a user's command.

    Life cycle: ``start``; ``run`` for each leg; ``end`` or ``kill``.
    """

    _beats_count_process = True

    def __init__(self, command: Sequence[str], folder: Path, run: Run) -> None:
        super().__init__(folder, run)
        self.log = folder / "command.log"
        """File with the command's output."""
        self._command = list(command)

    @property
    def output(self) -> Path:
        """Path of the trainers' output: the command's, or, inside a job, a folder with one file per rank."""
        return self._folder.path if SHARED in os.environ else self.log

    @property
    def unattached(self) -> str | None:
        """Reason why no process of the command has attached to this job; ``None`` if one has."""
        return why_unattached(self._folder.path)

    @property
    def held_s(self) -> float:
        """Trainer-seconds: how long the command has run, times its number of trainers (1 until all have joined)."""
        return ((self._end_s or time.monotonic()) - self._begin_s) * max(1, len(self.ranks))

    def start(self, environment: Mapping[str, str], workdir: Path | None = None, seed: int | None = None) -> None:
        """Start the command, in ``workdir`` if given.

        Raises ``EnvironmentLacks`` if there is no such program.
        """
        self._folder.make(seed)
        own = {**os.environ, **environment, **trainer_environment(self._folder.path), TUNING: str(self._folder.path)}
        try:
            popen = start_process(self._command, self.log, own, gently=True, workdir=workdir)
        except OSError as error:
            what = f"cannot be started: {error.strerror}"
            raise EnvironmentLacks(what, "the command", self._command[0], "what follows -- is a program with its arguments") from None
        self._processes = [Started("trainer", 0, self.log, popen)]
        self._folder.show_life()

    def _failure(self) -> FleetbenchError:
        beats, now_ns, code = self._beats.read(len(self.ranks)), time.monotonic_ns(), self.code
        self.kill()
        is_inside = SHARED in os.environ
        own = {0: code} if is_inside and code else {}  # the command is rank 0's alone
        codes = codes_of_agent(self._said()) | own | self._folder.exit_codes()
        if not self.ranks and not is_inside:  # a script that ends by itself before it joins says why in its output
            codes = {rank: code for rank, code in codes.items() if code < 0}
        errors = self._folder.failures()
        known = max(errors.keys() | codes.keys(), default=-1)  # also before all have joined
        beats += [NEVER] * (1 + known - len(beats))
        is_struck = code is not None and code < 0 and not is_inside  # its ranks end with it, by signals too
        if not is_struck and (errors or codes or (self.ranks and code is None)):
            return diagnose(codes, errors, beats, now_ns, str(self.output))
        how = "did not get so far in time" if code is None else how_it_ended(code)
        why = self.unattached
        so_far = "" if self.ranks else ", and no trainer has begun a leg" + ("" if why is None else f": {why}, nor was fleet.init")
        return LegLost(how + so_far, "the command", None, f"its output: {self.log}; it said: {self._last_lines()}")

    def _said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def _last_lines(self) -> str:
        """Return the output's first error, or its last lines: a launcher's own lines follow a script's."""
        text = self._said()
        if (error := _ERROR.search(text)) is not None:
            return error[1]
        return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-3:]) or "none"


def started_with(folder: Path) -> list[int]:
    """Return the ids of other processes on this host whose environment names ``folder`` as the tuning folder."""
    mark = f"{TUNING}={folder}".encode()
    return [pid for pid in processes_with(lambda variable: variable == mark) if pid != os.getpid()]


def codes_of_agent(said: str) -> dict[int, int]:
    """Return the exit codes in the report of torch's agent, by rank, without ranks that the agent itself ended."""
    return {int(rank): int(code) for rank, code in _OF_AGENT.findall(said) if int(code) != -signal.SIGTERM}
