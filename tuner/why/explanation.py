"""Explanation: what is known of a job's steps, why they take so long, and what would make them shorter."""

from dataclasses import dataclass

from fleetbench.why.shares import Shares
from tuner.why.causes import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a job's step takes as long as it does."""

    command: str
    ranks: int
    hosts: int | None
    """None where it is not known."""
    device: str
    shares: Shares
    alone_s: float | None
    """Seconds of a step of one rank's compute without any exchange; None where the script ended before."""
    causes: tuple[Cause, ...]
    """The largest gain first."""
    all_s: float | None
    """Seconds of a step with all remedies, simulated; None where nothing was."""
    foreign_cores: float | None
    """Cores of this host that other programs computed on while the steps were watched."""
    seconds: float
    """Seconds that looking took, from the command's start."""
    step: tuple[tuple[int, str, float, float], ...] = ()
    """One step across ranks: rank, what it does, start and duration in seconds."""
    notes: tuple[str, ...] = ()

    @property
    def efficiency(self) -> float | None:
        """The share of what the ranks could do if nothing but compute took time."""
        return None if self.alone_s is None else min(1.0, self.alone_s / self.shares.step_s)
