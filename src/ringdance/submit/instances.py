"""Kinds of machines, with their prices: dated data, checked when read."""

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
    """A kind of machine.

    Attributes:
        cores: physical ones.
        gbits: of its network, Gbit/s, as it is sold.
        gpus: in a machine; 0: it trains on CPUs.
        gpu: their name.
        nvlink: GB/s that a GPU can send to the others of its machine; 0 where they have PCI Express only.
        rdma: whether GPUs use the network without TCP.
        tcp_gbits: what NCCL gets over TCP at most, Gbit/s. It has one socket and one thread for a connection,
            unless NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD say more; fitted, see docs/howto/troubleshooting/plan.md.
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
        return _instance(Path(name).stem, parsed(Path(name)), name)
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
    rows = parsed(_FILE).items()
    return {name: _instance(name, found, str(_FILE)) for name, found in rows if name != "gpus"}


def gpus_of(kind: str) -> int | None:
    """Return the GPUs of a machine by its type at EC2; None: not known, or it has other accelerators."""
    if kind in instances():
        return instances()[kind].gpus
    more: dict[str, int] = parsed(_FILE)["gpus"]
    return more.get(kind, 0 if re.match(r"[cmrt]\d", kind) else None)


def parsed(path: Path) -> dict[str, Any]:
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
