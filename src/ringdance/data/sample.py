"""An image before it is written to a data set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """An image with the metadata that a data set stores.

    Attributes:
        image: Encoded as JPEG.
        label: Class number, from 0.
        synset: Directory name of its class, such as "n01440764".
        name: File name, including the class directory.
        height, width: Size in pixels.
    """

    image: bytes
    label: int
    synset: str
    name: str
    height: int
    width: int
