"""TrivialAugmentWide of an image; mixup, CutMix and random erasing of a batch, of arrays or tensors.

Sources: Müller and Hutter 2021, arXiv 2103.10158; Zhang et al. 2018, arXiv 1710.09412; Yun et al. 2019, arXiv
1905.04899; Zhong et al. 2020, arXiv 1708.04896. What is drawn for an image depends on seed, epoch and image
alone, for a batch on seed, step and rank: a training that goes on draws the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageOps
from presets import Preset  # type: ignore[import-not-found]  # beside this file

Array = np.ndarray[Any, Any]
GREY = 116  # about ImageNet's mean


def trivial_augment(image: Array, draw: Callable[..., float]) -> Array:
    """Change an image by one operation at one strength, both by chance.

    Args:
        image: uint8, shape (height, width, 3).
        draw: returns random numbers, ``draw(low, high)``.

    Returns:
        An image like it; what comes in from outside of it is black.
    """
    level = int(draw(0, 31)) / 30  # 31 strengths
    signed = level if draw() < 0.5 else -level

    def moved(*matrix: float) -> Callable[[Image.Image], Image.Image]:
        how = Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR
        return lambda one: one.transform(one.size, *how)

    def enhanced(kind: Any) -> Callable[[Image.Image], Image.Image]:
        return lambda one: kind(one).enhance(1 + 0.99 * signed)

    operations: tuple[Callable[[Image.Image], Image.Image], ...] = (
        lambda one: one,
        moved(1, 0.99 * signed, 0, 0, 1, 0),
        moved(1, 0, 0, 0.99 * signed, 1, 0),
        moved(1, 0, int(32 * signed), 0, 1, 0),
        moved(1, 0, 0, 0, 1, int(32 * signed)),
        lambda one: one.rotate(135 * signed, Image.Resampling.BILINEAR),
        enhanced(ImageEnhance.Brightness),
        enhanced(ImageEnhance.Color),
        enhanced(ImageEnhance.Contrast),
        enhanced(ImageEnhance.Sharpness),
        lambda one: ImageOps.posterize(one, 8 - round(6 * level)),
        lambda one: ImageOps.solarize(one, int(255 * (1 - level))),
        ImageOps.autocontrast,
        ImageOps.equalize,
    )
    return np.asarray(operations[int(draw(0, len(operations)))](Image.fromarray(image)))


def mix(images: Any, preset: Preset, draw: np.random.Generator) -> tuple[Any, Any, float]:
    """Mix the images of a batch with each other.

    Args:
        images: uint8, shape (n, height, width, 3).
        preset: ``mixup``, ``cutmix`` and ``erase``.
        draw: random numbers.

    Returns:
        The images, of numbers from 0 to 255, shape as before; the other image of each, shape (n,); and how
        much of each label is its own, 0 to 1, the rest being the other's.
    """
    (count, height, width, _), share = images.shape, 1.0
    other = draw.permutation(count)
    ways = [one for one in ("mixup", "cutmix") if getattr(preset, one)]
    if ways or preset.erase:
        images = images + 0  # a copy of an array or tensor: these may be used again
    way = ways[draw.integers(len(ways))] if ways else ""
    if way == "mixup":
        share = float(draw.beta(preset.mixup, preset.mixup))
        images = images * np.float32(share) + images[other] * np.float32(1 - share)
    elif way == "cutmix":
        rows, columns = _box(height, width, 1 - draw.beta(preset.cutmix, preset.cutmix), 1.0, draw)
        images[:, rows, columns] = images[other][:, rows, columns]
        share = 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (height * width)
    for row in np.flatnonzero(draw.random(count) < preset.erase):
        ratio = np.exp(draw.uniform(np.log(0.3), np.log(3.3)))
        images[(int(row), *_box(height, width, draw.uniform(0.02, 0.33), ratio, draw))] = GREY
    return images, other, share


def _box(height: int, width: int, area: float, ratio: float, draw: np.random.Generator) -> list[slice]:
    """Return rows and columns of a part: its share of the area, height by width; cut off at the edges."""
    found = []
    for size, half in (height, np.sqrt(area * ratio) / 2), (width, np.sqrt(area / ratio) / 2):
        centre = int(draw.integers(size))
        found.append(slice(max(0, int(centre - size * half)), min(size, int(centre + size * half))))
    return found
