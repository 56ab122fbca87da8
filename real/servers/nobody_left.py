"""NobodyLeft: what a server ends with whose trainers are all lost, or have never come."""

from __future__ import annotations

from collections.abc import Sequence

from fleetbench.errors import WorkerFailed
from real.servers.news import FELL_SILENT, NEVER_CAME, Lost
from real.servers.security import TOKEN


def of_nobody_left(lost: Sequence[Lost], num_strangers: int) -> WorkerFailed:
    """Name the first to blame of all trainers, which are ``lost``: who was killed, then who ended by itself, then who fell silent.

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
