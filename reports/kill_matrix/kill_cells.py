"""Cells of the kill matrix: a command in which one process is struck by one signal at one moment, and what comes of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import psutil

from fleetbench.profile import Profile
from real.job.folder import BeatReader
from real.processes.place import OWNER, PREFIX, sweep

TIMEOUT_S = 10.0
"""Of the trainers' exchanges, in every command."""
GRACE_S = 30.0
"""Until every process of a launch is gone in which one was struck, beside the timeout that applies."""
STARTUP_S = 60.0
"""For all to be there; so long a rank that is stopped before is waited for."""
STOPPED_DRIVER_S = 3.0
"""So long is a stopped driver left alone before it is killed."""

SCRIPT = Path(__file__).with_name("kill_script.py")
TUNED = Path(__file__).with_name("kill_tuned.toml")
WORKER = "real.workloads.train"
"""Module of an experiment's ranks."""
FLEETBENCH = [sys.executable, "-m", "fleetbench"]
TIMEOUTS = ["--set", f"run.timeout={TIMEOUT_S:g} s", "--set", f"run.startup_timeout={STARTUP_S:g} s"]
EVEN = ["--set", "cluster.stragglers=[]"]  # which need no layer times
SHORT = ["--set", "tune.pairs=2", "--set", "tune.trials=8", "--set", "tune.finalists=1", "--set", "tune.leg_steps=20"]
SIGNALS = ("KILL", "STOP", "TERM", "INT")

# Processes of a command: victims, and at which moments they are struck.
_SCRIPT, _WHEN = ("worker", "driver"), ("start", "middle", "end")
MATRIX: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "real": (_SCRIPT, _WHEN),
    "launch": (_SCRIPT, ("start", "middle", "save", "end")),
    "launch --servers": (("worker", "server", "driver"), ("start", "middle", "save", "end")),
    "tune": (_SCRIPT, ("start", "middle")),
    "tune -- SCRIPT": (_SCRIPT, ("start", "middle")),
    "profile -- SCRIPT": (_SCRIPT, ("start", "middle")),
}
_DEADLY = ("KILL", "TERM", "INT")
# Later phases: a command, a moment, a victim, and the signals.
PHASES: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("launch", "load", "worker", _DEADLY),
    ("launch", "load", "driver", _DEADLY),
    ("tune", "searching", "driver", ("KILL", "TERM")),
    ("tune", "trials", "worker", ("KILL",)),
    ("tune", "trials", "driver", ("INT",)),
    ("tune FILE", "searching", "driver", _DEADLY),
    ("tune FILE", "trials", "worker", _DEADLY),
    ("tune FILE", "trials", "driver", _DEADLY),
    ("tune FILE", "verifying", "worker", _DEADLY),
    ("tune FILE", "verifying", "driver", _DEADLY),
    ("tune FILE", "saving", "driver", _DEADLY),
    ("tune -- SCRIPT", "searching", "driver", ("KILL", "TERM")),
    ("tune -- SCRIPT", "trials", "worker", ("KILL", "TERM")),
    ("tune -- SCRIPT", "trials", "driver", ("KILL", "INT")),
    ("profile -- SCRIPT", "saving", "driver", ("KILL", "TERM")),
)
_LINES = {"trials": r"\[2/4\]", "verifying": r"\[3/4\]"}
"""What a tuning has printed at a moment: the stage that has ended."""
_VERDICT = r"^(USE|KEEP DEFAULT)"


@dataclass(frozen=True, slots=True)
class Cell:
    """One case of the matrix."""

    command: str
    moment: str
    victim: str
    signal: str

    def __str__(self) -> str:
        return f"{self.command}: {self.victim} {self.signal} {self.moment}"


@dataclass(frozen=True, slots=True)
class Expected:
    """What is to come of a cell."""

    codes: tuple[int, ...]
    """Exit codes of the command."""
    says: str | None = None
    """Pattern of what it says of the victim, where it does not end well; none where it cannot say anything."""


def cells() -> list[Cell]:
    """The whole matrix."""
    return [
        Cell(command, moment, victim, which)
        for command, (victims, moments) in MATRIX.items()
        for moment, victim, which in itertools.product(moments, victims, SIGNALS)
    ] + phase_cells()


