"""Resumption: what an interrupted tuning of a script or an experiment leaves, so that the same command goes on with it.

A folder below ``--out``, named by the command, if any, the Python files beside the script, what was asked for,
and where that runs: the machine, versions, and the environment variables that experiments set. It holds
the experiment that is tuned (found out, for a script), with its profile, the legs that were run, the seconds for
which trainers were held, and which process is at it; it goes when the tuning is done, so that a tuning
that was not interrupted begins again.

A tuning asks for the same legs in the same order as long as its experiment is the same, so the n-th leg
that was run before is the answer to the n-th that is asked for. Legs that are to be of one launch
(``together``) count only when all of them are there. What a strategy failed of is kept as well; a launch
that broke is kept as its leg's failure once the tuning has gone on without that leg.
"""

import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fleetbench.config import decode, encode
from fleetbench.digests import file_digest, json_digest, read_json, sealed_json, write_whole
from fleetbench.environment import RECORDED
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.result import RunResult
from fleetbench.store import commit, load_run, machine, save_run, versions
from real.leg import Leg
from real.processes.diagnosis import LegFailed, LegLost
from real.processes.place import Place
from tuner.real_runs import Runner

_SET_BY_LIBRARIES = ("KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK")
"""Variables that importing scikit-learn sets in this process."""
_OWNER, _HELD = "owner.json", "held_s"
_LEG = "leg.json"
_METHOD = 3
"""Of runs to the target, where no commit tells it; 3: on a line through a script's losses, which has no warm-up."""


@dataclass(slots=True)
class Journal:
    """A runner that remembers, around one that runs. ``replaying`` (the answer is on disk) -> ``running``, for good."""

    runner: Runner
    folder: Path
    on_leg: Callable[[], object] = lambda: None
    """Called after every leg that was run, however it ended."""
    timer: Callable[[], float] = time.perf_counter
    num_asked: int = 0
    num_replayed: int = 0
    replayed_s: float = 0.0
    """What the replayed legs took when they were run."""

    @property
    def startup_s(self) -> float:
        """See ``Runner``."""
        return self.runner.startup_s

    @property
    def kept_s(self) -> float:
        """What the legs on disk took."""
        return sum(_took_s(entry) for entry in self.folder.glob("[0-9]*"))

    def clock(self) -> float:
        """Seconds, on which a replayed leg takes what it took when it was run: a budget decides as it did then."""
        return self.timer() + self.replayed_s

    def run(self, leg: Leg) -> RunResult:
        """See ``Runner``."""
        number = self.num_asked
        self.num_asked += 1
        known = self._known(number, leg)
        if known is None:
            self._forget_from(number)
            return self._record(number, leg)
        self.num_replayed += 1
        self.replayed_s += _took_s(self._entry(number))
        if isinstance(known, LegFailed):
            raise known
        return known

    def together(self, legs: Sequence[Leg]) -> None:
        """See ``Runner``; where not all of them are on disk, all are run again."""
        if any(self._known(number, leg) is None for number, leg in enumerate(legs, self.num_asked)):
            self._forget_from(self.num_asked)
            self.runner.together(legs)

    def _entry(self, number: int) -> Path:
        return self.folder / f"{number:05d}"

    def _known(self, number: int, leg: Leg) -> RunResult | LegFailed | None:
        """What this leg gave when it was run as that number, to its end; none where it was not, or where that cannot be read."""
        entry = self._entry(number)
        try:
            found = read_json((entry / _LEG).read_text(encoding="utf-8"))
            if found["leg"] != encode(leg):
                return None
            if found["lost"] and not self._entry(number + 1).exists():  # the tuning did not go on without it: the machine may be well now
                return None
            if found["failure"]:
                return LegFailed(*found["failure"])
            (run,) = (path for path in entry.iterdir() if path.is_dir())
            return load_run(run)
        except (OSError, ValueError, TypeError, LookupError, RecursionError, ConfigError):
            return None

    def _record(self, number: int, leg: Leg) -> RunResult:
        self._entry(number).mkdir(parents=True)
        began = self.timer()
        try:
            result = self.runner.run(leg)
        except LegFailed as failure:
            self._complete(number, leg, self.timer() - began, failure)
            raise
        finally:
            self.on_leg()
        took_s = self.timer() - began
        save_run(result, self._entry(number))
        self._complete(number, leg, took_s)
        return result

    def _complete(self, number: int, leg: Leg, took_s: float, failure: LegFailed | None = None) -> None:
        """From now on the leg gives the run that is stored in its entry, or this failure."""
        failed, lost = [] if failure is None else failure.args, isinstance(failure, LegLost)
        data = {"leg": encode(leg), "took_s": took_s, "failure": failed, "lost": lost}
        write_whole(self._entry(number) / _LEG, sealed_json(data))

    def _forget_from(self, number: int) -> None:
        """What follows was asked for by a tuning that went another way, or was not finished."""
        for entry in self.folder.glob("[0-9]*"):
            if int(entry.name) >= number:
                self.replayed_s += _took_s(entry)  # it was spent all the same
                shutil.rmtree(entry)


