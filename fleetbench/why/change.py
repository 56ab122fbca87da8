"""DdpChange: settings of DistributedDataParallel or ``fully_shard`` that a running script can try."""

from dataclasses import dataclass

from fleetbench.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpChange(Config):
    """Arguments that replace a script's own; None keeps the script's own."""

    bucket_cap_mb: float | None = None
    """Cap of a bucket in MiB."""
    find_unused_parameters: bool | None = None
    """Whether DDP searches for unused parameters."""
    broadcast_buffers: bool | None = None
    """Whether DDP broadcasts buffers before each forward."""
    reshard_after_forward: bool | None = None
    """Whether ``fully_shard`` frees parameters after the forward. This applies to units that contain no other
    units, and never to the model itself."""
    threads: int | None = None
    """Number of threads that torch uses for one operation."""
