"""News: what servers and the launchers of their job tell each other. A notice goes to a server, news come from it; both are JSON.

Every launcher sees its own processes alone. What became of those of other hosts it learns from the servers, which hear of
it from the launchers there, or find it out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from fleetbench.errors import FleetbenchError, WorkerFailed
from real.servers.wire import WireError

FELL_SILENT = "has fallen silent"
NEVER_CAME = "has never come"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What ends a job, and whom it names: ``rank 1``, ``server 0``, or a host."""

    where: str
    what: str

    @classmethod
    def of(cls, error: FleetbenchError, own: str) -> Self:
        """What an error says; one that names no worker is that of its server, whose name is ``own``."""
        if isinstance(error, WorkerFailed):
            return cls(where=error.where or own, what=error.what)
        return cls(where=own, what=f"{error.where} {error.what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A trainer that is gone without having left."""

    rank: int
    why: str
    """Behind its name: ``has fallen silent``."""
    code: int | None = None
    """Its exit code, negative for a signal, where its launcher saw it end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What a launcher tells a server, again and again."""

    lost: Mapping[int, int] = field(default_factory=dict)
    """Exit codes of its own trainers that have ended. Of those who have not left by then, who ended with 0 counts as if he had."""
    failure: Failure | None = None
    """Why the job cannot go on."""
    knows_end: bool = False
    """It has heard how this server ended, and asks no more."""

    def to_bytes(self) -> bytes:
        """As a tensor of a message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, tensors: Sequence[memoryview], trainers: int) -> Notice:
        """Read what ``to_bytes`` wrote. Raises ``WireError`` for anything else, and for trainers that there are not."""
        data = _read(tensors)
        try:
            lost = {int(rank): int(code) for rank, code in data["lost"].items()}
            notice = cls(lost=lost, failure=_failure(data["failure"]), knows_end=bool(data["knows_end"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WireError("no notice of a launcher") from error
        for rank in notice.lost:
            if not 0 <= rank < trainers:
                raise WireError(f"a trainer {rank} of {trainers}")
        return notice


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a server tells launchers."""

    state: Literal["serving", "stopping", "ended"]
    """``stopping``: nobody trains any more, and the last checkpoint may still be written. ``ended``: it says no more."""
    left: tuple[int, ...] = ()
    """Trainers that have left in order."""
    lost: tuple[Lost, ...] = ()
    failure: Failure | None = None
    """What ended the job, or what this server failed by."""
    silence_s: float
    """For so long nobody may be silent."""

    def to_bytes(self) -> bytes:
        """As a tensor of a message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, tensors: Sequence[memoryview]) -> News:
        """Read what ``to_bytes`` wrote. Raises ``WireError`` for anything else."""
        data = _read(tensors)
        try:
            if data["state"] not in ("serving", "stopping", "ended"):
                raise WireError("no state of a server")
            return cls(
                state=data["state"],
                left=tuple(map(int, data["left"])),
                lost=tuple(_lost(one) for one in data["lost"]),
                failure=_failure(data["failure"]),
                silence_s=float(data["silence_s"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WireError("no news of a server") from error


def _read(tensors: Sequence[memoryview]) -> dict[str, Any]:
    try:
        (text,) = tensors
        data = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise WireError("no JSON") from error
    if not isinstance(data, dict):
        raise WireError("no JSON object")
    return data


def _lost(data: Mapping[str, Any]) -> Lost:
    code = data["code"]
    return Lost(rank=int(data["rank"]), why=str(data["why"]), code=None if code is None else int(code))


def _failure(data: Mapping[str, object] | None) -> Failure | None:
    return None if data is None else Failure(where=str(data["where"]), what=str(data["what"]))
