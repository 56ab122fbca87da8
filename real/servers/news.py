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
from real.servers.security import TOKEN
from real.servers.wire import WireError, read_json, reading

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
        with reading("no notice of a launcher"):
            (text,) = tensors
            data = read_json(text)
            has_its_fields = data.keys() == cls.__dataclass_fields__.keys() and type(data["knows_end"]) is bool
            if not has_its_fields or not all(_is_code(code) for code in data["lost"].values()):
                raise WireError("no notice of a launcher")
            lost = {int(rank): code for rank, code in data["lost"].items()}
            notice = cls(lost=lost, failure=_failure(data["failure"]), knows_end=data["knows_end"])
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
        with reading("no news of a server"):
            (text,) = tensors
            data = read_json(text)
            if data["state"] not in ("serving", "stopping", "ended"):
                raise WireError("no state of a server")
            return cls(
                state=data["state"],
                left=tuple(map(int, data["left"])),
                lost=tuple(_lost(one) for one in data["lost"]),
                failure=_failure(data["failure"]),
                silence_s=float(data["silence_s"]),
            )


def _is_code(code: object) -> bool:
    """Whether this is a process's exit code, or a signal's number below zero."""
    return type(code) is int and abs(code) < 2**31


def _lost(data: Mapping[str, Any]) -> Lost:
    code = data["code"]
    return Lost(rank=int(data["rank"]), why=str(data["why"]), code=None if code is None else int(code))


def _failure(data: Mapping[str, object] | None) -> Failure | None:
    return None if data is None else Failure(where=str(data["where"]), what=str(data["what"]))


def of_nobody_left(lost: Sequence[Lost], num_strangers: int) -> WorkerFailed:
    """What a server ends with whose trainers are all lost, or have never come.

    Names the first to blame of all trainers, which are ``lost``: who was killed, then who ended by itself, then who fell silent.

    ``num_strangers``: connections that were refused, which may have been theirs.
    """
    first = min(lost, key=_order_of_blame)
    hint = "its own output says why; start the job again, from the last checkpoint if there is one"
    if first.why == NEVER_CAME:
        hint = "is it started, and does its address of this server lead here?"
        if num_strangers:
            hint += f" Connections were refused, {num_strangers} in all: has it this server's {TOKEN}?"
    return WorkerFailed(f"this trainer {first.why}, and no other is left", f"rank {first.rank}", hint=hint)


def _order_of_blame(one: Lost) -> int:
    if one.code is None:
        return (FELL_SILENT, NEVER_CAME).index(one.why) + 2 if one.why in (FELL_SILENT, NEVER_CAME) else 1
    return 0 if one.code < 0 else 1
