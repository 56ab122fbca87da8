"""DdpChange: settings of DistributedDataParallel or ``fully_shard`` that a running script can try."""

from dataclasses import dataclass

from fleetbench.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpChange(Config):
    """Arguments that differ from the script's own; none: as in the script."""

    bucket_cap_mb: float | None = None
    """Cap of a bucket in MiB."""
    find_unused_parameters: bool | None = None
    """Whether DDP searches for unused parameters."""
    broadcast_buffers: bool | None = None
    """Whether DDP broadcasts buffers before each forward."""
    reshard_after_forward: bool | None = None
    """Whether ``fully_shard`` frees parameters after the forward, for units without inner units, except the
    model itself."""
    threads: int | None = None
    """Threads of torch for one operation."""
