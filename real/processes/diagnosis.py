"""Diagnosis: which rank broke a launch.

A rank that dies makes the others fail a moment later, with messages that name ports; a rank that
stops makes them run into their timeout. So the first to blame is who was killed, then who raised
an error of its own, then who fell silent.

Errors of a leg of a user's script:

LegFailed     probably the strategy's own fault: out of memory, non-finite values, an exception, a refusal
└── LegLost   the launch broke: a process was killed or fell silent; worth another try
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetbench.errors import ConfigError, WorkerFailed

if TYPE_CHECKING:
    from real.job.folder import Beat

OUT_OF_MEMORY = ("out of memory", "OutOfMemoryError", "MemoryError", "can't allocate memory")
STOPPED = "was stopped and did not answer, until it was killed"
"""Part of an error about a process that only SIGKILL ended."""
NOTE = "failed-rank.json"
"""File in a launcher's folder."""
NOTE_PATH = "FLEETBENCH_FAILURE_NOTE"
"""Environment variable with the file in which a launcher finds the first failure that a server or trainer of its host names."""


class LegFailed(WorkerFailed):
    """A leg cannot run with its strategy; ``where`` names the rank."""


class LegLost(LegFailed):
    """The launch broke during a leg."""


@dataclass(frozen=True, slots=True)
class RankError:
    """Report of a rank's own process before it ended."""

    message: str
    collective: bool
    """Whether it failed in a collective, which is usually another rank's fault."""
    time_ns: int
    config: list[str | None] | None = None
    """Arguments of the ``ConfigError``; none for other errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Statement of a rank before it ended."""

    rank: int
    what: str
    """Description, such as ``failed at step 3: ValueError: the third layer is odd``."""
    own: bool
    """Whether the error is the rank's own; false if a collective broke, which is usually another rank's
    fault."""

    def __str__(self) -> str:
        return f"rank {self.rank} {self.what}"


def read_note(path: Path) -> tuple[str, str] | None:
    """Return the process that another one has blamed for their launcher, such as ``rank 1``, and why.

    Return None if there is no such file.
    """
    if not path.exists():
        return None
    where, what = json.loads(path.read_text(encoding="utf-8"))
    return where, what


def note_failure(error: BaseException | None) -> None:
    """Name, for this host's launcher, the process because of which this one ends. The first note counts."""
    path = Path(os.environ.get(NOTE_PATH, ""))
    if not path.name or path.exists() or not isinstance(error, WorkerFailed) or error.where is None:
        return
    own = path.with_name(f"{path.name}.{os.getpid()}")
    if error.where.startswith(("rank ", "server ")):
        with suppress(FileNotFoundError):  # the launcher is gone, and its folder with it
            own.write_text(json.dumps([error.where, error.what]), encoding="utf-8")
            own.replace(path)


def diagnose(
    exit_codes: Mapping[int, int], errors: Mapping[int, RankError], beats: Sequence[Beat], now_ns: int, log: str
) -> LegFailed | ConfigError:
    """The error that names the rank to blame.

    A worker's ``ConfigError`` is handed on as it was. Memory that ran out goes first.

    Args:
        exit_codes: of ranks that ended by themselves before anybody was told to; negative is a signal.
        errors: what ranks reported.
        beats: last sign of life of every rank.
        now_ns: on the clock of the beats.
        log: where the workers' output is.
    """
    for error in errors.values():
        if error.config is not None:
            what, where, value, hint = error.config
            return ConfigError(what or error.message, where, value, hint)
    hint = f"the workers' output: {log}"
    for rank, error in sorted(errors.items(), key=lambda item: (item[1].collective, item[0])):  # other ranks repeat what one has said
        if any(words in error.message for words in OUT_OF_MEMORY):
            return LegFailed(f"out of memory: {error.message.splitlines()[0]}", f"rank {rank}", None, hint)
    rank, how = _blame(exit_codes, errors, beats, now_ns)
    if not errors and not exit_codes and any(beat.leg >= 0 for beat in beats):  # it trained, and fell silent
        hint += "; where it evaluates or saves for that long: --set run.timeout='900 s'"
    has_own_error = any(not error.collective for error in errors.values())
    return (LegFailed if has_own_error else LegLost)(how, f"rank {rank}", None, hint)


def require_finite(parts: Mapping[int, Mapping[str, Any]], num_before: int, log: Path, *, profile: bool) -> None:
    """Raise ``LegFailed`` for the first rank whose loss or parameter was NaN or infinite.

    ``parts``: ranks' results of a leg, which measured layer times if ``profile``. ``num_before``: steps of
    the process before the leg. ``log``: where the workers' output is.
    """
    found = {rank: part["not_finite"] for rank, part in parts.items() if part["not_finite"] is not None}
    if found:
        rank = min(found, key=lambda rank: (found[rank]["step"], rank))
        alone = ", in a leg of layer times, in which nothing is averaged" if profile else ""
        what = f"not a number: {found[rank]['what']} at step {num_before + found[rank]['step']}{alone}"
        hint = f"give the script a lower learning rate, or a checkpoint to begin from; the workers' output: {log}"
        raise LegFailed(what, f"rank {rank}", None, hint)


def _blame(exit_codes: Mapping[int, int], errors: Mapping[int, RankError], beats: Sequence[Beat], now_ns: int) -> tuple[int, str]:
    own = {rank: error for rank, error in errors.items() if not error.collective}
    told = -signal.SIGTERM if own else 0  # the others are ended by it
    unexplained = {rank: code for rank, code in exit_codes.items() if rank not in errors and code not in (0, told)}
    silent = [rank for rank in range(len(beats)) if rank not in errors and exit_codes.get(rank, 0) == 0]
    if any(code < 0 for code in unexplained.values()) or (unexplained and not own):
        rank = first_to_blame(unexplained)
        return rank, f"{how_it_ended(unexplained[rank])} at step {beats[rank].step}"
    if own:
        rank = min(own, key=lambda rank: own[rank].time_ns)
        return rank, f"failed at step {beats[rank].step}: {own[rank].message}"
    if silent:
        rank = min(silent, key=lambda rank: (beats[rank].pid != 0, beats[rank].leg, beats[rank].step, beats[rank].time_ns))
        age = (now_ns - beats[rank].time_ns) * 1e-9
        return rank, "never joined" if beats[rank].pid == 0 else f"stopped answering at step {beats[rank].step}, {age:.1f} s ago"
    rank = min(errors, key=lambda rank: errors[rank].time_ns)
    return rank, f"failed in a collective at step {beats[rank].step}: {errors[rank].message}"


def first_to_blame(exit_codes: Mapping[int, int]) -> int:
    """Return the rank that ended by itself: killed, else failed, else ended by the launcher's signal."""
    return min(exit_codes, key=lambda rank: (exit_codes[rank] == -signal.SIGTERM, exit_codes[rank] >= 0, rank))


def how_it_ended(code: int) -> str:
    """Describe an exit code; a negative one is a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"  # real-time signals have no name
    return f"was killed by {name}"
