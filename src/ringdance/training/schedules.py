"""Learning rate schedules: a warm-up, followed by a cosine, steps, a polynomial or a constant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ringdance.errors import ArgumentError

__all__ = ["Schedule"]

KINDS = ("cosine", "step", "polynomial", "constant")


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of the (fractional) epoch: ``schedule(epoch)``.

    Attributes:
        peak: Rate after the warm-up. For large batches, scale it with the global batch size (Goyal et al.
            2017, arXiv 1706.02677): the rate for one process times the number of processes.
        epochs: Length of the training run, including the warm-up. After that, the rate stays constant.
        kind: Shape after the warm-up. "cosine" falls to 0. "step" multiplies the rate by ``factor`` at each
            of ``milestones``. "polynomial" falls to 0 with exponent ``power``. "constant" stays at ``peak``.
        warmup_epochs: Number of epochs in which the rate rises linearly from ``start`` to ``peak``.
        start: Rate at the first step of the warm-up.
        milestones: Epochs, counted from the start of the training run, for "step".
        factor: Factor by which the rate is multiplied at each milestone, for "step".
        power: Exponent, for "polynomial".

    Raises:
        ArgumentError: The kind is unknown, or the warm-up is longer than the training run.
    """

    peak: float
    epochs: float
    kind: str = "cosine"
    warmup_epochs: float = 5.0
    start: float = 0.0
    milestones: Sequence[float] = ()
    factor: float = 0.1
    power: float = 2.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError(f"kind={self.kind!r} is unknown. Use one of {', '.join(map(repr, KINDS))}.")
        if not 0 <= self.warmup_epochs <= self.epochs:
            raise ArgumentError(f"warmup_epochs={self.warmup_epochs} must be from 0 to epochs={self.epochs}.")

    def __call__(self, epoch: float) -> float:
        """Return the rate at an epoch. 2.5 is the middle of the third epoch, for example."""
        if epoch < self.warmup_epochs:
            return self.start + (self.peak - self.start) * epoch / self.warmup_epochs
        if self.kind == "step":
            return self.peak * self.factor ** sum(epoch >= milestone for milestone in self.milestones)
        if self.kind == "constant":
            return self.peak
        left = 1.0 - min(1.0, (epoch - self.warmup_epochs) / max(self.epochs - self.warmup_epochs, 1e-9))
        if self.kind == "polynomial":
            return float(self.peak * left**self.power)
        return self.peak * 0.5 * (1.0 - math.cos(math.pi * left))
