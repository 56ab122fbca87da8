"""CommandLaunch: the user's command, started once, and watched until it ends.

Its ranks join by ``fleet.init``. Nobody knows what the command starts, so its processes are known by the
job's folder in their environment, and end when that says so.

Which rank ended first, and how, although somebody else has started and reaps it: a process that has ended stays a zombie until
its launcher waits for it, and the kernel tells its exit code in the meantime. What was missed is looked for in what the launcher said:
torch's agent names the exit code of every process, and ``fleetbench launch`` the rank that it blames.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from fleetbench.errors import EnvironmentLacks, FleetbenchError
from real.job.folder import RankPlace
from real.job.launch import Launch
from real.job.workers import start_process
from real.leg import Leg
from real.processes.beats import NEVER
from real.processes.diagnosis import LegLost, failure_of, how_it_ended
from real.processes.place import Place, code_of_zombie, processes_with
from real.processes.roles import TUNING
from real.script.ending import GRACE_S
from real.script.inside import SHARED, trainer_environment

_POLL_S = 0.05
_KILL_S = 5.0
_END_S = 15.0
"""Beyond the script's own way out."""

_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception)(?:: .*)?)$", re.MULTILINE)
_PLACE = re.compile(r'File "([^"]*)", line (\d+)')
"""As Python writes them, also where torch says before each line which rank it is of."""
_OF_AGENT = re.compile(r"exitcode\s*:\s*(-?\d+)\s*\(pid:\s*(\d+)\)")
_RANK_OF_AGENT = re.compile(r"^\s*rank\s*:\s*(\d+) \(local_rank: \d+\)\n\s*exitcode\s*:\s*-(\d+) ", re.MULTILINE)
_OF_LAUNCH = re.compile(r"^error: rank (\d+)(?: on node \d+)?: was killed by (SIG[A-Z0-9]+)", re.MULTILINE)
_OF_NODE = re.compile(r"^error: ((?:this node|node \d+): [^(\n]*)", re.MULTILINE)


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
        if self._process is not None and self._process.poll() is None:
            for how in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(self._process.pid, how)
                    self._process.wait(_KILL_S)
                    break
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
        known = max(errors.keys() | codes.keys(), default=-1)  # also before all have joined
        beats += [NEVER] * (1 + known - len(beats))
        if said is None and not self._was_struck(code) and (errors or codes or (self.ranks and code is None)):
            log = self._folder.path if is_inside else self.log  # inside, every rank has a file of its own there
            return failure_of(codes, errors, beats, now_ns, str(log))
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
