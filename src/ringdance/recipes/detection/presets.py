"""Hyperparameters of published detection runs on COCO, each with its source and reported result.

A preset's ``rate`` is the peak learning rate for its global batch, ``batch_size * devices``. For another
batch size, the rate is scaled linearly. All presets work with both models. ``expected`` contains the
published results and their models.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace

IMAGES = 117_266
"""Images in COCO train2017 with objects: the length of an epoch, in which the sources count steps."""


@dataclass(frozen=True)
class Preset:
    """Hyperparameters of one training run.

    Attributes:
        batch_size: Number of images per device and step.
        devices: Number of devices in the published run.
        rate: Peak learning rate for the global batch.
        epochs: Number of epochs in the schedule.
        warmup_steps: Number of steps during which the learning rate rises linearly.
        warmup_start: Learning rate in the first step, as a fraction of the peak.
        source: Publication with the hyperparameters.
        expected: Result that the source reports.
        milestones: Epochs at which the rate drops to a tenth. If empty, the rate decays to 0 along a cosine.
        optimizer: "sgd" (momentum 0.9) or "adamw".
        weight_decay: L2 penalty with SGD; decoupled weight decay with AdamW.
        clip: Maximum global norm of the gradients, or 0 for no limit.
        precision: "float32", "float16" (with loss scaling) or "bfloat16".
        image_size: Target length of an image's shorter side, in pixels.
        longest: Maximum length of the longer side, in pixels. Takes precedence over ``image_size``.
        flip: If True, flip each image with probability 1/2.
        backbone: A torchvision ResNet with a feature pyramid, such as "resnet50_fpn".
        width: Number of channels in the pyramid and the mask head. The box head has four times as many.
        anchor: Side of the smallest anchor, in pixels.
        regions: Number of regions per image on which the heads are trained.
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
        """Return a copy with overrides from the command line. Scales the values that depend on them.

        An option overrides the field with the same name, except --rate, which the caller applies. The
        preset's rate is scaled with the batch size, its milestones with the epochs, and the longer side with
        the shorter side.
        """
        names = {field.name for field in fields(self)} - {"rate"}
        values = {name: value for name, value in vars(given).items() if name in names and value is not None}
        larger_batch = values.get("batch_size", self.batch_size) / self.batch_size
        longer = values.get("epochs", self.epochs) / self.epochs
        larger = values.get("image_size", self.image_size) / self.image_size
        milestones = tuple(epoch * longer for epoch in self.milestones)
        values.setdefault("longest", round(self.longest * larger))
        return replace(self, rate=self.rate * larger_batch, milestones=milestones, **values)

    def rate_for(self, batch: int) -> float:
        """Return the peak learning rate for the size of a global batch, by linear scaling."""
        return self.rate * batch / (self.batch_size * self.devices)


_GLUONCV = "GluonCV 0.10, train_faster_rcnn.py and train_mask_rcnn.py with --horovod"
_MLPERF = "MLPerf reference convergence points, github.com/mlcommons/logging, training_2.0.0, maskrcnn"
_TORCHVISION = "github.com/pytorch/vision, references/detection/README.md and train.py"


def _gluoncv(devices: int, expected: str) -> Preset:
    """Return GluonCV's published run for a number of devices, each with one image per step."""
    return Preset(
        batch_size=1, devices=devices, rate=0.00125 * devices, epochs=26, warmup_steps=1000,
        warmup_start=1 / 3, milestones=(17, 23), source=_GLUONCV, expected=expected,
    )  # fmt: skip


def _mlperf(
    batch_size: int, devices: int, rate: float, warmup_steps: int, start: float, decays: tuple[int, int],
    epochs: int,
) -> Preset:
    """Return the hyperparameters of one of MLPerf's reference convergence points.

    The rate drops to a tenth at the steps in ``decays``. The source does not state the precision, which is
    our choice. Its runs stop at the target accuracy. The schedule is one epoch longer than their
    mean length.
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
        8, "Faster R-CNN: 37.5 AP, in 8h26 on a p3.16xlarge or 7h27 on a p3dn.24xlarge. Mask R-CNN: 10h28 "
        "on a p3.16xlarge; 8h41 on a p3dn.24xlarge, with 34.4 box AP and 31.3 mask AP (without Horovod: 38.5 "
        "and 34.8)"
    ),
    "24xV100": _gluoncv(
        24, "Faster R-CNN: 37.4 AP, in 4h58 on three p3.16xlarge or 3h37 on three p3dn.24xlarge. Mask R-CNN: "
        "5h34 on three p3.16xlarge; 4h02 on three p3dn.24xlarge, with 37.0 box AP and 33.4 mask AP"
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
