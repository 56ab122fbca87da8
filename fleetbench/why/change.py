"""DdpChange: what a living script can try of DistributedDataParallel's settings."""

from dataclasses import dataclass

from fleetbench.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpChange(Config):
    """Arguments of DistributedDataParallel, and what stands beside it, that differ from the script's own; none: as the script has it."""

    bucket_cap_mb: float | None = None
    """MiB."""
    find_unused_parameters: bool | None = None
    broadcast_buffers: bool | None = None
    threads: int | None = None
    """Threads of torch for one operation."""
