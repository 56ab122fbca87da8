"""Faults as values: which worker is killed, in which step, and in the middle of what."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Place = Literal["start", "bucket", "averaging"]
"""Before a worker has joined; with a gradient bucket in flight; with an averaging of Local SGD in flight."""


@dataclass(frozen=True)
class Fault:
    """SIGKILL for one worker."""

    rank: int
    place: Place
    step: int = 0
    """Counted from 1; unused at ``start``."""


def encode(faults: Sequence[Fault]) -> str:
    """Faults as an argument of a script."""
    return json.dumps([asdict(fault) for fault in faults])


def decode(text: str) -> list[Fault]:
    """Faults from a script's argument."""
    return [Fault(**item) for item in json.loads(text)]


def happened(fault: Fault, mark: Path) -> dict[str, Any]:
    """What the struck worker noted before it died; an assertion fails if it was not struck so."""
    assert mark.exists(), "nobody was struck"
    found = json.loads(mark.read_text(encoding="utf-8"))
    assert (found["rank"], found["place"]) == (fault.rank, fault.place)
    assert fault.place == "start" or (found["step"] == fault.step and found["in_flight"])
    return dict(found)