def phase_cells() -> list[Cell]:
    """Those of later phases, whose command is given again afterwards."""
    return [Cell(command, moment, victim, which) for command, moment, victim, signals in PHASES for which in signals]


def expected(cell: Cell) -> Expected:
    """What is to come of a cell; at the end, a process may have done its part before it is struck."""
    if cell.victim == "driver":
        if cell.moment in ("end", "saving"):  # it may be done before it hears the signal
            return Expected(
                (130, 0) if cell.signal in ("TERM", "INT") else (-signal.SIGKILL, 0) if cell.moment == "saving" else (-signal.SIGKILL,)
            )
        return Expected((130,) if cell.signal in ("TERM", "INT") else (-signal.SIGKILL,))
    at_end = (0,) if cell.moment == "end" else ()
    if cell.command.startswith(("tune", "profile")):  # a broken launch of a script is replaced once, and noted
        return Expected((4, 0), "rank 1")
    if cell.victim == "server":
        return Expected((4, *at_end), "server 0")
    return Expected((4, *at_end), "rank 1")


def limit_s(cell: Cell) -> float:
    """Seconds from the signal within which everything is to be gone."""
    waits_for_start = cell.moment == "start" and cell.signal == "STOP" and cell.victim != "driver"
    return GRACE_S + (STARTUP_S if waits_for_start else TIMEOUT_S)


@dataclass(slots=True)
class Outcome:
    """What came of a cell."""

    cell: Cell
    struck: bool
    """Whether the moment came, and the victim was there."""
    code: int | None
    """Of the command; none where it did not end in time."""
    said: str
    """The lines of its output that name somebody."""
    gone_s: float
    """From the signal until all that lived then was gone; of a tuning, the struck launch."""
    left_processes: list[str]
    left_folders: list[str]
    """Names left in the temporary folder after the next start. A failed worker's output, which the error names, is not among them;
    ``torchinductor_USER`` is torch's cache, and no fault."""
    left_files: list[str] = field(default_factory=list)
    """What is half-written or left over below ``runs``, in the checkpoint's folder and in /dev/shm, after the command was given again."""
    again: str | None = None
    """What the same command said when it was given again: a tuning its verdict; none where nothing is to go on."""

    @property
    def faults(self) -> list[str]:
        """How it differs from what is expected."""
        told = expected(self.cell)
        found = []
        if not self.struck:
            found.append("the moment never came")
        if self.code not in told.codes:
            found.append(f"exit code {self.code}, expected {' or '.join(map(str, told.codes))}")
        if self.code not in (0, None) and told.says and not re.search(told.says, self.said):
            found.append(f"does not say {told.says}")
        if self.gone_s > limit_s(self.cell):
            found.append(f"{self.gone_s:.0f} s")
        if self.again == "":
            found.append("given again, it came to no end")
        found += [
            f"left: {what}"
            for what in (*self.left_processes, *self.left_folders, *self.left_files)
            if not what.startswith("torchinductor_")
        ]
        return found

    def record(self) -> dict[str, Any]:
        """For a line of raw data."""
        data = asdict(self)
        return data.pop("cell") | data | {"faults": self.faults}


def run_cell(cell: Cell) -> Outcome:
    """Run one cell; nothing of it is left behind when this returns."""
    folder = Path(tempfile.mkdtemp(prefix="kill-matrix-"))
    try:
        return _run(cell, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(cell: Cell, folder: Path) -> Outcome:
    marks, temporary = folder / "marks", folder / "tmp"
    marks.mkdir()
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "FLEETBENCH_BUSY": "accept"}  # cells run side by side
    log, shared = folder / "output", _shared_memory()
    with log.open("wb") as output:
        command = subprocess.Popen(_command(cell, marks), cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
    mark = f"TMPDIR={temporary}".encode()
    try:
        victim = _await(cell, command, folder)
        struck_s = time.monotonic()
        living = set(_marked(mark))
        if victim is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.Signals[f"SIG{cell.signal}"])
        if victim == command.pid and cell.signal == "STOP":
            time.sleep(STOPPED_DRIVER_S)
            command.kill()
            struck_s = time.monotonic()
        goes_on = cell.victim != "driver" and cell.command.startswith(("tune", "profile"))  # with another launch
        waits_for = living - {command.pid} if goes_on else living
        latest_s = struck_s + limit_s(cell) + 20.0
        while time.monotonic() < latest_s and (waits_for & set(_marked(mark)) or (not goes_on and command.poll() is None)):
            time.sleep(0.02)
        gone_s = time.monotonic() - struck_s
        code = _code(command, 150.0 if goes_on else 0.1)
        left = _what_stays(mark, 0.0 if code is None else 1.0)
    finally:
        for pid in _marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        command.kill()
        command.wait()
    sweep(temporary)  # as the next start does
    again = _again(cell, code, folder, marks, environment) if cell in _PHASE_CELLS and victim is not None else None
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line.strip() for line in lines if re.search(r"error:|rank \d|server 0|launcher of", line)]
    return Outcome(
        cell=cell,
        struck=victim is not None,
        code=code,
        said=" | ".join(said)[-600:],
        gone_s=round(gone_s, 2),
        left_processes=left,
        left_folders=[path.name for path in temporary.iterdir() if not path.name.startswith(PREFIX) or (path / OWNER).exists()],
        left_files=[*_half_written(folder), *sorted(_shared_memory() - shared)] if cell in _PHASE_CELLS else [],
        again=again,
    )


