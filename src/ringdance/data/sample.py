"""An image on its way into a data set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """An image with what a data set says of it.

    Attributes:
        image: encoded, as JPEG.
        label: number of its class, from 0.
        synset: the directory name of its class, such as "n01440764".
        name: of its file, with the class's directory.
        height, width: in pixels.
    """

    image: bytes
    label: int
    synset: str
    name: str
    height: int
    width: int
