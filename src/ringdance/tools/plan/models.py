"""Known models and convergence curves for ``ringdance plan``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod
from pathlib import Path

import numpy as np

from ringdance.errors import LaunchError
from ringdance.submit.instances import parsed

_FILE = Path(__file__).with_name("models.toml")
# Share of a step that the forward pass takes. The backward pass needs twice as many multiplications.
FORWARD = 1 / 3


@dataclass(frozen=True)
class KnownModel:
    """A model whose gradient sizes are known without a measurement.

    Attributes:
        batch: Samples per rank and step with which published rates were measured.
        samples: Number of samples in the model's usual training set, or 0 if no such set exists.
        forward: Share of a step that the forward pass takes.
        tensors: Number of elements of each parameter, and number of positions to which it is applied (0 if
            it is not multiplied), in the format of models.toml.
    """

    name: str
    batch: int
    tensors: str
    samples: int = 0
    forward: float = FORWARD

    @property
    def parameters(self) -> list[tuple[int, int]]:
        """Each parameter's element and position counts (see ``tensors``), in forward order."""
        words = list[str]()
        for row in self.tensors.strip().splitlines():
            times, _, tensors = row.rpartition(":")
            words += tensors.split() * int(times or 1)
        return [(int(elements), int(place or 0)) for elements, _, place in (w.partition("@") for w in words)]

    def gradients(self, step_seconds: float) -> list[tuple[int, float]]:
        """Return each gradient's size in bytes, and the time in seconds at which it is ready during the step.

        A parameter's time is assumed to be proportional to its multiplications: elements times positions.
        """
        parameters = self.parameters[::-1]
        ends = list(accumulate(map(prod, parameters)))
        shares = [self.forward + (1 - self.forward) * end / ends[-1] for end in ends]
        return [(4 * size[0], step_seconds * share) for size, share in zip(parameters, shares, strict=True)]


@cache
def models() -> dict[str, KnownModel]:
    """Return all known models by name."""
    return {name: KnownModel(name, **row) for name, row in parsed(_FILE)["models"].items()}


@dataclass(frozen=True)
class Curve:
    """A convergence curve: the number of epochs needed to reach an accuracy, by batch size.

    Attributes:
        target: Accuracy to reach.
        what: Description of the accuracy metric and of the optimizer used.
        points: Batch size and epochs for each reference point, in ascending order.
    """

    model: str
    target: float
    what: str
    points: tuple[tuple[float, float], ...]

    def epochs(self, batch: int) -> float | None:
        """Return the number of epochs for ``batch``, or None if it exceeds the largest reference batch size.

        Between reference points, the number of epochs is interpolated over the logarithm of the batch size. A
        batch size below the smallest reference point needs the same number of epochs as that point.
        """
        batches, epochs = zip(*self.points, strict=True)
        if batch > batches[-1]:
            return None
        return float(np.interp(np.log(batch), np.log(batches), epochs))


@cache
def curves() -> dict[str, Curve]:
    """Return the convergence curves by model."""
    return {
        name: Curve(name, row["target"], row["what"], tuple(map(tuple, row["points"])))
        for name, row in parsed(_FILE)["curves"].items()
    }


def curve(model: str, target: float) -> Curve:
    """Return a model's curve for a target accuracy. Raises LaunchError if no curve is known."""
    known_curve = curves().get(model)
    if known_curve is None or known_curve.target != target:
        known = " and ".join(f"{entry.target:g} of {entry.model}" for entry in curves().values())
        raise LaunchError(
            f"--to-accuracy {target:g}: the number of epochs for {model} is not known, because MLPerf has "
            f"reference points only for {known}. Pass --epochs instead."
        )
    return known_curve
