"""Look: what the driver asks the ranks of a command to do next."""

from dataclasses import dataclass, field
from typing import Literal

from fleetbench.config import Config
from fleetbench.why.change import DdpChange

ANSWER = "answer.json"
"""File in the job's folder with the findings, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look(Config):
    """A number of steps, and what to record about them.

    ``watch``: everything the main thread does (``RankLog``). ``alone``: when gradients are ready without an
    exchange (``Readiness``); models and optimizers are restored afterwards. ``times``: how long steps take.
    """

    what: Literal["watch", "alone", "times"] = "watch"
    steps: int
    warmup_steps: int = 3
    max_s: float = 10.0
    """Seconds after which fewer steps suffice, but at least ten."""
    change: DdpChange = field(default_factory=DdpChange)
    links: bool = False
    """Whether to measure the job's links after the steps."""
    trace: str = ""
    """Name of files in the job's folder into which torch.profiler records the steps of ``times``, one per
    rank; empty: none."""
    stacks: bool = False
    """Whether to record Python calls, which slow the host."""
