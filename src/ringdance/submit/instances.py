"""Machine types and their prices. Each price has a date, and the data is validated when it is read."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from ringdance.errors import LaunchError
from ringdance.host.files import NO_FORMAT, read_regular, typed

_FILE = Path(__file__).with_name("instances.toml")


@dataclass(frozen=True)
class Instance:
    """A machine type.

    Attributes:
        cores: Number of physical cores.
        gbits: Advertised network bandwidth in Gbit/s.
        gpus: Number of GPUs per machine, or 0 for training on CPUs.
        gpu: GPU model.
        nvlink: Bandwidth in GB/s from one GPU to the other GPUs in the machine, 0 with PCI Express only.
        rdma: True if the GPUs communicate over RDMA instead of TCP.
        tcp_gbits: Maximum bandwidth of NCCL over TCP in Gbit/s. NCCL uses one socket and one thread per
            connection, unless NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD are set. The default was
            fitted to measured runs (see docs/explanation/plan.md).
        price: US dollars per hour, None if unknown.
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
del _KINDS["name"]  # the name is the table key or the file name


def instance(name: str) -> Instance:
    """Look up a machine type by name, or read it from a file if the name ends in .toml.

    Raises:
        LaunchError: The name is unknown, or the file is invalid.
    """
    if name.endswith(".toml"):
        return _instance(Path(name).stem, parsed(Path(name)), name)
    known = instances()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise LaunchError(
            f"--instance {name}: unknown machine type{f'; did you mean {near[0]}?' if near else '.'} Known "
            f"types: {', '.join(known)}. Describe any other machine in a file: --instance mine.toml"
        )
    return known[name]


@cache
def instances() -> dict[str, Instance]:
    """Return the machine types that are built into the package, by name."""
    tables = parsed(_FILE)
    return {name: _instance(name, tables[name], str(_FILE)) for name in tables if name != "gpus"}


def gpus_of(kind: str) -> int | None:
    """Return an EC2 instance type's number of GPUs, or None if unknown, as with other accelerators."""
    if kind in instances():
        return instances()[kind].gpus
    return parsed(_FILE)["gpus"].get(kind, 0 if re.match(r"[cmrt]\d", kind) else None)


def parsed(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises LaunchError if it is not valid TOML."""
    try:
        return tomllib.loads(read_regular(path))
    except (ValueError, RecursionError) as error:
        raise LaunchError(f"{path} is not valid TOML: {error}") from None


def _instance(name: str, found: Mapping[str, Any], place: str) -> Instance:
    if unknown := found.keys() - _KINDS:
        known = f"The fields are {', '.join(_KINDS)}"
        raise LaunchError(f"{place}: {min(unknown)!r} is not a field of a machine type. {known}")
    values: dict[str, Any] = {key: str(value) if key == "as_of" else value for key, value in found.items()}
    for key in ("cores", "gbits"):
        if key not in values:
            raise LaunchError(f"{place}: {key} is missing. A machine type needs at least cores and gbits.")
    for key, value in values.items():
        kind, least = _KINDS[key], key in ("cores", "gbits")
        try:
            typed(values, key, kind)
            if kind in (int, float) and (value < 0 or (least and value == 0)):
                raise ValueError
        except NO_FORMAT:
            what = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}[kind]
            suffix = " greater than 0" if least else " of at least 0" if kind in (int, float) else ""
            raise LaunchError(f"{place}: {key} is {value!r}; expected {what}{suffix}") from None
    return Instance(name, **values)
