"""Start jobs with the function ``run``, or with ``horovodrun`` in ``horovod.runner.launch``."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod.runner.options import DEFAULTS, check
from horovod.runner.request import order_of, tell
from ringdance.launch.api import call, command_of_call

__all__ = ["run"]

_RENAMED = {"np": "num_proc", "min_np": "min_num_proc", "max_np": "max_num_proc"}


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` in ``num_proc`` new processes. Return the results by rank.

    The other parameters are the ``horovodrun`` options of the same name. ``slots`` is ``--slots-per-host``.
    ``executable`` is the Python to use. ``np``, ``min_np``, ``max_np`` and ``network_interface`` are
    deprecated names.

    Raises:
        ValueError: Parameters are mutually exclusive, or a value cannot be used.
        RuntimeError: The job could not start, or a process failed. The message has its rank and traceback.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    for old, new in {**_RENAMED, "network_interface": "network_interfaces"}.items():
        if old in given:
            warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=2)
            given[new] = given.pop(old)
    for one, other in (("hosts", "hostfile"), ("use_gloo", "use_mpi")):
        if given.get(one) and given.get(other):
            raise ValueError(f"{one} and {other} exclude one another: pass only one of them")
    options = argparse.Namespace(**{**DEFAULTS, **{k: v for k, v in given.items() if k in DEFAULTS}})
    if "network_interfaces" in given:
        names = given["network_interfaces"]
        options.nics = set(names.split(",") if isinstance(names, str) else names) - {""}
    check(options)
    order = order_of(options, command_of_call(executable))
    tell(options, order, lambda line: print(f"horovod.run: {line}", file=sys.stderr))
    return call(order, func, args, kwargs)
