"""How parts of NumPy arrays are reduced, scaled and rounded.

- Sums are computed in rank order, so the result does not depend on which rank computes it.
- float16 and bfloat16 are widened to float32, scaled, reduced, scaled again, and rounded once. Two-stage
  reductions (inside hosts, then across hosts) round once per stage.
- Averages of integers are exact and truncate toward zero, even if the sum does not fit into their type. One
  rank reduces all parts of an element in one call, because partial sums would not fit either. Sums and
  products wrap, as in NumPy. In all other cases, integers are scaled in double precision and truncated toward
  zero.
- An average of float32 or float64 is the sum divided by the number of ranks, as in NumPy.
- Complex numbers are summed, averaged and scaled as pairs of floats, which MPI and all exchanges support.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any

import ml_dtypes
import numpy as np

from ringdance.core.request import ReduceOp

# An infinity or NaN in a gradient is a valid result (loss scaling produces them on purpose). NumPy's warning
# would come from inside the engine, or break it under `python -W error`.
warnings.filterwarnings("ignore", r"(overflow|invalid value)", RuntimeWarning, r"ringdance\.core")

Array = np.ndarray[Any, Any]

_OPERATIONS: dict[ReduceOp, tuple[Any, str | None]] = {  # (NumPy ufunc, name in Transport.allreduce)
    ReduceOp.AVERAGE: (np.add, "sum"),
    ReduceOp.SUM: (np.add, "sum"),
    ReduceOp.ADASUM: (np.add, None),  # used only with a single rank, where nothing is combined
    ReduceOp.MIN: (np.minimum, "min"),
    ReduceOp.MAX: (np.maximum, "max"),
    ReduceOp.PRODUCT: (np.multiply, "product"),
}


@lru_cache(maxsize=64)
def dtype_named(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype called ``name``, which may be "bfloat16"."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


@lru_cache(maxsize=64)
def neutral_element(dtype: str, operation: ReduceOp) -> Any:
    """Return an operation's neutral element, such as 0 for Average, Sum and Adasum."""
    if operation not in (ReduceOp.MIN, ReduceOp.MAX):
        return int(operation == ReduceOp.PRODUCT)
    kind, least = dtype_named(dtype), operation == ReduceOp.MIN
    if np.issubdtype(kind, np.integer):
        return np.iinfo(kind).max if least else np.iinfo(kind).min
    return np.inf if least else -np.inf if kind != np.bool_ else False


def _copy(source: Array, out: Array) -> None:
    out[...] = source


def _widen(part: Array, factor: np.float32 | None) -> Array:
    widened: Array = part.astype(np.float32)
    if factor is not None:
        widened *= factor
    return widened


def _average_integers(parts: Sequence[Array], divisor: int, out: Array) -> None:
    """Average exactly and truncate toward zero, even if the sum does not fit into 64 bits."""
    if out.itemsize < 8:
        total = parts[0].astype(np.int64)
        for part in parts[1:]:
            total += part
        total += (total >> 63) & (divisor - 1)  # rounds negative totals toward zero
        out[...] = total // divisor
        return
    quotient, total, rest = np.empty_like(out), np.zeros_like(out), np.zeros_like(out)
    for part in parts:  # the final sums of quotients and remainders fit, even if intermediate sums wrap
        np.floor_divide(part, divisor, quotient)
        total += quotient
        quotient *= divisor
        rest += part
        rest -= quotient
    np.floor_divide(rest, divisor, quotient)
    total += quotient
    quotient *= divisor
    np.add(total, (total < 0) & (rest != quotient), out)


def _scale_integers(source: Array, factor: float, out: Array) -> None:
    out[...] = np.trunc(source.astype(np.float64) * factor).astype(out.dtype)


