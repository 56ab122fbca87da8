"""A job's folder: files by which the driver and the ranks of a launch talk to each other.

=======================  ===================  ==============================================================
file                     written by           content
=======================  ===================  ==============================================================
experiment.toml, data    ``Session``          an experiment's own workload: what all ranks train, and its data
driver.json, driver      driver               its process; a number that changes while it lives
seed                     driver               the trainers' seed, for a leg that sets one
legs/N.json              driver, in order     a leg: strategy, steps, warm-up and what to measure
legs/stop                driver               no further order follows
abort                    driver, or a rank    end at once; a rank writes it when it finds the driver gone
ranks/rankR.json         rank R               its host and the number of trainers, once it has joined
beats/rankR              rank R               the optimizer step that its process is in
results/N/rankR.json     rank R               its part of leg N, written before it reads the next order
errors/rankR.json        rank R               the exception that ended it
codes/rankR.json         starter of rank R    how it ended, if it failed (``launcher``, ``inside``)
=======================  ===================  ==============================================================

A rank writes its own part files alone. Every JSON file is complete or missing, so a shared file system is
enough. A rank learns of the directory by the environment variable ``FLEETBENCH_TUNING``; without it nothing
of this is imported.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fleetbench.config import Config, decode, encode
from fleetbench.digests import atomic_write
from fleetbench.errors import ConfigError
from real.processes.diagnosis import RankError
from real.processes.place import Place
from real.processes.roles import TUNING

Order = TypeVar("Order", bound=Config)
_LAYOUT = struct.Struct("<4q")  # process id, leg, step, time


@dataclass(frozen=True, slots=True)
class Beat:
    """Last sign of life of a rank; ``pid`` is 0 before the first."""

    pid: int
    leg: int
    step: int
    time_ns: int


NEVER = Beat(0, -1, 0, 0)


class BeatWriter:
    """Writes one rank's beats: a small file, also on a shared file system, overwritten when a step begins."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = os.open(folder / f"rank{rank}", os.O_CREAT | os.O_WRONLY, 0o644)

    def beat(self, leg: int, step: int) -> None:
        """Record that ``step`` of ``leg`` begins."""
        os.pwrite(self._file, _LAYOUT.pack(os.getpid(), leg, step, time.monotonic_ns()), 0)


class BeatReader:
    """Reads all ranks' beats.

    ``time_ns`` is when this reader first saw a beat, because it trusts only its own clock.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[int, tuple[bytes, int]] = {}

    def read(self, trainers: int) -> list[Beat]:
        """Return the last beat of every rank, or ``NEVER``."""
        return [self._of(rank) for rank in range(trainers)]

    def _of(self, rank: int) -> Beat:
        try:
            data = (self._folder / f"rank{rank}").read_bytes()
        except OSError:
            return NEVER
        if len(data) < _LAYOUT.size:
            return NEVER
        known = self._seen.get(rank)
        if known is None or known[0] != data:
            known = self._seen[rank] = (data, time.monotonic_ns())
        pid, leg, step, _ = _LAYOUT.unpack(data[: _LAYOUT.size])
        return Beat(pid, leg, step, known[1])


EXPERIMENT = "experiment.toml"
_POLL_S = 0.005
_BEAT_S = 2.0


class JobFolder:
    """Paths of one launch's folder; see the module."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.legs, self.results, self.ranks, self.beats, self.errors, self.codes = (
            path / name for name in ("legs", "results", "ranks", "beats", "errors", "codes")
        )

    def abort(self) -> None:
        """Tell all ranks to end at once, whatever they are doing."""
        (self.path / "abort").touch()

    def is_aborted(self) -> bool:
        """Whether all ranks must end at once, because the driver called ``abort`` or removed the folder."""
        return (self.path / "abort").exists() or not self.legs.exists()


