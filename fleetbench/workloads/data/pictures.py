"""Pictures: a JPEG file to the pixels that a model is trained or evaluated with.

The draws of the training picture are a function of (seed, epoch, sample), so that they depend
neither on which rank or process decodes it, nor on what was decoded before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]

_AREA = (0.08, 1.0)
"""Share of the picture that a training crop shows (Szegedy et al. 2014, arXiv 1409.4842, section 6)."""
_RATIO = (3 / 4, 4 / 3)
"""Width to height of a training crop; drawn uniformly in its logarithm."""
_ATTEMPTS = 10
_SHORTER_SIDE = 256 / 224
"""Evaluation: the shorter side of the picture, over the side of the square in its middle that is shown."""
_PURPOSE = 2**63
"""Second word of the key of all augmentation draws; epochs' permutations count from 2."""


@dataclass(frozen=True, slots=True)
class Crop:
    """A rectangle of a picture, in pixels, and whether it is mirrored left to right."""

    left: int
    top: int
    width: int
    height: int
    mirror: bool


def training_crop(seed: int, epoch: int, sample: int, width: int, height: int) -> Crop:
    """A random rectangle of a picture of ``width`` x ``height`` pixels, mirrored half of the time."""
    generator = np.random.Generator(np.random.Philox(key=[seed, _PURPOSE], counter=[0, 0, epoch, sample]))
    mirror = bool(generator.random() < 0.5)
    for area, ratio, across, down in generator.random((_ATTEMPTS, 4)):
        wanted = width * height * (_AREA[0] + area * (_AREA[1] - _AREA[0]))
        stretch = math.exp(math.log(_RATIO[0]) + ratio * (math.log(_RATIO[1]) - math.log(_RATIO[0])))
        inner_width, inner_height = round(math.sqrt(wanted * stretch)), round(math.sqrt(wanted / stretch))
        if 0 < inner_width <= width and 0 < inner_height <= height:
            left, top = int(across * (width - inner_width + 1)), int(down * (height - inner_height + 1))
            return Crop(left, top, inner_width, inner_height, mirror)
    inner_width = min(width, max(1, round(height * _RATIO[1])))
    inner_height = min(height, max(1, round(width / _RATIO[0])))
    return Crop((width - inner_width) // 2, (height - inner_height) // 2, inner_width, inner_height, mirror)


def training_pixels(path: Path, size: int, seed: int, epoch: int, sample: int) -> Pixels:
    """A random part of the picture, ``(3, size, size)``. Raises ``OSError`` for a file that is no picture."""
    with Image.open(path) as image:
        crop = training_crop(seed, epoch, sample, image.width, image.height)
        box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
        part = image.convert("RGB").crop(box).resize((size, size), Image.Resampling.BILINEAR)
    pixels = _channels_first(part)
    return np.ascontiguousarray(pixels[:, :, ::-1]) if crop.mirror else pixels


def evaluation_pixels(path: Path, size: int) -> Pixels:
    """The middle of the picture, ``(3, size, size)``. Raises ``OSError`` for a file that is no picture."""
    with Image.open(path) as image:
        part = min(image.width, image.height) / _SHORTER_SIDE
        left, top = (image.width - part) / 2, (image.height - part) / 2
        middle = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + part, top + part))
    return _channels_first(middle)


def _channels_first(image: Image.Image) -> Pixels:
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))
