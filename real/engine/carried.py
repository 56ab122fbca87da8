"""Carried: what an executor hands to the next one, and what a checkpoint keeps of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """State of an executor between steps, except parameters, buffers and optimizer state. Tensors are by name."""

    origin: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Parameter values that deltas are measured from; empty if trainers never update alone."""
    velocity: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The outer optimizer's momentum; empty before its first step."""
    landed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Mean distances from ``origin`` in the fragment whose exchange is in flight between steps; else empty."""
    residual: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Rounding errors of this trainer's quantised distances, in FP32; empty without error feedback."""
    sums: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Sums of gradients that wait for their update; empty if there are none."""
    merged: int = 0
    """Number of steps whose gradients are in ``sums``."""
    used: frozenset[str] = frozenset()
    """Names of parameters that a loss has reached since the last update."""
    loss: torch.Tensor | None = None
    """Loss of the last step; None if it was not reported."""
