"""Look: what the driver asks the ranks of a command to do next."""

from dataclasses import dataclass, field
from typing import Literal

from fleetbench.config import Config
from fleetbench.why.change import DdpChange

ANSWER = "answer.json"
"""Name of the file in the job's folder with the driver's findings, numbers by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look(Config):
    """A number of steps, and what to record about them.

    ``what`` is ``watch`` for everything that the main thread does (``RankLog``), ``ready`` for when gradients
    are ready (``Readiness``), or ``times`` for how long steps take.
    """

    what: Literal["watch", "ready", "times"] = "watch"
    steps: int
    warmup_steps: int = 3
    max_s: float = 10.0
    """Seconds that the steps may take: there are fewer if they would take longer, but at least ten."""
    change: DdpChange = field(default_factory=DdpChange)
    links: bool = False
    """Whether to measure the job's links after the steps."""
    trace: str = ""
    """Prefix of the names of torch.profiler's files in the job's folder, one per rank, for ``times``; empty:
    no trace."""
    stacks: bool = False
    """Whether to record Python calls in the trace, which slows the host."""
