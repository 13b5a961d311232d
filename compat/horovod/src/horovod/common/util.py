"""Small helpers for scripts and libraries. They check at run time what Horovod decides at compile time."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ringdance.training import basics

__all__ = [
    "ccl_built", "check_extension", "cuda_built", "ddl_built", "env", "extension_available", "gloo_built",
    "gpu_available", "is_iterable", "is_version_greater_equal_than", "mpi_built", "nccl_built",
    "num_rank_is_power_2", "rocm_built", "split_list",
]

T = TypeVar("T")

_FRAMEWORKS = ("torch", "tensorflow", "mxnet")


def _cache(function: Callable[..., T]) -> Callable[..., T]:
    """Cache a function's results. Its arguments must be hashable."""
    return functools.cache(function)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return True if ``horovod.<ext_base_name>`` works here. For "torch", this needs PyTorch."""
    framework = ext_base_name.rpartition(".")[2]
    available = framework in _FRAMEWORKS and importlib.util.find_spec(framework) is not None
    if verbose:
        print(f"horovod.{ext_base_name} is {'' if available else 'not '}available")
    return available


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError unless the framework of ``ext_name`` ("horovod.torch") can be used.

    The other arguments concern the original's compiled library and have no effect.
    """
    name = ext_name.removeprefix("horovod.")
    if not extension_available(name):
        raise ImportError(
            f"{ext_name} is not available: {name} is not installed, or Ringdance has no binding for it."
        )


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return True if the framework sees a GPU."""
    if not extension_available(ext_base_name, verbose):
        return False
    framework = ext_base_name.rpartition(".")[2]
    if framework == "torch":
        return bool(importlib.import_module("torch").cuda.is_available())
    if framework == "mxnet":
        return bool(importlib.import_module("mxnet").context.num_gpus())
    return bool(importlib.import_module("tensorflow").config.list_physical_devices("GPU"))


def mpi_built(verbose: bool = False) -> bool:
    """Return True: MPI is the transport between processes."""
    return basics.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """Return True if ``HOROVOD_RANK`` is set, because scripts then expect Gloo. Gloo itself is not used."""
    return basics.gloo_built()


def nccl_built(verbose: bool = False) -> bool:
    """Return True if NCCL exchanges PyTorch's GPU tensors."""
    return extension_available("torch") and bool(importlib.import_module("horovod.torch").nccl_built())


def ddl_built(verbose: bool = False) -> bool:
    """Return False."""
    return basics.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """Return False."""
    return basics.ccl_built()


def cuda_built(verbose: bool = False) -> bool:
    """Return False: nothing here is compiled for CUDA."""
    return basics.cuda_built()


def rocm_built(verbose: bool = False) -> bool:
    """Return False."""
    return basics.rocm_built()


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables (``None`` removes one), and restore the previous values at the end."""
    former = {name: os.environ.get(name) for name in kwargs}
    _set(kwargs)
    try:
        yield
    finally:
        _set(former)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def split_list(l: Sequence[T], n: int) -> list[list[T]]:  # noqa: E741  # the parameter's public name
    """Return ``n`` lists of nearly equal length with the elements in order. The first ones are longer."""
    short, more = divmod(len(l), n)
    ends = [part * short + min(part, more) for part in range(n + 1)]
    return [list(l[start:end]) for start, end in itertools.pairwise(ends)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return True if the number is a power of two (1, 2, 4, 8, ...)."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(x: Any) -> bool:
    """Return True if ``iter(x)`` works."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return True if version ``ver`` is at least ``target``. A missing third number counts as 0.

    Raises:
        ValueError: One of them is not a version such as "1.2.3".
    """
    return _release(ver) >= _release(target)


def _release(version: str) -> tuple[int, int, int]:
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if found is None:
        raise ValueError(f"{version!r} is not a version such as 1.2.3.")
    return int(found[1]), int(found[2]), int(found[3] or 0)
