"""Hyperparameters of published ResNet-50 runs, each with its source and reported result.

A preset's ``rate`` is the peak learning rate for its global batch, ``batch_size * devices``. For other
sizes of the global batch, ``Preset.rate_for`` scales the rate linearly (Goyal et al. 2017).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Preset:
    """Hyperparameters of one training run.

    Attributes:
        batch_size: Number of images per device and step.
        devices: Number of devices in the published run.
        optimizer: "sgd" (with momentum) or "lars".
        rate: Peak learning rate for the global batch.
        schedule: Schedule after the warm-up: "cosine", "step" (a drop to a tenth at each of
            ``milestones``) or "polynomial" (power 2).
        warmup_epochs: Number of epochs during which the learning rate rises linearly.
        warmup_start: Learning rate in the first step, or 0 for the peak divided by the number of warm-up
            steps.
        epochs: Number of epochs in the schedule, including the warm-up.
        source: Publication with the hyperparameters.
        expected: Result that the source reports.
        milestones: Epochs at which the schedule "step" reduces the learning rate.
        label_smoothing: Fraction of the target probability to spread evenly over all classes.
        weight_decay: L2 penalty. Applies to weights only, not to biases or to the scales and offsets of
            normalization layers.
        momentum: SGD momentum as in PyTorch: ``v = momentum * v + g; w = w - rate * v``. In LARS, ``v``
            includes the learning rate.
        precision: "float32", "float16" (with loss scaling) or "bfloat16".
        image_size: Size of the crops, in pixels.
        augment: If True, use random crops and flips.
    """

    batch_size: int
    devices: int
    optimizer: str
    rate: float
    schedule: str
    warmup_epochs: float
    epochs: float
    source: str
    expected: str
    milestones: tuple[float, ...] = ()
    label_smoothing: float = 0.1
    weight_decay: float = 5e-5
    momentum: float = 0.9
    precision: str = "float32"
    image_size: int = 224
    augment: bool = True
    warmup_start: float = 0.0

    def rate_for(self, batch: int) -> float:
        """Return the peak learning rate for the size of a global batch, by linear scaling."""
        return self.rate * batch / (self.batch_size * self.devices)

    def overridden(self, given: argparse.Namespace) -> Preset:
        """Return a copy with overrides from the command line. Scales the rate and the milestones.

        An option overrides the field with the same name, except --rate, which the caller applies.
        """
        names = {field.name for field in fields(self)} - {"rate"}
        values = {name: value for name, value in vars(given).items() if name in names and value is not None}
        larger = values.get("batch_size", self.batch_size) / self.batch_size
        longer = values.get("epochs", self.epochs) / self.epochs
        milestones = tuple(epoch * longer for epoch in self.milestones)
        return replace(self, rate=self.rate * larger, milestones=milestones, **values)


_GOYAL = "Goyal et al. 2017, Accurate, Large Minibatch SGD, arXiv 1706.02677"
_NVIDIA = "NVIDIA DeepLearningExamples, PyTorch ResNet50 v1.5, DGX1_RN50_AMP_90E.sh and README"
_MLPERF = "MLPerf reference convergence points, github.com/mlcommons/logging, training_4.0.0/rcps_resnet.json"


def _goyal(devices: int, expected: str) -> Preset:
    """Return a published run of Goyal et al. 2017 for a number of devices, each with 32 images per step."""
    return Preset(
        batch_size=32, devices=devices, optimizer="sgd", rate=0.1 * 32 * devices / 256, schedule="step",
        milestones=(30, 60, 80), warmup_epochs=5, warmup_start=0.1, epochs=90, label_smoothing=0.0,
        weight_decay=1e-4, source=_GOYAL, expected=expected,
    )


def _mlperf(
    batch_size: int, devices: int, rate: float, warmup_epochs: int, epochs: int, weight_decay: float,
    converged: float, momentum: float = 0.9,
) -> Preset:
    """Return the hyperparameters of one of MLPerf's reference convergence points.

    ``batch_size`` is the source's number of images per batch normalization. The length of the schedule is the
    source's number of decay steps, plus the warm-up if the source's runs took longer than these steps. The
    source states neither label smoothing nor precision, so NVIDIA's 0.1 and bfloat16 are used.
    """
    return Preset(
        batch_size=batch_size, devices=devices, optimizer="lars", rate=rate, schedule="polynomial",
        warmup_epochs=warmup_epochs, epochs=epochs, weight_decay=weight_decay, momentum=momentum,
        precision="bfloat16", source=_MLPERF,
        expected=f"75.9% top-1 after {converged:g} epochs (mean of its runs)",
    )  # fmt: skip


PRESETS: dict[str, Preset] = {
    "laptop": Preset(
        batch_size=8, devices=2, optimizer="sgd", rate=0.02, schedule="cosine", warmup_epochs=2, epochs=20,
        label_smoothing=0.0, image_size=64, augment=False,
        source="none: chosen here, for 71 photographs on two cores",
        expected="over 95% top-1 on its own 71 training images; says nothing about other images",
    ),
    "8xV100": Preset(
        batch_size=256, devices=8, optimizer="sgd", rate=2.048, schedule="cosine", warmup_epochs=8, epochs=90,
        weight_decay=1 / 32768, momentum=0.875, precision="float16", source=_NVIDIA,
        expected="76.88% +/- 0.16 top-1; 8,322 images/s, about 5 hours on a DGX-1 (8 V100 of 16 GB)",
    ),
    "32": _goyal(32, "the accuracy of a small batch: the paper reports no loss up to a batch of 8,192"),
    "256": _goyal(256, "76.3% top-1 in one hour on 256 P100; 90% scaling efficiency from 8 to 256"),
    "mlperf-1632": _mlperf(204, 8, 7.4, 2, 37, 5e-5, 35),
    "mlperf-3264": _mlperf(204, 16, 10.5, 2, 37, 5e-5, 35.2),
    "mlperf-4096": _mlperf(64, 64, 10.0, 5, 42, 2e-4, 40),
    "mlperf-8192": _mlperf(64, 128, 17.0, 5, 44, 2e-4, 42),
    "mlperf-13056": _mlperf(204, 64, 12.8, 9, 48, 2.5e-5, 45.4),
    "mlperf-32768": _mlperf(128, 256, 21.2, 16, 58, 2.5e-5, 56, 0.94),
    "mlperf-49152": _mlperf(256, 192, 19.405, 24, 71, 1e-4, 68, 0.951807),
    "mlperf-65536": _mlperf(128, 512, 24.699, 31, 89, 1e-4, 84.5, 0.951807),
}
