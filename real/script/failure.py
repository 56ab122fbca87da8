"""How a leg of a user's script fails, as errors that name the rank.

LegFailed     the strategy's own doing, as far as anybody can tell: out of memory, no numbers, an exception, a refusal
└── LegLost   the launch broke: a process was killed or fell silent; worth another try
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from fleetbench.errors import ConfigError, FleetbenchError, WorkerFailed
from real.processes.diagnosis import RankError, diagnose
from real.processes.heartbeat import Beat

OUT_OF_MEMORY = ("out of memory", "OutOfMemoryError", "MemoryError", "can't allocate memory")


class LegFailed(WorkerFailed):
    """A leg cannot be run with its strategy; ``where`` names the rank."""


class LegLost(LegFailed):
    """The launch broke under a leg."""


def failure_of(
    exit_codes: Mapping[int, int], errors: Mapping[int, RankError], beats: Sequence[Beat], now_ns: int, log: str
) -> FleetbenchError:
    """The error that names the rank to blame, see ``real.processes.diagnosis``; memory that ran out goes before all else.

    A ``ConfigError`` of the script's is handed on as it was.
    """
    for rank, error in sorted(errors.items(), key=lambda item: (item[1].collective, item[0])):  # other ranks repeat what one has said
        if any(words in error.message for words in OUT_OF_MEMORY):
            return LegFailed(f"out of memory: {error.message.splitlines()[0]}", f"rank {rank}", None, f"its output: {log}")
    if errors and all(error.collective for error in errors.values()):  # whoever the launcher has ended since had not failed: it hung
        exit_codes = {rank: code for rank, code in exit_codes.items() if code != -signal.SIGTERM}
    found = diagnose(exit_codes, errors, beats, now_ns, log)
    if isinstance(found, ConfigError):
        return found
    if not errors and not exit_codes and any(beat.leg >= 0 for beat in beats):  # it trained, and fell silent
        hint = f"{found.hint}; where it evaluates or saves for that long: --set run.timeout='900 s'"
        return LegLost(found.what, found.where, found.value, hint)
    has_own_error = any(not error.collective for error in errors.values())
    return (LegFailed if has_own_error else LegLost)(*found.args)


def require_finite(parts: Mapping[int, Mapping[str, Any]], num_before: int, kind: str) -> None:
    """Raise ``LegFailed`` for the rank whose loss or parameter was NaN or infinite first.

    ``parts``: ranks' results of a leg of this ``kind``. ``num_before``: steps of the process before the leg.
    """
    found = {rank: part["not_finite"] for rank, part in parts.items() if part["not_finite"] is not None}
    if found:
        rank = min(found, key=lambda rank: (found[rank]["step"], rank))
        alone = ", in a leg of layer times, in which nothing is averaged" if kind == "profile" else ""
        what = f"not a number: {found[rank]['what']} at step {num_before + found[rank]['step']}{alone}"
        raise LegFailed(what, f"rank {rank}", None, "give the script a lower learning rate, or a checkpoint to begin from")


def refused(error: ConfigError) -> LegFailed:
    """A strategy that this script refuses."""
    return LegFailed(f"refused: {error.what}", error.where, error.value, error.hint)
