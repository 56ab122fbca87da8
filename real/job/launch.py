"""Launch: the ranks of a job, started once, which run one leg after another as they are ordered, and are watched until they end.

``WorkerLaunch`` starts programs of this project, whose processes are its children. ``CommandLaunch`` starts a user's command, whose ranks
join by ``fleet.init``. What else the command starts is known by the job's folder in its environment, and ends when that says so.

Which of a command's ranks ended first, and how, although somebody else has started and reaps it: a process that has ended stays a zombie
until its launcher waits for it, and the kernel tells its exit code in the meantime. What was missed is looked for in what the launcher
said: torch's agent names the exit code of every process, and ``fleetbench launch`` the rank that it blames.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetbench.errors import EnvironmentLacks, FleetbenchError, WorkerFailed
from real.job.folder import NEVER, BeatReader, DriverSide, RankPlace
from real.job.inside import SHARED, trainer_environment
from real.job.watch import GRACE_S
from real.leg import Leg
from real.processes.diagnosis import STOPPED, LegFailed, LegLost, diagnose, how_it_ended
from real.processes.fork_server import ForkServer, fork_server
from real.processes.place import Place, code_of_zombie, processes_with
from real.processes.roles import TUNING
from real.processes.started import QUIET, Started, end, meeting_variables, require_free, start, start_process, torchrun_variables

_POLL_S = 0.05
_OTHERS_S = 8.0
"""From the first rank's error until the others have met it too."""
_LAST_PARTS_S = 5.0
"""For the parts of ranks that other hosts started, after the command's own end."""
_MARGIN_S = 15.0  # a collective's own timeout comes first and says more
_KILL_S = 5.0
_REAPED_S = 0.2
"""Until a fork server has told how a rank ended, whose end another rank has noted as an error."""
_END_S = 15.0
"""Beyond the script's own way out."""

_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception)(?:: .*)?)$", re.MULTILINE)
_PLACE = re.compile(r'File "([^"]*)", line (\d+)')
"""As Python writes them, also where torch says before each line which rank it is of."""
_OF_AGENT = re.compile(r"exitcode\s*:\s*(-?\d+)\s*\(pid:\s*(\d+)\)")
_RANK_OF_AGENT = re.compile(r"^\s*rank\s*:\s*(\d+) \(local_rank: \d+\)\n\s*exitcode\s*:\s*-(\d+) ", re.MULTILINE)
_OF_LAUNCH = re.compile(r"^error: rank (\d+)(?: on node \d+)?: was killed by (SIG[A-Z0-9]+)", re.MULTILINE)
_OF_NODE = re.compile(r"^error: ((?:this node|node \d+): [^(\n]*)", re.MULTILINE)

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

    def run(self, leg: Leg, progress: Progress | None = None, check: Callable[[], None] | None = None) -> dict[int, dict[str, Any]]:
        """Order a leg and wait for it: every rank's part; where a script ends first, what there is of them.

        ``check`` is called now and then, and may raise. Raises what ``_failure`` finds when a rank breaks.
        """
        number = self.num_orders
        self.num_orders += 1
        self._folder.order(number, leg)
        self._ordered_s = time.monotonic()
        parts = self._wait_for(number, leg, progress, check)
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
        if has_error and self._first_error_s is None:
            time.sleep(_REAPED_S)
        is_broken = self._look()  # after the errors: the rank that caused one has ended before it was written
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
        self._processes: list[Started] = []
        self._server: ForkServer | None = None

    def start(self, command: list[str], environment: Mapping[str, str], port: int | None = None, *, forks: bool = False) -> None:
        """Start the workers; rank N's output goes to ``workerlog.N``. Raises ``EnvironmentLacks`` when the port is taken.

        ``environment`` goes before torchrun's variables. ``port``: where rank 0 listens if they meet over TCP, a free one by default.
        ``forks``: they are forks of this process's fork server; ``command`` has ``-m MODULE``.
        """
        if port is not None:
            require_free(port)
        self._folder.make()
        self.log.mkdir(parents=True, exist_ok=True)
        base = {**os.environ, **QUIET, **environment}
        self._server = fork_server(base) if forks else None
        meeting = meeting_variables(self._folder.path, port)
        for rank in range(self._num_expected):
            own = torchrun_variables(rank, self._num_expected, local_rank=rank, local_trainers=self._num_expected)
            variables, log = {**own, **meeting, **QUIET, **environment, TUNING: str(self._folder.path)}, self.log / f"workerlog.{rank}"
            if self._server is None:
                self._processes.append(start("trainer", rank, command, {**base, **variables}, log))
            else:
                forked = self._server.fork(command[command.index("-m") :], log, variables)
                self._processes.append(Started("trainer", rank, command, variables, log, forked))

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
        if self._codes or len(self._ended()) < len(self._processes):
            raise self._failure()

    def kill(self) -> None:
        """See ``Launch``."""
        end(self._processes)

    def _look(self) -> bool:
        codes = self._ended()
        if self._first_error_s is None:
            self._codes = {rank: code for rank, code in codes.items() if code}
        return any(codes.values()) or len(codes) == len(self._processes)

    def _ended(self) -> dict[int, int]:
        """Exit codes of ranks that have ended. Raises ``WorkerFailed`` where they ended with their fork server."""
        found = {process.rank: code for process in self._processes if (code := process.popen.poll()) is not None}
        if self._server is not None and self._server.code is not None and any(found.values()):
            how = STOPPED if self._server.was_stopped else how_it_ended(self._server.code)
            raise WorkerFailed(f"the launcher of its workers {how}", "this node", hint=f"the workers' output: {self.log}")
        return found

    def _failure(self) -> FleetbenchError:
        beats, now_ns = self._beats.read(self._num_expected), time.monotonic_ns()
        self.kill()
        found = diagnose(self._codes, self._folder.failures(), beats, now_ns, str(self.log))
        return WorkerFailed(*found.args) if isinstance(found, LegFailed) else found  # no leg follows in this launch


