"""Fit: all-reduce times against the closed form T = alpha + 2 ((P - 1) / P) S / (R x 1448 / 1514), with one alpha a rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from real.testbed.topology import PAYLOAD_SHARE

LARGE_BYTES = 1_000_000
"""Largest message that alpha is fitted to; larger ones are only checked."""
TOLERANCE = 0.03
LARGE_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The closed form with the alpha that fits best."""

    alpha_s: float
    residuals: dict[int, float]
    """By bytes: measured over closed form, minus one."""

    @property
    def holds(self) -> bool:
        """Whether the closed form is right within 3 % up to 1 MB, and within 5 % above."""
        return all(abs(error) <= (TOLERANCE if nbytes <= LARGE_BYTES else LARGE_TOLERANCE) for nbytes, error in self.residuals.items())

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
        return {**asdict(self), "residuals": {str(nbytes): error for nbytes, error in self.residuals.items()}, "holds": self.holds}


def wire_s(nbytes: int, hosts: int, rate_bps: float) -> float:
    """Seconds that a ring all-reduce's bytes need on each link of ``rate_bps``, headers included."""
    return 2 * (hosts - 1) / hosts * 8 * nbytes / (rate_bps * PAYLOAD_SHARE)


def fit(times_s: Mapping[int, float], hosts: int, rate_bps: float) -> Fit:
    """Fit alpha to times by bytes; least squares of relative errors, over the messages of at most 1 MB."""
    wires = {nbytes: wire_s(nbytes, hosts, rate_bps) for nbytes in times_s}
    small = [nbytes for nbytes in times_s if nbytes <= LARGE_BYTES]
    weights = {nbytes: times_s[nbytes] ** -2 for nbytes in small}
    alpha = sum(weights[nbytes] * (times_s[nbytes] - wires[nbytes]) for nbytes in small) / sum(weights.values())
    return Fit(alpha_s=alpha, residuals={nbytes: times_s[nbytes] / (alpha + wires[nbytes]) - 1.0 for nbytes in times_s})
