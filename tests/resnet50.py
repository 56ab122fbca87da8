"""The gradients of a ResNet-50 with 102 classes, in order of readiness, from the paper's table 1."""

from __future__ import annotations

from fleetbench.plan.layers import Gradient
from fleetbench.quantities import Nanoseconds

STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
"""Blocks of each stage and the width of its 3x3 convolutions (He et al. 2015, 50-layer column)."""


def resnet50_gradients(*, half: bool = False, classes: int = 102) -> list[Gradient]:
    """All 161 gradients, last layer first; ``half``: convolutions and the classifier in FP16."""
    wide = "float16" if half else "float32"
    parameters: list[tuple[str, int, str]] = []

    def convolution(name: str, inputs: int, outputs: int, kernel: int) -> None:
        parameters.append((f"{name}.weight", inputs * outputs * kernel**2, wide))

    def batch_norm(name: str, channels: int) -> None:
        parameters.extend((f"{name}.{part}", channels, "float32") for part in ("weight", "bias"))

    convolution("conv1", 3, 64, 7)
    batch_norm("bn1", 64)
    inputs = 64
    for stage, (blocks, width) in enumerate(STAGES, 1):
        for block in range(blocks):
            prefix = f"layer{stage}.{block}."
            for index, (kernel, outputs) in enumerate(((1, width), (3, width), (1, 4 * width)), 1):
                convolution(f"{prefix}conv{index}", inputs if index == 1 else width, outputs, kernel)
                batch_norm(f"{prefix}bn{index}", outputs)
            if block == 0:
                convolution(f"{prefix}downsample.0", inputs, 4 * width, 1)
                batch_norm(f"{prefix}downsample.1", 4 * width)
            inputs = 4 * width
    parameters += [("fc.weight", 2048 * classes, wide), ("fc.bias", classes, wide)]
    return [
        Gradient(name=name, numel=numel, dtype=dtype, ready=Nanoseconds(index))
        for index, (name, numel, dtype) in enumerate(reversed(parameters))
    ]
