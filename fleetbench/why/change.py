"""DdpChange: what a living script can try of the settings of DistributedDataParallel, or of ``fully_shard``."""

from dataclasses import dataclass

from fleetbench.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpChange(Config):
    """Arguments of these, and what stands beside them, that differ from the script's own; none: as the script has it."""

    bucket_cap_mb: float | None = None
    """MiB."""
    find_unused_parameters: bool | None = None
    broadcast_buffers: bool | None = None
    reshard_after_forward: bool | None = None
    """Of units of ``fully_shard`` without others inside, but for the model itself."""
    threads: int | None = None
    """Threads of torch for one operation."""
