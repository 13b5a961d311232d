"""Choose how to crop an image: at random for training, or around the center for evaluation.

The boxes match torchvision's ``RandomResizedCrop``, and ``Resize(256)`` followed by ``CenterCrop(224)``.
"""

from __future__ import annotations

import math

from ringdance.data.order import Draws

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels of the whole image."""

SCALE = 0.08, 1.0
RATIO = 3 / 4, 4 / 3
CENTRE = 224 / 256
_ATTEMPTS = 10


def random_box(width: int, height: int, draw: Draws) -> Box:
    """Choose a random box with 8% to 100% of an image's area and an aspect ratio from 3/4 to 4/3."""
    for _ in range(_ATTEMPTS):
        area = width * height * draw(*SCALE)
        ratio = math.exp(draw(math.log(RATIO[0]), math.log(RATIO[1])))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left, top = int(draw(0, width - wide + 1)), int(draw(0, height - high + 1))
            return left, top, left + wide, top + high
    wide = min(width, round(height * RATIO[1]))
    high = min(height, round(width * RATIO[1]))
    return _centred(width, height, wide, high)


def centre_box(width: int, height: int) -> Box:
    """Return the box that corresponds to resizing the shorter side to 256 and then cropping 224 x 224."""
    side = min(width, height) * CENTRE
    return _centred(width, height, side, side)


def _centred(width: int, height: int, wide: float, high: float) -> Box:
    left, top = (width - wide) / 2, (height - high) / 2
    return left, top, left + wide, top + high
