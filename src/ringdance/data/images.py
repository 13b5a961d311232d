"""Decode an encoded image, and resize a part of it into a square of a batch.

Resizing is antialiased. Pillow and simplejpeg release the GIL while they decode and resize.
"""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np

from ringdance.data.boxes import Box, centre_box, random_box
from ringdance.data.order import Draws
from ringdance.errors import ArgumentError

try:
    import simplejpeg
    from PIL import Image
except ImportError as error:
    raise ArgumentError(
        f"Images cannot be decoded without {error.name}: pip install 'ringdance[data]'"
    ) from None

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def decode_into(out: Pixels, data: bytes, draw: Draws | None = None) -> None:
    """Decode an image, crop, resize, and flip it, into ``out``.

    Args:
        out: shape (size, size, 3).
        data: JPEG, or any format that Pillow reads; grey and CMYK become RGB.
        draw: for a random part, by chance flipped; None for the centre.

    Raises:
        ArgumentError: the image is broken.
    """
    size = out.shape[0]
    try:
        result, flip = _resized(data, size, draw)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ArgumentError(f"the image cannot be decoded ({error})") from None
    pixels = np.frombuffer(result.tobytes(), np.uint8).reshape(size, size, 3)
    out[:] = pixels[:, ::-1] if flip else pixels


def _resized(data: bytes, size: int, draw: Draws | None) -> tuple[Image.Image, bool]:
    whole = None
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        plain = space in ("YCbCr", "Gray", "RGB")
    except ValueError:
        plain = False
    if not plain:
        whole = _by_pillow(data)
        width, height = whole.size
    box = random_box(width, height, draw) if draw else centre_box(width, height)
    flip = draw is not None and draw() < 0.5
    if whole is None:
        whole = _by_simplejpeg(data, width, height, box, size) or _by_pillow(data)
    if whole.size != (width, height):  # scaled while it was decoded
        across, down = whole.size[0] / width, whole.size[1] / height
        box = box[0] * across, box[1] * down, box[2] * across, box[3] * down
    return whole.resize((size, size), Image.Resampling.BILINEAR, box=box), flip


def _by_simplejpeg(data: bytes, width: int, height: int, box: Box, size: int) -> Image.Image | None:
    """Decode a JPEG, at half its size or less where the part has enough pixels; None if it has faults."""
    shrink = min(box[2] - box[0], box[3] - box[1]) / size
    enough = {}
    if shrink >= 2:
        enough = {"min_height": math.ceil(height / shrink), "min_width": math.ceil(width / shrink)}
    try:
        return Image.fromarray(simplejpeg.decode_jpeg(data, min_factor=2, **enough))
    except ValueError:
        return None  # also for faults that Pillow overlooks, such as bytes behind the end


def _by_pillow(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")
