"""The gradients of known models: how many bytes, and when backward has them.

Computed from the shapes of the layers, as the models' papers and torchvision define them. A layer's time is
taken to be in proportion to its multiplications: elements of the weight times positions it is applied to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

from ringdance.errors import ArgumentError

Tensors = Iterator[tuple[int, int]]
"""Elements of each parameter in the order of forward, and to how many positions it is applied."""
FORWARD = 1 / 3  # of a step: backward multiplies twice where forward does once


def _conv(sizes: Sequence[int], positions: int, norm: bool = True) -> Tensors:
    """A convolution or, for two sizes, a dense layer; then batch normalization, or else with a bias."""
    yield prod(sizes), positions
    yield from [(sizes[0], 0)] * (2 if norm else 1)


def _residual(blocks: Sequence[int], side: int, norm: bool = True) -> Tensors:
    """The stages of a ResNet with bottlenecks (He et al. 2015); ``side``: of the first one's images."""
    normal = 2 if norm else 0
    inner, depth = 64, 64
    for stage, count in enumerate(blocks):
        side, inner = (side // 2 if stage else side), 64 << stage
        for block in range(count):
            for sizes in ((inner, depth), (inner, inner, 3, 3), (4 * inner, inner)):
                yield prod(sizes), side * side
                yield from [(sizes[0], 0)] * normal
            if not block:
                yield 4 * inner * depth, side * side
                yield from [(4 * inner, 0)] * normal
            depth = 4 * inner


def _resnet(*blocks: int) -> Tensors:
    yield from _conv((64, 3, 7, 7), 112 * 112)
    yield from _residual(blocks, 56)
    yield from _conv((1000, 2048), 1, norm=False)


def _vgg16() -> Tensors:
    """Simonyan and Zisserman 2014, configuration D."""
    depth, side = 3, 224
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            yield from _conv((width, depth, 3, 3), side * side, norm=False)
            depth = width
        side //= 2
    for sizes in ((4096, 512 * 7 * 7), (4096, 4096), (1000, 4096)):
        yield from _conv(sizes, 1, norm=False)


# Inception-v3 (Szegedy et al. 2015): side of the image; branches, of layers with outputs and kernel; inputs.
_A = "64:1 48:1,64:5 64:1,96:3,96:3 {0}:1"
_C = "192:1 {0}:1,{0}:17,192:71 {0}:1,{0}:71,{0}:17,{0}:71,192:17 192:1"
_E = "320:1 384:1,384:13,384:31 448:1,384:3,384:13,384:31 192:1"
_INCEPTION = (
    [(149, "32:3", 3), (147, "32:3", 32), (147, "64:3", 32), (73, "80:1", 64), (71, "192:3", 80)]
    + [(35, _A.format(32), 192), (35, _A.format(64), 256), (35, _A.format(64), 288)]
    + [(17, "384:3 64:1,96:3,96:3", 288), *((17, _C.format(width), 768) for width in (128, 160, 160, 192))]
    + [(8, "192:1,320:3 192:1,192:17,192:71,192:3", 768), (8, _E, 1280), (8, _E, 2048)]
)


def _inception_v3() -> Tensors:
    """Without the auxiliary classifier."""
    for side, branches, depth in _INCEPTION:
        for branch in branches.split():
            before = depth
            for layer in branch.split(","):
                width, kernel = map(int, layer.split(":"))
                yield from _conv((width, before, kernel // 10 or kernel, kernel % 10), side * side)
                before = width
    yield from _conv((1000, 2048), 1, norm=False)


def _bert_base() -> Tensors:
    """Devlin et al. 2018, with the pooler; positions are tokens."""
    norm, layer = [(768, 0)] * 2, (*[(768, 768)] * 4, (3072, 768), (768, 3072))
    yield from [(30522 * 768, 0), (512 * 768, 0), (2 * 768, 0), *norm]
    for _ in range(12):
        for number, sizes in enumerate(layer):
            yield from _conv(sizes, 128, norm=False)
            yield from norm if number in (3, 5) else ()
    yield from _conv((768, 768), 1, norm=False)


def _detector(masks: bool) -> Tensors:
    """Faster or Mask R-CNN, ResNet-50 with a feature pyramid, 91 classes, images of 800 x 1344.

    The first two stages and all batch normalizations are frozen: they have no gradients.
    """
    side, frozen = 1024 // 4, 10
    yield from list(_residual((3, 4, 6, 3), side, norm=False))[frozen:]
    pyramid = [(side >> level) ** 2 for level in range(4)]
    for depth, positions in zip((256, 512, 1024, 2048), pyramid, strict=True):
        yield from _conv((256, depth), positions, norm=False)
        yield from _conv((256, 256, 3, 3), positions, norm=False)
    heads: list[tuple[int, tuple[int, ...]]] = [
        *((sum(pyramid), sizes) for sizes in ((256, 256, 3, 3), (3, 256), (12, 256))),
        *((512, sizes) for sizes in ((1024, 256 * 7 * 7), (1024, 1024), (91, 1024), (364, 1024))),
        *((128 * 14 * 14, sizes) for sizes in (*[(256, 256, 3, 3)] * 4, (256, 256, 2, 2), (91, 256))),
    ]
    for positions, sizes in heads if masks else heads[:7]:
        yield from _conv(sizes, positions, norm=False)


_MODELS: dict[str, Callable[[], Tensors]] = {
    "resnet50": lambda: _resnet(3, 4, 6, 3),
    "resnet101": lambda: _resnet(3, 4, 23, 3),
    "vgg16": _vgg16,
    "inception_v3": _inception_v3,
    "bert-base": _bert_base,
    "faster_rcnn": lambda: _detector(False),
    "mask_rcnn": lambda: _detector(True),
}
MODELS = tuple(_MODELS)


def gradients(model: str, compute_seconds: float, forward: float = FORWARD) -> list[tuple[int, float]]:
    """Return the gradients of a step that computes for so long: bytes in float32 and when they are ready, s.

    In the order in which backward has them, after ``forward``, a share of the step. Raises ArgumentError for
    another model than ``MODELS``.
    """
    if model not in _MODELS:
        raise ArgumentError(f"There is no model {model!r}; known are {', '.join(MODELS)}.")
    tensors = list(_MODELS[model]())[::-1]
    whole = sum(elements * positions for elements, positions in tensors) or 1
    found, done = [], 0
    for elements, positions in tensors:
        done += elements * positions
        found.append((4 * elements, compute_seconds * (forward + (1 - forward) * done / whole)))
    return found
