"""CommandLaunch: the user's command, started once, and watched until it ends.

Its ranks join by ``fleet.init``. Nobody knows what the command starts, so its processes are known by the
job's folder in their environment, and end when that says so.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fleetbench.children import bound
from fleetbench.errors import EnvironmentLacks, FleetbenchError
from real.job.launch import Launch
from real.leg import Leg
from real.processes.beats import NEVER
from real.processes.diagnosis import LegLost, failure_of, how_it_ended
from real.processes.place import processes_with
from real.processes.roles import TUNING
from real.script.deaths import Deaths, said_of_node
from real.script.ending import GRACE_S
from real.script.inside import SHARED, trainer_environment

_POLL_S = 0.05
_LAST_PARTS_S = 5.0
"""For the parts of ranks that other hosts started, after the command's own end."""
_BEAT_S = 2.0
_KILL_S = 5.0
_END_S = 15.0
"""Beyond the script's own way out."""

_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception)(?:: .*)?)$", re.MULTILINE)
_PLACE = re.compile(r'File "([^"]*)", line (\d+)')
"""As Python writes them, also where torch says before each line which rank it is of."""


class CommandLaunch(Launch):
    """One launch. ``run`` gives orders; ``end`` or ``kill`` ends it."""

    def __init__(self, command: Sequence[str], folder: Path, *, startup_timeout_s: float, timeout_s: float) -> None:
        super().__init__(folder, folder / "command.log", startup_timeout_s=startup_timeout_s, timeout_s=timeout_s)
        self._command = list(command)
        self._deaths = Deaths()
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._ended_s: float | None = None
        self._end_s: float | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the command is over."""
        return self._process is None or self._process.poll() is not None

    @property
    def held_s(self) -> float:
        """Seconds for which the command held its trainers so far, all of them together; one trainer until all have joined."""
        return ((self._end_s or time.monotonic()) - self._begin_s) * max(1, len(self.ranks))

    def start(self, environment: Mapping[str, str], workdir: Path | None = None) -> None:
        """Start the command, in ``workdir`` if given. Raises ``EnvironmentLacks`` where there is no such program."""
        self._folder.make(environment)
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    bound(self._command, gently=True),
                    cwd=workdir,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, **environment, **trainer_environment(self._folder.path), TUNING: str(self._folder.path)},
                )
        except OSError as error:
            what = f"cannot be started: {error.strerror}"
            raise EnvironmentLacks(what, "the command", self._command[0], "what stands behind -- is a program with its arguments") from None
        threading.Thread(target=self._show_life, name="driver-beat", daemon=True).start()

    def end(self) -> str | None:
        """Let the script end behind its last leg; killed where it does not. What is to be said where it ended badly."""
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
        self._closing.set()
        self._folder.abort()
        if self._process is not None and self._process.poll() is None:
            self._signal(signal.SIGTERM)
            try:
                self._process.wait(_KILL_S)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                self._process.wait()
        deadline = time.monotonic() + _KILL_S
        while left := started_with(self._folder.path):  # one may start another between the look and the signal
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        self._end_s = self._end_s or time.monotonic()

    def _signal(self, which: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, which)

    def _show_life(self) -> None:
        number = 0
        while not self._closing.wait(_BEAT_S):
            number += 1
            with contextlib.suppress(OSError):  # the folder goes with the launch
                self._folder.beat(number)

    def _has_ended_well(self, number: int) -> bool:
        assert self._process is not None
        if self._process.returncode != 0:
            raise self._failure()
        self._ended_s = self._ended_s or time.monotonic()
        return not self.ranks or time.monotonic() - self._ended_s > _LAST_PARTS_S or self._folder.num_parts(number) == len(self.ranks)

    def _num_counted(self, step: int, leg: Leg) -> int:
        return step - self.num_steps - leg.warmup_steps  # a script counts its process's steps

    def _num_ranks(self) -> int:
        return len(self.ranks)

    def _look(self) -> bool:
        self._deaths.look(self.ranks)
        self._codes = self._deaths.codes = self._deaths.codes or self._folder.exit_codes()
        return False

    def _failure(self) -> FleetbenchError:
        assert self._process is not None
        beats, now_ns, code = self._beats.read(len(self.ranks)), time.monotonic_ns(), self._process.poll()
        said = said_of_node(self._said())  # before an end of our own doing
        self.kill()
        codes = self._folder.exit_codes() if SHARED not in os.environ else {0: code or 0, **self._folder.exit_codes()}
        self._deaths.codes = {rank: found for rank, found in codes.items() if found} | self._deaths.codes
        self._deaths.read(self._said(), self.ranks)
        errors = self._errors()
        known = max(errors.keys() | self._deaths.codes.keys(), default=-1)  # also before all have joined
        beats += [NEVER] * (1 + known - len(beats))
        if said is None and not self._was_struck(code) and (errors or self._deaths.codes or (self.ranks and code is None)):
            log = self.log if SHARED not in os.environ else self._folder.path  # inside, every rank has a file of its own there
            return failure_of(self._deaths.codes, errors, beats, now_ns, str(log))
        how = "did not get so far in time" if code is None else how_it_ended(code)
        how += "" if said is None else f" ({said})"
        so_far = "" if self.ranks else ", and no trainer has begun a leg: does the script call fleet.init, and the two lines behind it?"
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
