"""Explanation: how long a job's steps take, why, and what would make them shorter."""

from dataclasses import dataclass

from fleetbench.why.shares import Shares
from tuner.why.causes import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a job's step takes as long as it does."""

    command: str
    """Command that started the job."""
    ranks: int
    """Number of ranks."""
    hosts: int | None
    """Number of hosts; None if unknown."""
    device: str
    """Type of the ranks' device, such as ``cpu``."""
    shares: Shares
    """Shares of a step."""
    causes: tuple[Cause, ...]
    """Causes of the step time, the largest gain first."""
    all_s: float | None
    """Seconds per step with all remedies that do not change training; None if none of them gains."""
    seconds: float
    """Seconds that the explanation took, from the command's start."""
    step: tuple[tuple[int, str, float, float], ...] = ()
    """Rows of one step across ranks: rank, activity, start and duration in seconds."""
    notes: tuple[str, ...] = ()
    """Notes about the observation and the trials."""

    @property
    def efficiency(self) -> float:
        """Throughput as a share of the throughput if only compute took time."""
        return self.shares.compute_s / self.shares.step_s
