"""An image with its metadata, which functions that write data sets take as input."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """An image and its metadata, to be written to a data set.

    Attributes:
        image: The image, encoded as JPEG.
        label: Class number, from 0.
        synset: Directory name of the class, such as "n01440764".
        name: File name, including the class directory.
        height, width: Size in pixels.
    """

    image: bytes
    label: int
    synset: str
    name: str
    height: int
    width: int
