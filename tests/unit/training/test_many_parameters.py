"""The cost per parameter of a step does not grow with the number of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from by_numpy import Array
from loopback_job import job

from ringdance.core.engine import Engine
from ringdance.core.request import ReduceOp
from ringdance.training.gradients.exchange import GradientExchange
from ringdance.training.gradients.source import DENSE

FEW, MANY = 200, 20_000
STEPS = 3
MOST = 60  # comparisons and accesses to a gradient, per parameter and step


class Counted(int):
    """A parameter index that counts how often it is compared with others."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        assert Counted.comparisons < 2 * STEPS * MANY * MOST, "too many comparisons"
        return int.__eq__(self, other)  # type: ignore[arg-type]

    __hash__ = int.__hash__


class Gradients:
    """A source with one number per parameter, which counts how often gradients are accessed."""

    advice = ""
    on_device = False

    def __init__(self, number: int) -> None:
        self.all = np.ones((number, 1), np.float32)
        self.looks = 0

    def nbytes(self, index: int) -> int:
        return 4

    def sample(self, indices: Sequence[int], names: Sequence[str]) -> tuple[list[str], Array]:
        return list(names), np.empty(0, np.float32)

    def kinds(self, computed: bytearray, indices: Sequence[int] | None = None) -> bytearray:
        chosen = range(len(computed)) if indices is None else indices
        self.looks += len(chosen)
        return bytearray(DENSE * computed[index] for index in chosen)

    def unreduced(self, computed: bytearray) -> list[int]:
        self.looks += len(computed)
        return []

    def gradient_views(self, indices: Sequence[int]) -> tuple[Array, ...]:
        self.looks += len(indices)
        return tuple(self.all[index] for index in indices)

    def send(self, call: Any, engine: Any, indices: Sequence[int], zeros: bytes, wake: bool) -> Any:
        views = self.gradient_views(indices)
        return call.submit(engine, views, views, wake=wake)

    def write_back(self, indices: Sequence[int], union: bytes) -> None:
        self.looks += len(indices)

    def close_direct(self) -> None:
        pass

    def forget(self) -> None:
        pass

    settle = forget_changed = forget


def cost(number: int, size: int, operation: ReduceOp) -> float:
    """Return how often an index is compared or a gradient is accessed, per parameter and step."""
    Counted.comparisons = 0
    indices = [Counted(index) for index in range(number)]
    groups = [tuple(indices[first : first + size]) for first in range(0, number, size)]
    names = [str(index) for index in indices]

    def program(engine: Engine) -> int:
        source = Gradients(number)
        exchange = GradientExchange(source, names, groups=groups, operation=operation, overlap=True)
        for _ in range(STEPS):
            for index in range(number - 1, -1, -1):
                exchange.on_gradient(index)
            exchange.on_backward_end()
            exchange.finish_exchange()
            exchange.on_step_end()
        assert exchange.overlap
        return source.looks

    looks = sum(job(2, program))
    return (looks + Counted.comparisons) / number / STEPS / 2


@pytest.mark.parametrize(("size", "operation"), [(MANY, ReduceOp.AVERAGE), (100, ReduceOp.SUM)])
def test_a_step_with_many_parameters(size: int, operation: ReduceOp) -> None:
    """The cost stays the same in one group and in groups of 100."""
    few, many = (cost(number, size, operation) for number in (FEW, MANY))
    assert few < MOST
    assert many < 1.5 * few
