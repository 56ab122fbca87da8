"""ResNet with bottleneck blocks (He et al. 2015, arXiv 1512.03385, table 1), for ``resnet50``.

Parameters have the names and the order of torchvision's model, so that fusion plans and checkpoints of the
two agree. As there, the 3x3 convolution of a block has the stride.
"""

import torch
from torch import nn

_EXPANSION = 4
"""Ratio of a bottleneck's output channels to those of its 3x3 convolution."""

BLOCKS_50 = (3, 4, 6, 3)
"""Number of blocks in each stage (table 1, 50-layer column)."""


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut.

    Maps ``(batch, inputs, H, W)`` to ``(batch, 4 width, H / stride, W / stride)``.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = _EXPANSION * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        shortcut = inputs if self.downsample is None else self.downsample(inputs)
        hidden = self.relu(self.bn1(self.conv1(inputs)))
        hidden = self.relu(self.bn2(self.conv2(hidden)))
        return self.relu(self.bn3(self.conv3(hidden)) + shortcut)  # type: ignore[no-any-return]  # Module.__call__ is untyped


class ResNet(nn.Module):
    """Maps images ``(batch, 3, H, W)`` to logits ``(batch, classes)``.

    H and W shrink 32-fold before the last pooling.
    """

    def __init__(self, blocks: tuple[int, int, int, int], width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(width, width, blocks[0], 1)
        self.layer2 = _stage(_EXPANSION * width, 2 * width, blocks[1], 2)
        self.layer3 = _stage(_EXPANSION * 2 * width, 4 * width, blocks[2], 2)
        self.layer4 = _stage(_EXPANSION * 4 * width, 8 * width, blocks[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(_EXPANSION * 8 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        hidden = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        return self.fc(self.avgpool(hidden).flatten(1))  # type: ignore[no-any-return]  # Module.__call__ is untyped


def _stage(inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    rest = [Bottleneck(_EXPANSION * width, width, 1) for _ in range(blocks - 1)]
    return nn.Sequential(Bottleneck(inputs, width, stride), *rest)


def resnet50(classes: int = 1000, width: int = 64) -> nn.Module:
    """Return ResNet-50: 161 parameter tensors, 25,557,032 parameters at 1,000 classes.

    ``width`` is the number of channels of the first convolution; the others scale with it. Images may have
    any size, ``(batch, 3, size, size)``: the size belongs to the data (``workload.data_options.image_size``).
    """
    return ResNet(BLOCKS_50, width, classes)
