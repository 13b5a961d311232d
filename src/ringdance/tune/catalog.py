"""Machines, models and curves of convergence that a plan is made from: dated data, checked when read."""

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
# Share of a step: the backward pass multiplies twice where the forward pass does once.
FORWARD = 1 / 3


@dataclass(frozen=True)
class Instance:
    """A kind of machine.

    Attributes:
        cores: physical ones.
        gbits: of its network, Gbit/s, as it is sold.
        gpus: in a machine; 0: it trains on CPUs.
        gpu: their name.
        nvlink: GB/s that a GPU can send to the others of its machine; 0 where they have PCI Express only.
        rdma: whether GPUs use the network without TCP.
        tcp_gbits: what NCCL gets over TCP at most, Gbit/s. It has one socket and one thread for a connection,
            unless NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD say more; fitted, see docs/howto/plan.md.
        price: dollars for an hour; None if not known.
        as_of: when it was so.
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
del _KINDS["name"]  # is that of the table or the file


def instance(name: str) -> Instance:
    """Return a kind of machine by its name, or from a file that ends with .toml.

    Raises:
        LaunchError: it is not known, or the file is not as expected.
    """
    if name.endswith(".toml"):
        return _instance(Path(name).stem, _parsed(Path(name)), name)
    known = instances()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise LaunchError(
            f"--instance {name} is not known{f'; did you mean {near[0]}?' if near else '.'} Known are "
            f"{', '.join(known)}; describe any other one in a file: --instance mine.toml"
        )
    return known[name]


@cache
def instances() -> dict[str, Instance]:
    """Return the kinds of machines that come with the package."""
    file = _HERE / "instances.toml"
    rows = _parsed(file).items()
    return {name: _instance(name, found, str(file)) for name, found in rows if name != "gpus"}


def gpus_of(kind: str) -> int | None:
    """Return the GPUs of a machine by its type at EC2; None: not known, or it has other accelerators."""
    if kind in instances():
        return instances()[kind].gpus
    more: dict[str, int] = _parsed(_HERE / "instances.toml")["gpus"]
    return more.get(kind, 0 if re.match(r"[cmrt]\d", kind) else None)


def _parsed(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises LaunchError if it is none."""
    try:
        return tomllib.loads(read_regular(path))
    except (ValueError, RecursionError) as error:
        raise LaunchError(f"{path} is no TOML: {error}") from None


def _instance(name: str, found: Mapping[str, Any], place: str) -> Instance:
    if unknown := found.keys() - _KINDS:
        known = ", ".join(_KINDS)
        raise LaunchError(f"{place}: an instance has no field {min(unknown)!r}; known are {known}")
    values: dict[str, Any] = {key: str(value) if key == "as_of" else value for key, value in found.items()}
    for key in ("cores", "gbits"):
        if key not in values:
            raise LaunchError(f"{place}: {key} is missing; an instance has at least cores and gbits")
    for key, value in values.items():
        kind, least = _KINDS[key], key in ("cores", "gbits")
        try:
            typed(values, key, kind)
            if kind in (int, float) and (value < 0 or (least and value == 0)):
                raise ValueError
        except NO_FORMAT:
            what = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[kind]
            more = " more than 0" if least else ", 0 or more" if kind in (int, float) else ""
            raise LaunchError(f"{place}: {key} is {value!r}; expected {what}{more}") from None
    return Instance(name, **values)


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
    rows = _parsed(_HERE / "models.toml")["models"]
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
    rows = _parsed(_HERE / "models.toml")["curves"]
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