class CommandLaunch(Launch):
    """One launch. ``run`` gives orders; ``end`` or ``kill`` ends it."""

    def __init__(self, command: Sequence[str], folder: Path, *, startup_timeout_s: float, timeout_s: float) -> None:
        super().__init__(folder, folder / "command.log", startup_timeout_s=startup_timeout_s, timeout_s=timeout_s)
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._end_s: float | None = None

    @property
    def code(self) -> int | None:
        """See ``Launch``."""
        return None if self._process is None else self._process.poll()

    @property
    def held_s(self) -> float:
        """Seconds for which the command held its trainers so far, all of them together; one trainer until all have joined."""
        return ((self._end_s or time.monotonic()) - self._begin_s) * max(1, len(self.ranks))

    def start(self, environment: Mapping[str, str], workdir: Path | None = None) -> None:
        """Start the command, in ``workdir`` if given. Raises ``EnvironmentLacks`` where there is no such program."""
        self._folder.make(environment)
        own = {**trainer_environment(self._folder.path), TUNING: str(self._folder.path)}
        try:
            self._process = start_process(self._command, self.log, {**os.environ, **environment, **own}, gently=True, workdir=workdir)
        except OSError as error:
            what = f"cannot be started: {error.strerror}"
            raise EnvironmentLacks(what, "the command", self._command[0], "what follows -- is a program with its arguments") from None
        self._folder.show_life()

    def end(self) -> str | None:
        """Let the script end after its last leg; killed where it does not. What is to be said where it ended badly."""
        assert self._process is not None
        self._folder.stop()
        try:
            code = self._process.wait(GRACE_S + _END_S)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        if code == 0:
            return None
        how = "did not end" if code is None else how_it_ended(code)
        return f"the command {how} after its last leg, whose results are there; it said: {self._last_lines()}"

    def kill(self) -> None:
        """End the command and all that it has started; returns when they are gone from this host, or cannot be killed."""
        self._folder.abort()
        if self._process is not None:
            end([Started("trainer", 0, self._command, {}, self.log, self._process)])
        deadline = time.monotonic() + _KILL_S
        while left := started_with(self._folder.path):  # one may start another between the look and the signal
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        self._end_s = self._end_s or time.monotonic()

    def _num_counted(self, step: int, leg: Leg) -> int:
        return step - self.num_steps - leg.warmup_steps  # a script counts its process's steps

    def _look(self) -> bool:
        self._codes = self._codes or codes_of_zombies(self.ranks) or self._folder.exit_codes()
        return False

    def _failure(self) -> FleetbenchError:
        assert self._process is not None
        beats, now_ns, code = self._beats.read(len(self.ranks)), time.monotonic_ns(), self._process.poll()
        said = said_of_node(self._said())  # before an end of our own doing
        self.kill()
        is_inside = SHARED in os.environ
        told = self._folder.exit_codes() | self._codes
        if is_inside and code:  # the command is rank 0's alone
            told = {0: code} | told
        codes = codes_said(self._said(), self.ranks) | told
        errors = self._folder.failures()
        if errors and all(error.collective for error in errors.values()):  # a rank that the launcher has ended since hung
            codes = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM}
        known = max(errors.keys() | codes.keys(), default=-1)  # also before all have joined
        beats += [NEVER] * (1 + known - len(beats))
        if said is None and not self._was_struck(code) and (errors or codes or (self.ranks and code is None)):
            log = self._folder.path if is_inside else self.log  # inside, every rank has a file of its own there
            return diagnose(codes, errors, beats, now_ns, str(log))
        how = "did not get so far in time" if code is None else how_it_ended(code)
        how += "" if said is None else f" ({said})"
        so_far = "" if self.ranks else ", and no trainer has begun a leg: does the script call fleet.init, and the two lines after it?"
        return LegLost(how + so_far, "the command", None, f"its output: {self.log}; it said: {self._last_lines()}")

    def _was_struck(self, code: int | None) -> bool:
        """Whether a launcher was killed: its ranks end with it, by signals too, and it says nothing."""
        assert self._process is not None
        if code is None or code >= 0 or SHARED in os.environ:
            return False
        return self._process.pid not in (found.place.pid for found in self.ranks.values())

    def _said(self) -> str:
        """All that the command has said so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def _last_lines(self) -> str:
        """The first error of the output, with its place; its last lines, where there is none: a launcher's own follow a script's."""
        text = self._said()
        if (error := _ERROR.search(text)) is not None:
            places = _PLACE.findall(text[: error.start()])
            return error[1] + (f" ({places[-1][0]}, line {places[-1][1]})" if places else "")
        return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-3:]) or "none"


def started_with(folder: Path) -> list[int]:
    """Processes of this host, but for this one, that have ``folder`` as the tuning directory in their environment."""
    mark = f"{TUNING}={folder}".encode()
    return [pid for pid in processes_with(lambda variable: variable == mark) if pid != os.getpid()]


def codes_of_zombies(ranks: Mapping[int, RankPlace]) -> dict[int, int]:
    """Exit codes of ranks of this host that have failed and are still in the table of processes; negative for a signal."""
    here = Place.here()
    codes = {rank: code_of_zombie(found.place.pid) for rank, found in ranks.items() if found.place.shares_numbers(here)}
    return {rank: code for rank, code in codes.items() if code}


def codes_said(log: str, ranks: Mapping[int, RankPlace]) -> dict[int, int]:
    """Exit codes as a launcher's output has them; of who was killed before all had joined, by the number that it gives."""
    codes: dict[int, int] = {}
    num_of_pid = Counter(found.place.pid for found in ranks.values())
    of_pid = {found.place.pid: rank for rank, found in ranks.items()}
    for code, pid in _OF_AGENT.findall(log):
        if num_of_pid[int(pid)] == 1:  # hosts may have given one number to several ranks, and the report names no host
            codes.setdefault(of_pid[int(pid)], int(code))
    for rank, number in _RANK_OF_AGENT.findall(log) if not ranks else ():
        if int(number) != signal.SIGTERM:  # by which the agent ends the others
            codes.setdefault(int(rank), -int(number))
    for rank, name in _OF_LAUNCH.findall(log):
        codes.setdefault(int(rank), -signal.Signals[name])
    return codes


def said_of_node(log: str) -> str | None:
    """What ``fleetbench launch`` said last of a node: that the agent of its workers was killed, say. None where it said nothing."""
    found = _OF_NODE.findall(log)
    return found[-1].strip() if found else None
