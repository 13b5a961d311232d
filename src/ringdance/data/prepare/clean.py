"""Check an image, and convert it to JPEG unless it is an RGB or gray JPEG."""

from __future__ import annotations

import io
import re
import warnings
from dataclasses import dataclass

import numpy as np

from ringdance.data.files import needed

QUALITY = 95
"""JPEG quality of images that are encoded again."""
_EXIF_WITHIN = 4096  # bytes to search for EXIF, which is in the first or second segment of a JPEG


class BrokenImage(Exception):
    """Raised if an image cannot be decoded. The message gives the reason."""


@dataclass(frozen=True)
class Cleaned:
    """An upright RGB or gray JPEG, which every decoder can read.

    Attributes:
        image: Encoded image, which is the original if it did not have to be converted or resized.
        height, width: Size in pixels.
        note: Why the image was converted, or an empty string if it was not.
    """

    image: bytes
    height: int
    width: int
    note: str = ""


def clean(data: bytes, resize: int = 0) -> Cleaned:
    """Check and convert an image.

    To detect damage, the whole image is decoded, but scaled to an eighth, which saves a third of the time.

    Args:
        data: Encoded image.
        resize: Maximum length of the shorter side, in pixels. If 0, the image keeps its size.

    Raises:
        BrokenImage: The image cannot be decoded.
    """
    jpeg = needed("simplejpeg")
    try:
        height, width, space = jpeg.decode_jpeg_header(data)[:3]
        if space in ("CMYK", "YCCK"):
            return _converted(data, resize, f"{space} instead of RGB")
        if b"Exif\0\0" in data[:_EXIF_WITHIN] and _orientation(data) > 1:
            return _converted(data, resize, "rotated as its EXIF says")
        if resize and min(height, width) > resize:
            return _shrunk(data, height, width, resize)
        jpeg.decode_jpeg(data, "GRAY", min_height=1, min_width=1)
    except ValueError as error:
        return _converted(data, resize, str(error))
    return Cleaned(data, height, width)


def _orientation(data: bytes) -> int:
    """Return the EXIF orientation, which is 1 for an upright image, or 0 if the EXIF data is damaged."""
    try:
        return int(needed("PIL.Image").open(io.BytesIO(data)).getexif().get(0x0112, 1))
    except Exception:  # Pillow's EXIF parser raises many kinds of exceptions
        return 0


def _target(height: int, width: int, resize: int) -> tuple[int, int]:
    short = min(height, width)
    return round(height * resize / short), round(width * resize / short)


def _shrunk(data: bytes, height: int, width: int, resize: int) -> Cleaned:
    """Decode at a reduced size, but at least twice the target size, and then resize."""
    high, wide = _target(height, width, resize)
    pixels = needed("simplejpeg").decode_jpeg(data, "RGB", min_height=2 * high, min_width=2 * wide)
    return _encoded(needed("PIL.Image").fromarray(pixels), high, wide)


def _encoded(image: object, height: int, width: int, note: str = "") -> Cleaned:
    pil = needed("PIL.Image")
    resized = image if image.size == (width, height) else image.resize(  # type: ignore[attr-defined]
        (width, height), pil.LANCZOS
    )
    pixels = np.ascontiguousarray(resized)
    return Cleaned(needed("simplejpeg").encode_jpeg(pixels, QUALITY, "RGB", "420"), height, width, note)


def _converted(data: bytes, resize: int, problem: str) -> Cleaned:
    """Decode with Pillow, which supports more formats, and encode as JPEG."""
    from ringdance.data import images  # imported here so that a missing Pillow gives a clear error

    pil = needed("PIL.Image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ignore warnings about metadata
            with pil.open(io.BytesIO(data)) as image:
                note = problem if image.format == "JPEG" else f"{image.format} instead of JPEG"
                needed("PIL.ImageOps").exif_transpose(image, in_place=True)
                rgb = images.as_rgb(image)
    except Exception as error:  # many kinds, some of which contain an object's address
        text = re.sub(r" <_io.BytesIO object at \w+>", "", str(error))
        raise BrokenImage(f"{problem}; {text}" if data[:2] == b"\xff\xd8" else text) from None
    width, height = rgb.size
    if resize and min(height, width) > resize:
        height, width = _target(height, width, resize)
    return _encoded(rgb, height, width, note)
