"""Hyper-parameters of published detection runs on COCO, each with its source and reported result.

A preset's ``rate`` is the peak learning rate of its whole batch, ``batch_size * devices``; with
another one it is scaled linearly. All are for either model; ``expected`` names those that were published.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

IMAGES = 117_266
"""Images of COCO train2017 with objects: the length of an epoch, in which sources count their steps."""


@dataclass(frozen=True)
class Preset:
    """One set of hyper-parameters.

    Attributes:
        batch_size: images per device and step.
        devices: of the published run.
        rate: peak learning rate of the whole batch.
        epochs: length of the schedule.
        warmup_steps: in which the rate rises linearly.
        warmup_start: rate of the first step, as a share of the peak.
        source: where the figures are from.
        expected: what is reported for them.
        milestones: epochs from which on the rate is a tenth of that before; none: cosine to 0.
        optimizer: "sgd" (momentum 0.9) or "adamw".
        weight_decay: L2; of AdamW decoupled.
        clip: largest norm of the gradient of all parameters; 0: any.
        precision: "float32", "float16" (with loss scaling) or "bfloat16".
        image_size, longest: the shorter side of an image becomes the one, unless the longer one were above
            the other, in pixels.
        flip: half of the images, by chance.
        backbone: "resnet50_fpn" and the like: a ResNet of torchvision with a feature pyramid.
        width: channels of the pyramid and of the masks' head; the boxes' head has four times as many.
        anchor: side of the smallest anchor, in pixels.
        regions: of an image that the heads are trained on.
    """

    batch_size: int
    devices: int
    rate: float
    epochs: float
    warmup_steps: int
    warmup_start: float
    source: str
    expected: str
    milestones: tuple[float, ...] = ()
    optimizer: str = "sgd"
    weight_decay: float = 1e-4
    clip: float = 0.0
    precision: str = "float32"
    image_size: int = 800
    longest: int = 1333
    flip: bool = True
    backbone: str = "resnet50_fpn"
    width: int = 256
    anchor: int = 32
    regions: int = 512

    def overridden(self, given: argparse.Namespace) -> Preset:
        """Return the preset with what a command line sets, and what goes with that.

        The rate goes with the batch size, milestones with the epochs, the longest side with the shorter one.
        """
        values = {name: one for name in _OVERRIDDEN if (one := getattr(given, name, None)) is not None}
        more = values.get("batch_size", self.batch_size) / self.batch_size
        longer = values.get("epochs", self.epochs) / self.epochs
        larger = values.get("image_size", self.image_size) / self.image_size
        milestones = tuple(one * longer for one in self.milestones)
        values.setdefault("longest", round(self.longest * larger))
        return replace(self, rate=self.rate * more, milestones=milestones, **values)

    def rate_for(self, batch: int) -> float:
        """Return the peak learning rate for another whole batch: linear scaling."""
        return self.rate * batch / (self.batch_size * self.devices)


_OVERRIDDEN = (
    "epochs", "warmup_steps", "batch_size", "optimizer", "precision", "image_size", "longest", "clip",
    "backbone", "width",
)  # fmt: skip
_GLUONCV = "GluonCV 0.10, train_faster_rcnn.py and train_mask_rcnn.py with --horovod"
_MLPERF = "MLPerf reference convergence points, github.com/mlcommons/logging, training_2.0.0, maskrcnn"
_TORCHVISION = "github.com/pytorch/vision, references/detection/README.md and train.py"


def _gluoncv(devices: int, expected: str) -> Preset:
    """Return the published runs with MXNet: an image for each device, 0.00125 for each image of a batch."""
    return Preset(
        batch_size=1, devices=devices, rate=0.00125 * devices, epochs=26, warmup_steps=1000,
        warmup_start=1 / 3, milestones=(17, 23), source=_GLUONCV, expected=expected,
    )  # fmt: skip


def _mlperf(
    batch_size: int, devices: int, rate: float, warmup_steps: int, start: float, decays: tuple[int, int],
    epochs: int,
) -> Preset:
    """Return a reference convergence point; ``decays``: the steps from which on the rate is a tenth.

    The source gives whole batches and no precision; it ends at the target. The schedule has one epoch more
    than its mean run.
    """
    milestones = [step * batch_size * devices / IMAGES for step in decays]
    return Preset(
        batch_size=batch_size, devices=devices, rate=rate, epochs=epochs + 1, warmup_steps=warmup_steps,
        warmup_start=start / rate, milestones=tuple(milestones), precision="float16", source=_MLPERF,
        expected=f"Mask R-CNN: 37.7 box AP and 33.9 mask AP after {epochs} epochs",
    )  # fmt: skip


PRESETS: dict[str, Preset] = {
    "laptop": Preset(
        batch_size=1, devices=2, rate=2.5e-4, epochs=160, warmup_steps=100, warmup_start=0.1,
        optimizer="adamw", weight_decay=1e-4, clip=10.0, precision="bfloat16", image_size=192, longest=320,
        flip=False, backbone="resnet18_fpn", width=64, anchor=6, regions=64,
        source="none: chosen here, for small photographs on two cores",
        expected="Mask R-CNN, on the hundred photographs it was trained on: 0.75 box AP and 0.52 mask AP",
    ),
    "8xV100": _gluoncv(
        8, "Faster R-CNN: 37.5 AP in 8h26 on a p3.16xlarge, 7h27 on a p3dn.24xlarge; Mask R-CNN: 10h28, "
        "8h41, with 34.4 box AP and 31.3 mask AP (without Horovod 38.5 and 34.8)"
    ),
    "24xV100": _gluoncv(
        24, "Faster R-CNN: 37.4 AP in 4h58 on three p3.16xlarge, 3h37 on three p3dn.24xlarge; Mask R-CNN: "
        "5h34, and 4h02 with 37.0 box AP and 33.4 mask AP"
    ),
    "torchvision": Preset(
        batch_size=2, devices=8, rate=0.02, epochs=26, warmup_steps=1000, warmup_start=0.001,
        milestones=(16, 22), source=_TORCHVISION,
        expected="Faster R-CNN: 37.0 AP; Mask R-CNN: 37.9 box AP and 34.6 mask AP",
    ),
    "mlperf-8": _mlperf(1, 8, 0.01, 500, 0.00002, (144_000, 192_000), 13),
    "mlperf-48": _mlperf(6, 8, 0.06, 800, 0.000096, (24_000, 32_000), 14),
    "mlperf-64": _mlperf(8, 8, 0.08, 800, 0.0001, (18_000, 24_000), 14),
    "mlperf-96": _mlperf(4, 24, 0.12, 625, 0.000192, (12_000, 16_000), 14),
    "mlperf-128": _mlperf(4, 32, 0.16, 625, 0.000256, (9_000, 12_000), 14),
    "mlperf-256": _mlperf(4, 64, 0.24, 1800, 0.000133, (5_625, 7_500), 17),
}  # fmt: skip
