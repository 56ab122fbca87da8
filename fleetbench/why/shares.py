"""Shares of a step that add up to it, of a typical rank: one that waits for others, and not the one that the others wait for."""

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
"""What a rank does: waits for its next batch; computes a forward, a backward or an update; runs other code of the script's loop; evaluates;
saves. Or exchanges: gradients after the backward's compute has ended, parameters of ``fully_shard`` (``regathers``: again in the backward),
buffers before a forward, the search for unused parameters, other collectives of the script's. ``idle``: a device that waits for its host;
``device``: one that computes what no other kind names."""
COMPUTE: tuple[Kind, ...] = ("forward", "backward", "device", "optimizer")
EXCHANGES: tuple[Kind, ...] = ("gradients", "gathers", "regathers", "buffers", "collective")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Part of a step."""

    kind: Kind
    seconds: float
    """Mean over steps, and over the ranks that are not the last of a step."""
    rank: int | None = None
    """The rank that is waited for; ``kind`` says what that rank does more of than the others. None: nobody is waited for."""
    period: int | None = None
    """So many steps lie between two of those that have this part; None if each step has it."""


def total_s(shares: Iterable[Share]) -> float:
    """Seconds per step of all of them."""
    return sum(share.seconds for share in shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How a step's seconds divide."""

    step_s: float
    """Mean step."""
    num_steps: int
    num_ranks: int
    shares: tuple[Share, ...]
    """They add up to ``step_s``."""
    steady_rank: int | None = None
    """The rank that is slower than the others in most steps."""
    notes: tuple[str, ...] = ()
    """What could not be told, as sentences."""

    @property
    def compute_s(self) -> float:
        """Seconds per step of forward, backward and update, without waits and periodic work."""
        return total_s(self.part(*COMPUTE))

    def part(self, *kinds: Kind) -> tuple[Share, ...]:
        """Shares of these kinds that each step has, and in which nobody is waited for."""
        return tuple(share for share in self.shares if share.kind in kinds and share.rank is None and share.period is None)

    def of(self, *kinds: Kind) -> float:
        """Seconds per step of these kinds, in all steps, without waits for others."""
        return total_s(share for share in self.shares if share.kind in kinds and share.rank is None)