class Reduction:
    """How a kind of batch is reduced: dtype, operation, scale factors and number of ranks.

    Args:
        dtype, operation, prescale, postscale, size: Values from the request. Averages divide by ``size``. A
            complex dtype is replaced by the dtype of its parts.
        weights: Weight of each part, for a weighted sum of 16-bit floats. Empty for none.

    Attributes:
        pairs: True if the request's numbers are complex: each consists of two numbers of ``dtype``.
        identity: True if the exchange need not scale inputs before the sum, because prescale is 1 or
            ``combine`` applies it (to 16-bit floats, in float32, so that they are rounded only once).
        deliver: Copies the result of ``combine`` to the caller's memory, and scales it if ``late``.
        simple: True if reducing two parts takes a single call to ``ufunc``.
        late: True if results are scaled while they are copied out (float32, float64). Otherwise the rank
            that reduces a block also scales it.
        one_stage: True if all parts of an element must be reduced in one call: averages of integers.
        mpi_op: Name of the equivalent MPI operation. None for 16-bit floats and bool, for averages of
            integers, for Min and Max of floats (MPI's comparisons drop NaN), and for sums of 8- and 16-bit
            integers, which saturate if Open MPI uses AVX and wrap otherwise.
    """

    def __init__(
        self, dtype: np.dtype[Any], operation: ReduceOp, prescale: float, postscale: float, size: int,
        weights: Sequence[float] = (),
    ):
        self.pairs = dtype.kind == "c"
        if self.pairs:
            dtype = np.dtype(f"f{dtype.itemsize // 2}")
        self.dtype, self.operation = dtype, operation
        self.wide = dtype.itemsize == 2 and not np.issubdtype(dtype, np.integer)
        self.prescale, self.postscale, self.size = prescale, postscale, size
        self._factors: Iterable[np.float32 | None] = tuple(map(np.float32, weights)) or repeat(
            None if prescale == 1.0 else np.float32(prescale)
        )
        self.identity = prescale == 1.0 or self.wide
        self.ufunc, mpi_op = _OPERATIONS[operation]
        drops_nan = dtype.kind == "f" and operation in (ReduceOp.MIN, ReduceOp.MAX)
        divisor = size if operation == ReduceOp.AVERAGE else 1
        self.plain = divisor == 1 and postscale == 1.0
        self._integer = np.issubdtype(dtype, np.integer)
        self.one_stage = self._integer and divisor > 1
        self._sums_wide = self.wide or self.one_stage
        saturates = self._integer and dtype.itemsize < 4 and operation == ReduceOp.SUM
        other = self._sums_wide or dtype == np.bool_ or drops_nan or saturates
        self.mpi_op = None if other else mpi_op
        self._set_finish(divisor, postscale)
        self.late = not (self.wide or self._integer or self.plain)
        self.simple = self.identity and not self.wide and (self.late or self.plain)
        # Bound once, so that each copy takes a single call. A step makes up to a thousand copies.
        self.deliver: Callable[[Array, Array], Any] = self._finish if self.late else _copy

    def _set_finish(self, divisor: int, postscale: float) -> None:
        kind = np.float32 if self.wide else self.dtype.type
        self._finish: Callable[[Array, Array], Any]
        if self.plain:
            self._finish = _copy
        elif self._integer:
            self._finish = lambda source, out: _scale_integers(source, postscale / divisor, out)
        elif postscale == 1.0 and divisor & (divisor - 1):
            number = kind(divisor)
            self._finish = lambda source, out: np.divide(source, number, out)
        else:  # for a power of two, the reciprocal is exact, and multiplying is several times faster
            factor = kind(postscale / divisor)
            self._finish = lambda source, out: np.multiply(source, factor, out)

    def prepare(self, source: Array, out: Array) -> None:
        """Copy ``source`` to ``out``, which has the same dtype. Apply prescale unless ``identity``."""
        if self.identity:
            out[...] = source
        elif self._integer:
            _scale_integers(source, self.prescale, out)
        else:
            np.multiply(source, self.dtype.type(self.prescale), out=out)

    def combine(self, parts: Sequence[Array], out: Array) -> None:
        """Reduce ``parts`` (in rank order) into ``out``, and scale the result unless ``late``."""
        if self._sums_wide:
            if self.one_stage:
                if self.postscale == 1.0:
                    _average_integers(parts, self.size, out)
                else:
                    self._finish(np.add.reduce(parts, dtype=np.float64), out)
                return
            widened = map(_widen, parts, self._factors)
            total = next(widened)
            for part in widened:
                self.ufunc(total, part, out=total)
            if not self.plain:
                self._finish(total, total)
            out[...] = total
            return
        if len(parts) == 1:
            out[...] = parts[0]
        else:
            self.ufunc(parts[0], parts[1], out=out)
            for part in parts[2:]:
                self.ufunc(out, part, out=out)
        if not self.late and not self.plain:
            self._finish(out, out)

    def complete(self, total: Array) -> None:
        """Scale a sum in place, as ``combine`` scales its result."""
        if not self.late and not self.plain:
            self._finish(total, total)

    def alone(self, source: Array, out: Array) -> None:
        """Reduce the data of a single rank: copy ``source`` to ``out``, and scale it if necessary."""
        if self.prescale == 1.0 and self.plain:
            if out is not source:
                out[...] = source
            return
        scratch = np.empty_like(source)
        self.prepare(source, scratch)
        self.combine([scratch], scratch)
        self.deliver(scratch, out)


@lru_cache(maxsize=1024)
def reduction(dtype: str, operation: ReduceOp, prescale: float, postscale: float, size: int) -> Reduction:
    """Return the (cached) ``Reduction`` for these parameters."""
    return Reduction(dtype_named(dtype), operation, prescale, postscale, size)


@lru_cache(maxsize=1024)
def two_stages(how: Reduction, members: int, host_sizes: tuple[int, ...]) -> tuple[Reduction, Reduction]:
    """Split a reduction over all ranks into two stages: inside each host, then across hosts.

    For averages of 16-bit floats, the first stage returns the host's mean, which stays in range even if the
    sum would not. Across hosts, the means are weighted by the number of ranks. For all other reductions, the
    first stage returns the host's partial result.

    Args:
        how: Reduction over all ranks.
        members: Number of ranks on this host.
        host_sizes: Number of ranks on each host.
    """
    mean = how.wide and how.operation == ReduceOp.AVERAGE
    first = ReduceOp.SUM if how.operation == ReduceOp.AVERAGE and not mean else how.operation
    total = sum(host_sizes)
    return (
        Reduction(how.dtype, first, how.prescale, 1.0, members),
        Reduction(how.dtype, ReduceOp.SUM, 1.0, how.postscale, 1, [size / total for size in host_sizes])
        if mean
        else Reduction(how.dtype, how.operation, 1.0, how.postscale, how.size),
    )