def _took_s(entry: Path) -> float:
    """What the leg of an entry took; 0 of one that cannot be read, which is not replayed."""
    try:
        return float(read_json((entry / _LEG).read_text(encoding="utf-8"))["took_s"])
    except (OSError, ValueError, TypeError, LookupError, ConfigError):
        return 0.0


class Resumption:
    """``claimed`` (no other process is at it) -> ``kept`` (the experiment is known) -> ``closed``."""

    def __init__(self, command: Sequence[str], base: Experiment, out: Path) -> None:
        key = json_digest(inputs_of(command) | {"base": encode(base)})[:12]
        self.folder = out / f"resume-{base.name}-{key}"
        self.legs, self.draft = self.folder / "legs", self.folder / "draft"
        """Of the journal; and where the recommendation's folder lies until it is complete."""

    def claim(self) -> None:
        """From now on this process is at it. Raises ``ConfigError`` where another one of this host is.

        Nothing is made where nothing was kept yet.
        """
        self._refuse_another()
        if self.folder.is_dir():
            write_whole(self.folder / _OWNER, json.dumps(encode(Place.here())))

    def experiment(self) -> Experiment | None:
        """What was found before; none where nothing was, or where its profile is gone."""
        try:
            found = Experiment.load(self.folder / "experiment.toml")
            found.digest()  # reads the profile
        except ConfigError:
            return None
        return found

    def held_s(self) -> float:
        """Seconds of all trainers together that are gone so far, in all attempts."""
        return float((self.folder / _HELD).read_text(encoding="ascii"))

    def hold(self, held_s: float) -> None:
        """So many seconds are gone."""
        write_whole(self.folder / _HELD, f"{held_s}\n")

    def keep(self, experiment: Experiment, held_s: float) -> None:
        """What the script is, and what it took to find out; legs from before are of something else.

        Raises ``ConfigError`` where another process of this host has kept something in the meantime.
        """
        self._refuse_another()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.claim()
        self.hold(held_s)
        experiment.save(self.folder / "experiment.toml")

    def close(self) -> None:
        """The tuning is done."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _refuse_another(self) -> None:
        try:
            owner = decode(json.loads((self.folder / _OWNER).read_text(encoding="utf-8")), Place, _OWNER)
        except (OSError, ValueError, ConfigError):
            return
        if owner.shares_numbers(Place.here()) and owner.pid != os.getpid() and owner.lives():
            hint = f"wait for it, or give another --out; where that process is no tuning, remove {_OWNER} there"
            raise ConfigError("another process is at this tuning", str(self.folder), f"process {owner.pid}", hint)


def inputs_of(command: Sequence[str]) -> dict[str, Any]:
    """What measurements depend on beside their experiment, as plain data: the command, its files, this code, and where it runs.

    Of the files: those that the command names, a module after ``-m`` among them, and Python files beside them; no data.
    """
    modules = [f"{word.replace('.', '/')}.py" for option, word in pairwise(command) if option == "-m"]
    named = [Path(word) for word in (*command, *modules) if Path(word).is_file()]
    beside = sorted({*named, *(path for file in named if file.suffix == ".py" for path in file.parent.glob("*.py") if path.is_file())})
    return {
        "command": list(command),
        "folder": str(Path.cwd()),
        "files": {str(path): file_digest(path) for path in beside},
        "code of fleetbench": commit(),
        "method": _METHOD,
        "machine": machine() | {"host": platform.node()},
        "environment": {name: value for name, value in os.environ.items() if name.startswith(RECORDED) and name not in _SET_BY_LIBRARIES},
        "versions": versions(),
    }
