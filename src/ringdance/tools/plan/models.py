"""Models and curves of convergence that a plan is made from."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import log, prod
from pathlib import Path

from ringdance.errors import LaunchError
from ringdance.submit.instances import parsed

_FILE = Path(__file__).with_name("models.toml")
# Share of a step: the backward pass multiplies twice where the forward pass does once.
FORWARD = 1 / 3


@dataclass(frozen=True)
class Model:
    """A model whose gradients are known without a measurement.

    Attributes:
        batch: samples of a rank and step that its published rates have.
        samples: of the data set that it is usually trained on; 0 if there is none.
        forward: share of a step before the backward pass.
        tensors: elements of each parameter and the positions that they are applied to, as in models.toml.
    """

    name: str
    batch: int
    tensors: str
    samples: int = 0
    forward: float = FORWARD

    @property
    def parameters(self) -> list[tuple[int, int]]:
        """Elements of each parameter, in the order of the forward pass, and positions, 0 for none."""
        words = list[str]()
        for row in self.tensors.strip().splitlines():
            times, _, tensors = row.rpartition(":")
            words += tensors.split() * int(times or 1)
        return [(int(elements), int(place or 0)) for elements, _, place in (w.partition("@") for w in words)]

    def gradients(self, step_seconds: float) -> list[tuple[int, float]]:
        """Return bytes of each gradient, and seconds after the step's begin at which it is ready.

        A layer takes time in proportion to its multiplications: elements times positions.
        """
        found = self.parameters[::-1]
        ends = list(accumulate(map(prod, found)))
        shares = [self.forward + (1 - self.forward) * end / ends[-1] for end in ends]
        return [(4 * one[0], step_seconds * share) for one, share in zip(found, shares, strict=True)]


@cache
def models() -> dict[str, Model]:
    """Return the models that are known without a measurement."""
    rows = parsed(_FILE)["models"]
    return {name: Model(name, **row) for name, row in rows.items()}


@dataclass(frozen=True)
class Curve:
    """How many epochs a batch needs until an accuracy.

    Attributes:
        target: the accuracy.
        what: what it is an accuracy of, and by which optimizer.
        points: batch, epochs, base learning rate, epochs of warm-up.
    """

    model: str
    target: float
    what: str
    points: tuple[tuple[float, ...], ...]

    def at(self, batch: int) -> tuple[float, float, float] | None:
        """Return epochs, learning rate and epochs of warm-up; None beyond the largest batch.

        Smaller batches than the smallest one get its epochs; their rate is scaled in full.
        """
        batches = [point[0] for point in self.points]
        if batch > batches[-1]:
            return None
        place = bisect_left(batches, batch)
        high = self.points[place]
        if place == 0:
            return high[1], high[2] * batch / high[0], high[3]
        low = self.points[place - 1]
        share = log(batch / low[0]) / log(high[0] / low[0])
        epochs, rate, warm_up = (a + (b - a) * share for a, b in zip(low[1:], high[1:], strict=True))
        return epochs, rate, warm_up


@cache
def curves() -> dict[str, Curve]:
    """Return the curves of convergence by model."""
    rows = parsed(_FILE)["curves"]
    return {
        name: Curve(name, row["target"], row["what"], tuple(map(tuple, row["points"])))
        for name, row in rows.items()
    }


def curve(model: str, target: float) -> Curve:
    """Return the curve of a model to an accuracy. Raises LaunchError if none is known."""
    found = curves().get(model)
    if found is None or found.target != target:
        known = " and ".join(f"{one.target:g} of {one.model}" for one in curves().values())
        raise LaunchError(
            f"--to-accuracy {target:g}: how many epochs {model} needs to it is not known, as MLPerf has "
            f"reference points for {known} only; give --epochs"
        )
    return found
