"""Look: what the driver asks the ranks of a command to do next."""

from dataclasses import dataclass, field
from typing import Literal

from fleetbench.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpChange(Config):
    """Arguments of DistributedDataParallel, and what stands beside it, that differ from the script's own; none: as the script has it."""

    bucket_cap_mb: float | None = None
    find_unused_parameters: bool | None = None
    broadcast_buffers: bool | None = None
    gradient_as_bucket_view: bool | None = None
    bf16_hook: bool = False
    """Gradients travel in BF16 (``bf16_compress_hook``)."""
    threads: int | None = None
    """Threads of torch for one operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look(Config):
    """So many steps, and what to note of them.

    ``watch``: all that the main thread does (``RankLog``). ``readiness``: when gradients are ready (``Readiness``). ``times``: how long
    steps take.
    """

    what: Literal["watch", "readiness", "times"] = "watch"
    steps: int
    warmup_steps: int = 3
    max_s: float = 10.0
    """Fewer steps, but ten at least, where all of them would take longer."""
    change: DdpChange = field(default_factory=DdpChange)
    links: bool = False
    """Measure the job's links after the steps."""
    trace: bool = False
    """Record the steps with torch.profiler into the job's folder, one file a rank."""