def _again(cell: Cell, code: int | None, folder: Path, marks: Path, environment: dict[str, str]) -> str | None:
    """What the command says in the end when it is given once more, in peace; "" where it fails or comes to no verdict."""
    if code == 0 and not cell.command.startswith("launch"):
        return None
    if cell.command.startswith("launch"):  # what was saved before is loaded
        (marks / "again").touch()
    try:
        done = subprocess.run(
            _command(cell, marks), cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return ""
    wanted = {"tune": _VERDICT, "profile": r"ms"}.get(cell.command.split()[0], r"went on")
    said = [line for line in done.stdout.splitlines() if re.search(wanted, line)]
    return said[-1][:200] if done.returncode == 0 and said else ""


def _half_written(folder: Path) -> list[str]:
    """Temporary files, tunings without a recommendation, and what a tuning keeps to resume although it is done."""
    found = [path for path in folder.glob("runs/**/*") if path.name.startswith(".") or path.suffix in (".tmp", ".part")]
    found += [path for path in folder.glob("runs/*-tune-*") if not (path / "recommendation.json").exists()]
    found += list(folder.glob("runs/resume-*"))
    return [str(path.relative_to(folder)) for path in found]


def _shared_memory() -> set[str]:
    """Files in /dev/shm that torch or a library may have made."""
    names = (path.name for path in Path("/dev/shm").iterdir())  # noqa: S108  # only listed
    return {f"shm: {name}" for name in names if name.startswith(("torch", "sem.", "psm_", "gloo", "fleetbench"))}


_PHASE_CELLS = frozenset(phase_cells())


def _command(cell: Cell, marks: Path) -> list[str]:
    launch = ["launch", "--log-dir", "log"]
    script = [*launch, "--nproc", "2", str(SCRIPT), str(marks)]
    served = [*launch, "--startup-timeout", f"{STARTUP_S:g}", "--servers", "1", "--workers", "2", str(SCRIPT), str(marks), "300", "served"]
    profile = marks / "profile.toml"
    Profile(machine="none", created="2026-01-01", tables=()).save(profile)  # so that real takes none first
    num_steps = 400 if cell.moment == "end" else 20_000
    steps = {"end": "60"}.get(cell.moment, "2000")
    by_command = {
        "real": ["real", *TIMEOUTS, "--set", f"workload.profile={profile}", *EVEN, "--set", f"workload.steps={num_steps}"],
        "launch": [*script, steps],
        "launch --servers": served,
        "tune": ["tune", *TIMEOUTS, *SHORT, *(["--set", "tune.search_seconds=5"] if cell in _PHASE_CELLS else [])],
        "tune FILE": ["tune", str(TUNED), *TIMEOUTS],
        "tune -- SCRIPT": ["tune", *TIMEOUTS, *SHORT, "--", *FLEETBENCH, *script, "100000"],
        "profile -- SCRIPT": ["profile", *TIMEOUTS, "--", *FLEETBENCH, *script, "100000"],
    }
    return [*FLEETBENCH, *by_command[cell.command]]


def _await(cell: Cell, command: subprocess.Popen[bytes], folder: Path) -> int | None:
    """The victim, once its moment has come; none where the command ended before."""
    marks, temporary = folder / "marks", folder / "tmp"
    with_marks = "SCRIPT" in cell.command or cell.command.startswith("launch")
    in_phase = cell in _PHASE_CELLS and not cell.command.startswith("launch")
    deadline = time.monotonic() + (300.0 if in_phase else 90.0)
    while command.poll() is None and time.monotonic() < deadline:
        if in_phase:
            has_come = _phase_has_come(cell, folder)
        else:
            has_come = (_marks_say if with_marks else _folder_says)(cell, command.pid, marks if with_marks else temporary)
        if has_come:
            victim = _victims()[cell.victim](command.pid)
            if victim is not None:
                return victim
        time.sleep(0.005)
    return None


def _phase_has_come(cell: Cell, folder: Path) -> bool:
    if cell.moment == "saving":
        if cell.command.startswith("tune"):
            return any(folder.glob("runs/resume-*/recommendation.json")) or any(folder.glob("runs/*-tune-*"))
        return bool(re.search(r"profile: (\d+) of \1\b", (folder / "output").read_text(encoding="utf-8", errors="replace")))
    if cell.moment == "searching":
        return any(folder.glob("runs/resume-*/evidence.json"))
    return bool(re.search(_LINES[cell.moment], (folder / "output").read_text(encoding="utf-8", errors="replace")))


def _marks_say(cell: Cell, _driver: int, marks: Path) -> bool:
    name = "1"
    if cell.command == "launch --servers" and (cell.moment == "save" or (cell.victim == "server" and cell.moment != "middle")):
        name = "server0"
    if cell.command == "launch --servers" and cell.victim == "driver" and cell.moment == "start":
        return all((marks / f"start.{name}").exists() for name in ("0", "1", "server0"))
    if cell.command == "launch --servers" and cell.moment == "save" and cell.victim == "worker" and not (marks / "middle.1").exists():
        return False  # servers save from their start on, when a trainer may not have come yet
    return (marks / f"{cell.moment}.{name}").exists()


def _folder_says(cell: Cell, driver: int, temporary: Path) -> bool:
    if cell.moment == "start":
        return _worker(driver) is not None
    for folder in temporary.glob("fleetbench-*"):
        if cell.moment == "end":
            return any(folder.glob("results/0/rank*.json"))
        return all(beat.leg >= 0 and beat.step >= 5 for beat in BeatReader(folder / "beats").read(2))
    return False


def _victims() -> dict[str, Callable[[int], int | None]]:
    return {"driver": lambda driver: driver, "worker": _worker, "server": _server}


def _worker(driver: int) -> int | None:
    """Rank 1, as soon as it is the program that trains."""
    for pid, command, environment in _tree(driver):
        is_program = (SCRIPT.name in command or WORKER in command) and "children.py" not in command
        if is_program and "1" in (environment.get("RANK"), environment.get("PADDLE_TRAINER_ID")):
            return pid
    return None


def _server(driver: int) -> int | None:
    return next((pid for pid, _, environment in _tree(driver) if environment.get("TRAINING_ROLE") == "PSERVER"), None)


def _tree(driver: int) -> Iterator[tuple[int, str, dict[str, str]]]:
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(driver).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                yield child.pid, " ".join(child.cmdline()), child.environ()


def _marked(mark: bytes) -> list[int]:
    """Processes with that variable in their environment, zombies not among them, whose environment is empty."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208  # many times a second
        if name.isdigit():
            with contextlib.suppress(OSError):
                if mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    found.append(int(name))
    return found


def _code(command: subprocess.Popen[bytes], patience_s: float) -> int | None:
    try:
        return command.wait(patience_s)
    except subprocess.TimeoutExpired:
        return None


def _what_stays(mark: bytes, patience_s: float) -> list[str]:
    deadline = time.monotonic() + patience_s
    while (found := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    words = []
    for pid in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            words.append(" ".join(Path(word).name for word in psutil.Process(pid).cmdline())[-120:])
    return words


def read(path: Path) -> list[Outcome]:
    """What ``record`` wrote, a line each; of a cell the last."""
    found: dict[Cell, Outcome] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        cell = Cell(*(data.pop(name) for name in ("command", "moment", "victim", "signal")))
        names = {each.name for each in fields(Outcome)} & set(data)  # earlier lines have fewer
        found[cell] = Outcome(cell, **{name: data[name] for name in names})
    return list(found.values())
