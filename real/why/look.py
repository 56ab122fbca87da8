"""Look: what the driver asks the ranks of a command to do next."""

from dataclasses import dataclass, field
from typing import Literal

from fleetbench.config import Config
from fleetbench.why.change import DdpChange

ANSWER = "answer.json"
"""File of the job's folder with what was found, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look(Config):
    """So many steps, and what to note of them.

    ``watch``: all that the main thread does (``RankLog``). ``alone``: when gradients are ready where none is exchanged (``Readiness``);
    models and optimizers are then as they were before. ``times``: how long steps take.
    """

    what: Literal["watch", "alone", "times"] = "watch"
    steps: int
    warmup_steps: int = 3
    max_s: float = 10.0
    """Fewer steps, but ten at least, where all of them would take longer."""
    change: DdpChange = field(default_factory=DdpChange)
    links: bool = False
    """Measure the job's links after the steps."""
    trace: str = ""
    """Record the steps of ``times`` with torch.profiler into the job's folder, in files of this name, one for each rank."""
    stacks: bool = False
    """With the calls of Python, which slow the host."""
