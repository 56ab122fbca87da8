"""Journal: legs on disk, so that an interrupted tuning goes on where it stopped.

A tuning asks for the same legs in the same order as long as its experiment is the same, so the n-th leg
that was run before is the answer to the n-th that is asked for. Legs that are to be of one launch
(``together``) count only when all of them are there. What a strategy failed of is kept as well; a launch
that broke is kept as its leg's failure once the tuning has gone on without that leg.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleetbench.config import encode
from fleetbench.digests import read_json, sealed_json, write_whole
from fleetbench.errors import ConfigError
from fleetbench.result import RunResult
from fleetbench.store import load_run, save_run
from real.leg import Leg
from real.script.failure import LegFailed, LegLost
from tuner.legs import Runner

_LEG, _FAILURE = "leg.json", "failure.json"


@dataclass(slots=True)
class Journal:
    """A runner that remembers, around one that runs. ``replaying`` (the answer is on disk) -> ``running``, for good."""

    runner: Runner
    folder: Path
    on_leg: Callable[[], object] = lambda: None
    """Called behind every leg that was run, however it ended."""
    num_asked: int = 0
    num_replayed: int = 0
    _lost: tuple[int, Leg, LegLost] | None = None
    """The last leg, where its launch broke."""

    @property
    def startup_s(self) -> float:
        """See ``Runner``."""
        return self.runner.startup_s

    def run(self, leg: Leg) -> RunResult:
        """See ``Runner``."""
        if self._lost is not None:  # whoever asked for it goes on: its strategy was given up
            self._fail(*self._lost)
            self._lost = None
        number = self.num_asked
        self.num_asked += 1
        known = self._known(number, leg)
        if known is None:
            self._forget_from(number)
            return self._record(number, leg)
        self.num_replayed += 1
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
            if read_json((entry / _LEG).read_text(encoding="utf-8")) != encode(leg):
                return None
            if (entry / _FAILURE).is_file():
                return LegFailed(*read_json((entry / _FAILURE).read_text(encoding="utf-8"))["args"])
            (run,) = (path for path in entry.iterdir() if path.is_dir())
            return load_run(run)
        except (OSError, ValueError, TypeError, LookupError, RecursionError, ConfigError):
            return None

    def _record(self, number: int, leg: Leg) -> RunResult:
        entry = self._entry(number)
        entry.mkdir(parents=True)
        try:
            result = self.runner.run(leg)
        except LegLost as lost:  # another try may find the machine well
            self._lost = number, leg, lost
            raise
        except LegFailed as failure:
            self._fail(number, leg, failure)
            raise
        finally:
            self.on_leg()
        save_run(result, entry)
        self._complete(entry, leg)
        return result

    def _fail(self, number: int, leg: Leg, failure: LegFailed) -> None:
        """From now on this is what the leg gives."""
        entry = self._entry(number)
        write_whole(entry / _FAILURE, sealed_json({"args": failure.args}))
        self._complete(entry, leg)

    def _complete(self, entry: Path, leg: Leg) -> None:
        """The entry counts from now on."""
        write_whole(entry / _LEG, sealed_json(encode(leg)))

    def _forget_from(self, number: int) -> None:
        """What follows was asked for by a tuning that went another way, or was not finished."""
        for entry in self.folder.glob("[0-9]*"):
            if int(entry.name) >= number:
                shutil.rmtree(entry)
