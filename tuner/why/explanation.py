"""Explanation: what is known about a job's steps, why they take so long, and what would make them shorter."""

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
    """Number of hosts; none if unknown."""
    device: str
    """Device of the ranks."""
    shares: Shares
    """Shares of a step."""
    alone_s: float | None
    """Seconds per step of one rank's compute without any exchange; none if the script ended before."""
    causes: tuple[Cause, ...]
    """Causes, the largest gain first."""
    all_s: float | None
    """Seconds per step with all remedies, simulated; none if nothing was simulated."""
    foreign_cores: float | None
    """Number of this host's cores that other programs used during the observation."""
    seconds: float
    """Seconds of the observation, from the command's start."""
    step: tuple[tuple[int, str, float, float], ...] = ()
    """One step across ranks: rank, activity, start and duration in seconds."""
    notes: tuple[str, ...] = ()
    """Notes about the observation."""

    @property
    def efficiency(self) -> float | None:
        """Share of the ranks' possible throughput if only compute took time."""
        return None if self.alone_s is None else min(1.0, self.alone_s / self.shares.step_s)