class DriverSide(JobFolder):
    """The driver's operations on the folder. ``make`` comes first."""

    def make(self, seed: int | None = None) -> None:
        """Create the folder with this process as its driver.

        Trainers will find ``seed`` in ``FLEETBENCH_SEED``.
        """
        for part in (self.legs, self.results, self.ranks, self.beats, self.errors, self.codes):
            part.mkdir(parents=True, exist_ok=True)
        if seed is not None:
            (self.path / "seed").write_text(str(seed), encoding="ascii")
        write_json(self.path / "driver.json", encode(Place.here()))  # at which other ranks know the launch

    def show_life(self) -> None:
        """Show ranks on other hosts that the driver lives, by a number in a file that changes until the launch ends."""

        def run() -> None:
            for number in itertools.count():
                if self.is_aborted():
                    return
                with contextlib.suppress(OSError):  # the folder goes with the launch
                    (self.path / "driver").write_text(f"{number}\n", encoding="ascii")
                time.sleep(_BEAT_S)

        threading.Thread(target=run, name="driver-beat", daemon=True).start()

    def order(self, number: int, leg: Any) -> None:
        """Write order ``number`` to the folder, as JSON. ``leg`` is the ``Config`` of a leg or of a look."""
        write_json(self.legs / f"{number}.json", encode(leg))

    def stop(self) -> None:
        """Announce that no leg follows the last order: the script then ends with exit code 0."""
        (self.legs / "stop").touch()

    def joined(self) -> dict[int, str]:
        """Return the host of every rank once all have joined; empty before."""
        told = _parts(self.ranks.glob("rank*.json"))
        return {rank: one["host"] for rank, one in told.items()} if any(one["trainers"] == len(told) for one in told.values()) else {}

    def num_parts(self, number: int) -> int:
        """Return how many ranks have written their part of leg ``number``."""
        return sum(1 for _ in (self.results / str(number)).glob("rank*.json"))

    def parts(self, number: int) -> dict[int, Any]:
        """Return the parts of leg ``number`` that ranks have written so far."""
        return _parts((self.results / str(number)).glob("rank*.json"))

    def failures(self) -> dict[int, RankError]:
        """Return the errors that ended ranks, by rank."""
        return {rank: RankError(**error) for rank, error in _parts(self.errors.glob("rank*.json")).items()}

    def exit_codes(self) -> dict[int, int]:
        """Return the reported exit codes of ranks that ended without being told to; negative for a signal."""
        return _parts(self.codes.glob("rank*.json"))


class RankSide(JobFolder):
    """A rank's operations on the folder. Writing raises ``OSError`` once the driver has removed it."""

    @classmethod
    def of_environment(cls) -> RankSide:
        """Return the folder that ``FLEETBENCH_TUNING`` names. Raises ``ConfigError`` if there is none."""
        name = os.environ.get(TUNING, "")
        if not (Path(name) / "driver.json").is_file():
            raise ConfigError("is no tuning directory", TUNING, name, "unset it: `fleetbench tune -- COMMAND` sets it for the command")
        return cls(Path(name))

    def driver(self) -> Place:
        """Return the place of the driver's process."""
        return decode(_json(self.path / "driver.json"), Place, TUNING)

    def join(self, rank: int, trainers: int, host: str) -> None:
        """Report that this rank, of ``trainers``, has joined."""
        write_json(self.ranks / f"rank{rank}.json", {"trainers": trainers, "host": host}, parents=False)

    def wait_for(self, number: int, kind: type[Order]) -> Order | None:
        """Wait for order ``number`` and return it, or ``None`` if the driver says stop. Every rank waits by itself."""
        path, stop = self.legs / f"{number}.json", self.legs / "stop"
        while True:
            if path.exists():
                return decode(_json(path), kind, str(path))
            if stop.exists():
                return None
            time.sleep(_POLL_S)

    def finish(self, number: int, rank: int, part: dict[str, Any]) -> None:
        """Write this rank's part of leg ``number``."""
        write_json(self.results / str(number) / f"rank{rank}.json", part, parents=False)

    def is_over(self) -> bool:
        """Whether no leg follows the last order."""
        return (self.legs / "stop").exists() or not self.legs.exists()

    def fail(self, rank: int, error: dict[str, Any]) -> None:
        """Report the error that ends this rank, as the fields of a ``RankError``."""
        write_json(self.errors / f"rank{rank}.json", error, parents=False)

    def ended(self, rank: int, code: int) -> None:
        """Report that this rank has ended by itself with this exit code.

        After an abort, which ends ranks that are not to blame, do nothing.
        """
        with contextlib.suppress(OSError):  # the folder may be gone
            if not self.is_aborted():
                write_json(self.codes / f"rank{rank}.json", code, parents=False)


def write_json(path: Path, data: Any, *, parents: bool = True) -> None:
    """Write JSON atomically. Without ``parents``, at most the file's own folder is created."""
    path.parent.mkdir(parents=parents, exist_ok=True)
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(data), encoding="utf-8")


def _parts(paths: Iterable[Path]) -> dict[int, Any]:
    return {int(path.stem.removeprefix("rank")): _json(path) for path in paths}


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
