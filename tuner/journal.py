"""Journal: legs on disk, so that an interrupted tuning goes on where it stopped.

A tuning asks for the same legs in the same order as long as its experiment is the same, so the n-th leg
that was run before is the answer to the n-th that is asked for. Legs that are to be of one launch
(``together``) count only when all of them are there. What a strategy failed of is kept as well.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fleetbench.config import encode
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
    num_asked: int = 0
    num_replayed: int = 0

    @property
    def startup_s(self) -> float:
        """See ``Runner``."""
        return self.runner.startup_s

    def run(self, leg: Leg) -> RunResult:
        """See ``Runner``."""
        number = self.num_asked
        self.num_asked += 1
        if self._has(number, leg):
            self.num_replayed += 1
            return self._replay(number)
        self._forget_from(number)
        return self._record(number, leg)

    def together(self, legs: Sequence[Leg]) -> None:
        """See ``Runner``; where not all of them are on disk, all are run again."""
        if not all(self._has(number, leg) for number, leg in enumerate(legs, self.num_asked)):
            self._forget_from(self.num_asked)
            self.runner.together(legs)

    def _entry(self, number: int) -> Path:
        return self.folder / f"{number:05d}"

    def _has(self, number: int, leg: Leg) -> bool:
        """Whether this leg was run as that number, to its end."""
        try:
            known = json.loads((self._entry(number) / _LEG).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return bool(known == encode(leg))

    def _replay(self, number: int) -> RunResult:
        entry = self._entry(number)
        if (entry / _FAILURE).is_file():
            raise LegFailed(*json.loads((entry / _FAILURE).read_text(encoding="utf-8")))
        (run,) = (path for path in entry.iterdir() if path.is_dir())
        return load_run(run)

    def _record(self, number: int, leg: Leg) -> RunResult:
        entry = self._entry(number)
        entry.mkdir(parents=True)
        try:
            result = self.runner.run(leg)
        except LegLost:  # another try may find the machine well
            raise
        except LegFailed as failure:
            (entry / _FAILURE).write_text(json.dumps(failure.args), encoding="utf-8")
            (entry / _LEG).write_text(json.dumps(encode(leg)), encoding="utf-8")
            raise
        save_run(result, entry)
        partial = entry / f"{_LEG}.partial"
        partial.write_text(json.dumps(encode(leg)), encoding="utf-8")
        partial.replace(entry / _LEG)  # last: with it the entry counts
        return result

    def _forget_from(self, number: int) -> None:
        """What follows was asked for by a tuning that went another way, or was not finished."""
        for entry in self.folder.glob("[0-9]*"):
            if int(entry.name) >= number:
                shutil.rmtree(entry)
