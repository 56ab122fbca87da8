"""Diagnosis: which rank broke a launch.

A rank that dies makes the others fail a moment later, with messages that name ports; a rank that
stops makes them run into their timeout. So the first to blame is who was killed, then who raised
an error of its own, then who fell silent.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleetbench.errors import ConfigError, FleetbenchError, WorkerFailed
from real.processes.heartbeat import Beat

NOTE = "failed-rank.json"
"""File in a launcher's folder."""


@dataclass(frozen=True, slots=True)
class RankError:
    """What a rank's own process reported before it ended."""

    message: str
    collective: bool
    """It failed in a collective, which is most often somebody else's fault."""
    time_ns: int
    config: list[str | None] | None = None
    """Arguments of the ``ConfigError`` that it was, if it was one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a rank said before it ended."""

    rank: int
    what: str
    """Such as ``failed at step 3: ValueError: the third layer is odd``."""
    own: bool
    """False where a collective broke, which is most often another rank's fault."""

    def __str__(self) -> str:
        return f"rank {self.rank} {self.what}"


def read_note(folder: Path) -> Failure | None:
    """What the ranks of a user's script have noted for their launcher, whose folder this is; none where no rank failed by itself."""
    try:
        return Failure(**json.loads((folder / NOTE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def diagnose(
    exit_codes: Mapping[int, int], errors: Mapping[int, RankError], beats: Sequence[Beat], now_ns: int, log: str
) -> FleetbenchError:
    """The error that names the rank to blame; a worker's ``ConfigError`` is handed on as it was.

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
    rank, how = _blame(exit_codes, errors, beats, now_ns)
    return WorkerFailed(how, f"rank {rank}", None, f"the workers' output: {log}")


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
    if errors:
        rank = min(errors, key=lambda rank: errors[rank].time_ns)
        return rank, f"failed in a collective at step {beats[rank].step}: {errors[rank].message}"
    rank = first_to_blame(exit_codes) if exit_codes else 0
    return rank, how_it_ended(exit_codes.get(rank, 0))


def first_to_blame(exit_codes: Mapping[int, int]) -> int:
    """The rank whose end was its own: killed, then failed, and last those that were told to end."""
    return min(exit_codes, key=lambda rank: (exit_codes[rank] == -signal.SIGTERM, not _struck(exit_codes[rank]), rank))


def how_it_ended(code: int) -> str:
    """An exit code in words; a negative one is a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"  # real-time signals have no name
    return f"was killed by {name}"


def _struck(code: int) -> bool:
    """Killed by a signal that is not the agent's own, with which it ends the others."""
    return code < 0 and code != -signal.SIGTERM
