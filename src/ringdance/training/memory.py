"""View a framework's memory as NumPy arrays."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np


def array_at(address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: Any = None) -> Any:
    """Return a writable array over existing memory. The array keeps the memory's ``owner`` alive."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    memory.owner = owner
    return np.ndarray(shape, dtype, memory)
