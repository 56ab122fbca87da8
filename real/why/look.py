"""Look: the driver's next request to the ranks of a command."""

from dataclasses import dataclass, field
from typing import Literal

from fleetbench.config import Config
from fleetbench.why.change import DdpChange

ANSWER = "answer.json"
"""File of the job's folder with the results, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look(Config):
    """A number of steps, and what to record in them.

    - ``watch``: everything that the main thread does (``RankLog``)
    - ``alone``: when gradients are ready in steps without exchange (``Readiness``); models and optimizers are
      restored afterwards
    - ``times``: how long steps take
    """

    what: Literal["watch", "alone", "times"] = "watch"
    steps: int
    warmup_steps: int = 3
    max_s: float = 10.0
    """Seconds after which fewer steps are made, but at least ten."""
    change: DdpChange = field(default_factory=DdpChange)
    links: bool = False
    """Whether to measure the job's links after the steps."""
    trace: str = ""
    """Name of the files, one per rank in the job's folder, into which torch.profiler records the steps of
    ``times``."""
    stacks: bool = False
    """Whether the trace has the calls of Python, which slow the host."""
