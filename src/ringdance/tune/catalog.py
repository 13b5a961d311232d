"""Data for plans: machines, models and convergence curves. The data are dated and checked when read."""

from __future__ import annotations

import difflib
import re
import tomllib
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import log, prod
from pathlib import Path
from typing import Any, get_type_hints

from ringdance.errors import LaunchError
from ringdance.job_files import NO_FORMAT, read_regular, typed

_HERE = Path(__file__).parent
# Share of a step. The backward pass does two multiplications for each one in the forward pass.
FORWARD = 1 / 3


@dataclass(frozen=True)
class Instance:
    """A kind of machine.

    Attributes:
        cores: Physical cores.
        gbits: Advertised network bandwidth, Gbit/s.
        gpus: GPUs per machine; 0 if it trains on CPUs.
        gpu: Name of the GPUs.
        nvlink: GB/s that a GPU can send to the machine's other GPUs; 0 if they have only PCI Express.
        rdma: True if GPUs use the network without TCP.
        tcp_gbits: Maximum that NCCL reaches over TCP, Gbit/s. NCCL uses one socket and one thread per
            connection, unless NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD say more. Fitted, see
            docs/howto/plan.md.
        price: Dollars per hour; None if not known.
        as_of: Date of the price.
    """

    name: str
    cores: int
    gbits: float
    gpus: int = 0
    gpu: str = ""
    nvlink: float = 0.0
    rdma: bool = False
    tcp_gbits: float = 11.0
    price: float | None = None
    as_of: str = ""


_KINDS = get_type_hints(Instance) | {"price": float}
del _KINDS["name"]  # comes from the table's key or the file's name


def instance(name: str) -> Instance:
    """Look up a kind of machine by name, or read it from a file whose name ends in .toml.

    Raises:
        LaunchError: The name is not known, or the file is not valid.
    """
    if name.endswith(".toml"):
        return _instance(Path(name).stem, _parsed(Path(name)), name)
    known = instances()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise LaunchError(
            f"--instance {name} is not known{f'; did you mean {near[0]}?' if near else '.'} Known are "
            f"{', '.join(known)}. Describe any other machine in a file: --instance mine.toml"
        )
    return known[name]


@cache
def instances() -> dict[str, Instance]:
    """Return the kinds of machines that the package describes."""
    file = _HERE / "instances.toml"
    rows = _parsed(file).items()
    return {name: _instance(name, fields, str(file)) for name, fields in rows if name != "gpus"}


def gpus_of(kind: str) -> int | None:
    """Return the GPUs of an EC2 instance type; None if not known or if it has other accelerators."""
    if kind in instances():
        return instances()[kind].gpus
    other_types: dict[str, int] = _parsed(_HERE / "instances.toml")["gpus"]
    return other_types.get(kind, 0 if re.match(r"[cmrt]\d", kind) else None)


def _parsed(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises LaunchError if it is not valid TOML."""
    try:
        return tomllib.loads(read_regular(path))
    except (ValueError, RecursionError) as error:
        raise LaunchError(f"{path} is not valid TOML: {error}") from None


def _instance(name: str, found: Mapping[str, Any], place: str) -> Instance:
    if unknown := found.keys() - _KINDS:
        known = ", ".join(_KINDS)
        raise LaunchError(f"{place}: {min(unknown)!r} is not a field of an instance. Known are {known}")
    values: dict[str, Any] = {key: str(value) if key == "as_of" else value for key, value in found.items()}
    for key in ("cores", "gbits"):
        if key not in values:
            raise LaunchError(f"{place}: {key} is missing. An instance needs at least cores and gbits")
    for key, value in values.items():
        kind, least = _KINDS[key], key in ("cores", "gbits")
        try:
            typed(values, key, kind)
            if kind in (int, float) and (value < 0 or (least and value == 0)):
                raise ValueError
        except NO_FORMAT:
            what = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[kind]
            suffix = " more than 0" if least else ", 0 or more" if kind in (int, float) else ""
            raise LaunchError(f"{place}: {key} is {value!r}; expected {what}{suffix}") from None
    return Instance(name, **values)


@dataclass(frozen=True)
class Model:
    """A model whose gradients are known without a measurement.

    Attributes:
        batch: Samples per rank and step behind its published rates.
        samples: Samples in its usual training set; 0 if there is none.
        forward: Share of a step before the backward pass.
        tensors: Elements of each parameter and the positions it is applied to, as in models.toml.
    """

    name: str
    batch: int
    tensors: str
    samples: int = 0
    forward: float = FORWARD

    @property
    def parameters(self) -> list[tuple[int, int]]:
        """Elements and positions of each parameter, in forward order. 0 positions: not multiplied."""
        words = list[str]()
        for row in self.tensors.strip().splitlines():
            times, _, tensors = row.rpartition(":")
            words += tensors.split() * int(times or 1)
        return [(int(elements), int(place or 0)) for elements, _, place in (w.partition("@") for w in words)]

    def gradients(self, step_seconds: float) -> list[tuple[int, float]]:
        """Return bytes of each gradient, and seconds from the start of the step until it is ready.

        A layer takes time in proportion to its multiplications: elements times positions.
        """
        parameters = self.parameters[::-1]
        ends = list(accumulate(map(prod, parameters)))
        shares = [self.forward + (1 - self.forward) * end / ends[-1] for end in ends]
        return [(4 * size[0], step_seconds * share) for size, share in zip(parameters, shares, strict=True)]


@cache
def models() -> dict[str, Model]:
    """Return the models that are known without a measurement."""
    rows = _parsed(_HERE / "models.toml")["models"]
    return {name: Model(name, **row) for name, row in rows.items()}


@dataclass(frozen=True)
class Curve:
    """The number of epochs that a batch size needs to reach an accuracy.

    Attributes:
        target: Accuracy to reach.
        what: Kind of accuracy, and the optimizer.
        points: Batch size, epochs, base learning rate and warm-up epochs of each reference point.
    """

    model: str
    target: float
    what: str
    points: tuple[tuple[float, ...], ...]

    def at(self, batch: int) -> tuple[float, float, float] | None:
        """Return epochs, learning rate and warm-up epochs, or None above the largest batch.

        Batches below the smallest reference point use its epochs. Their learning rate is scaled linearly.
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
    """Return the convergence curves by model."""
    rows = _parsed(_HERE / "models.toml")["curves"]
    return {
        name: Curve(name, row["target"], row["what"], tuple(map(tuple, row["points"])))
        for name, row in rows.items()
    }


def curve(model: str, target: float) -> Curve:
    """Return a model's curve to an accuracy. Raises LaunchError if it is not known."""
    known_curve = curves().get(model)
    if known_curve is None or known_curve.target != target:
        known = " and ".join(f"{entry.target:g} of {entry.model}" for entry in curves().values())
        raise LaunchError(
            f"--to-accuracy {target:g}: the epochs that {model} needs are not known, because MLPerf has "
            f"reference points only for {known}. Use --epochs instead"
        )
    return known_curve
