"""The published fusion counts of a ResNet-50 with 102 classes: the settings, and how many all-reduces they give."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One count. ``images``: the model computes; otherwise a chain touches each of its parameters once."""

    name: str
    megabytes: float
    num_all_reduces: int
    half: bool = False
    """Convolutions and the classifier in FP16, batch norm in FP32."""
    images: bool = False


CASES = (
    Published("32 MB", 32, 5, images=True),
    Published("16 MB", 16, 6),
    Published("32 MB, two types", 32, 8, half=True),
)
