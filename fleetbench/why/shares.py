"""Shares of a step, which add up to it. They describe ranks that wait for a step's last rank, not that rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "input",
    "forward",
    "backward",
    "optimizer",
    "loop",
    "evaluate",
    "save",
    "gradients",
    "gathers",
    "regathers",
    "buffers",
    "unused",
    "collective",
    "idle",
    "device",
]
"""Activity of a rank.

It waits for its next batch (``input``); computes a forward, a backward or an update (``optimizer``);
searches for ``unused`` parameters; runs other code of the script's ``loop``; evaluates; or saves. Or it
exchanges: gradients after the backward's compute has ended, parameters of ``fully_shard`` (``gathers`` before
the forward, ``regathers`` before the backward), buffers before a forward, or in another ``collective`` of the
script. ``idle``: a device waits for its host. ``device``: a device computes something that no other kind
names.
"""
COMPUTE: tuple[Kind, ...] = ("forward", "backward", "device", "optimizer")
EXCHANGES: tuple[Kind, ...] = ("gradients", "gathers", "regathers", "buffers", "collective")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Time per step of one kind of activity, or of one kind of waiting for a rank."""

    kind: Kind
    """Kind of activity; for a wait, what the late rank does more of than the others."""
    seconds: float
    """Seconds per step, mean over steps and over the ranks that are not the last of a step."""
    rank: int | None = None
    """Rank that the others wait for; None if the share is not a wait."""
    period: int | None = None
    """Number of steps from one step with this activity to the next; None if every step has it."""


def total_s(shares: Iterable[Share]) -> float:
    """Return the seconds per step of all shares."""
    return sum(share.seconds for share in shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Division of a step's time."""

    step_s: float
    """Mean seconds per step."""
    num_steps: int
    """Number of steps that were divided."""
    num_ranks: int
    """Number of ranks."""
    shares: tuple[Share, ...]
    """Shares, which add up to ``step_s``."""
    steady_rank: int | None = None
    """Rank that is slower than the others in most steps; None if there is no such rank."""
    notes: tuple[str, ...] = ()
    """Sentences about what could not be determined."""

    @property
    def compute_s(self) -> float:
        """Seconds per step of compute (the kinds in ``COMPUTE``), without waits and periodic work."""
        return total_s(self.part(*COMPUTE))

    def part(self, *kinds: Kind) -> tuple[Share, ...]:
        """Return the shares of these kinds that every step has, without waits."""
        return tuple(share for share in self.shares if share.kind in kinds and share.rank is None and share.period is None)

    def of(self, *kinds: Kind) -> float:
        """Return the seconds per step of these kinds, with periodic work and without waits."""
        return total_s(share for share in self.shares if share.kind in kinds and share.rank is None)
