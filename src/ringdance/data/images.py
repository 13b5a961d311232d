"""Decode an image, and crop and resize it into its place in a batch.

Resizing is antialiased where that makes a difference. It uses OpenCV if installed, or else Pillow, which is
slower. OpenCV, Pillow and simplejpeg release the GIL.
"""

from __future__ import annotations

import importlib
import io
import math
from typing import Any

import numpy as np

from ringdance.data.boxes import Box, centre_box, random_box
from ringdance.data.order import Draws
from ringdance.errors import ArgumentError, pip_install

try:
    import simplejpeg
    from PIL import Image, UnidentifiedImageError
except ImportError as error:
    raise ArgumentError(
        f"Images cannot be decoded without {error.name}. {pip_install('pillow', 'simplejpeg')}"
    ) from None
cv2: Any
try:
    cv2 = importlib.import_module("cv2")
except ImportError:
    cv2 = None

Pixels = np.ndarray[Any, np.dtype[np.uint8]]

# Up to this shrink factor, plain bilinear interpolation is as close to Lanczos as an antialiased filter.
_SMOOTH = 1.5


def decode_into(out: Pixels, data: bytes, draw: Draws | None = None) -> None:
    """Decode, crop and resize an image into ``out``. Flips it at random if ``draw`` is given.

    Args:
        out: Shape (size, size, 3), contiguous.
        data: JPEG, or any format that Pillow reads (see ``as_rgb``). The EXIF orientation is ignored, because
            ``ringdance data prepare`` has already applied it.
        draw: Random numbers for the crop and the flip. If None, the center is used.

    Raises:
        ArgumentError: The image is broken.
    """
    try:
        part, flip = _part(data, out.shape[0], draw)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ArgumentError(f"the image cannot be decoded ({error})") from None
    (_by_pillow if cv2 is None else _by_opencv)(out, part, flip)


def decode(data: bytes) -> Pixels:
    """Decode a whole JPEG, or any format that Pillow reads, to shape (height, width, 3).

    Raises:
        ValueError, OSError: The image is broken. Pillow's decoders can also raise other errors.
    """
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(data)
    except ValueError:
        return _any_format(data)
    return pixels


def _part(data: bytes, size: int, draw: Draws | None) -> tuple[Pixels, bool]:
    """Decode and crop an image. Returns the pixels, shape (height, width, 3), and whether to flip them."""
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        whole = None
    except ValueError:
        space = ""
    if space not in ("YCbCr", "Gray", "RGB"):
        whole = _any_format(data)
        height, width = whole.shape[:2]
    box = random_box(width, height, draw) if draw else centre_box(width, height)
    flip = draw is not None and draw() < 0.5
    if whole is None:
        whole = _jpeg(data, width, height, box, size)
    across, down = whole.shape[1] / width, whole.shape[0] / height  # below 1 if the decoder scaled it down
    left, right = round(box[0] * across), round(box[2] * across)
    top, bottom = round(box[1] * down), round(box[3] * down)
    return whole[top : max(bottom, top + 1), left : max(right, left + 1)], flip


def _jpeg(data: bytes, width: int, height: int, box: Box, size: int) -> Pixels:
    """Decode a JPEG. If ``box`` is at least ``2 * size``, the decoder scales the image to half or less."""
    shrink = min(box[2] - box[0], box[3] - box[1]) / size
    least = (math.ceil(height / shrink), math.ceil(width / shrink)) if shrink >= 2 else (0, 0)
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(data, min_factor=2, min_height=least[0], min_width=least[1])
    except ValueError:
        return _any_format(data)  # Pillow tolerates some defects, such as trailing bytes
    return pixels


def _any_format(data: bytes) -> Pixels:
    try:
        return np.array(as_rgb(Image.open(io.BytesIO(data))))  # a copy, because asarray's view is read-only
    except UnidentifiedImageError:
        raise ValueError("Pillow cannot identify the image format") from None


def as_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to RGB. Scales 16-bit values to 8 bits, and composites transparency over white.

    Raises:
        ValueError: The pixels are 32-bit integers or floats, whose range is unknown.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"mode {image.mode!r} has an unknown range of values. Convert the image to 8 bits.")
    if image.has_transparency_data:
        whole = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", whole.size, "white"), whole)
    return image.convert("RGB")


def _by_opencv(out: Pixels, part: Pixels, flip: bool) -> None:
    size, sides = out.shape[0], part.shape[:2]
    shrunk = min(sides) >= size and max(sides) > _SMOOTH * size
    interpolation = cv2.INTER_AREA if shrunk else cv2.INTER_LINEAR
    if flip:
        cv2.flip(cv2.resize(part, (size, size), interpolation=interpolation), 1, dst=out)
    else:
        cv2.resize(part, (size, size), dst=out, interpolation=interpolation)


def _by_pillow(out: Pixels, part: Pixels, flip: bool) -> None:
    resized = np.asarray(Image.fromarray(part).resize(out.shape[:2], Image.Resampling.BILINEAR))
    out[:] = resized[:, ::-1] if flip else resized
