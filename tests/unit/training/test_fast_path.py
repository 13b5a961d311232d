"""Gradients of different steps on the fast path: all ranks raise the same error, none without reason."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from by_numpy import FLOATS, Array, dtype_of
from loopback_job import job
from sampled import sampled

from ringdance.core.engine import Engine
from ringdance.core.exchange.arithmetic import Reduction, reduction, two_stages
from ringdance.core.request import Collective, ReduceOp
from ringdance.errors import MismatchError
from ringdance.settings import Settings
from ringdance.training.collectives import Call, join
from ringdance.training.gradients.exchange import STEPS, GradientExchange, Mode
from ringdance.training.gradients.fast_path import DifferentStepsError, FastPath
from ringdance.training.gradients.overlap import OVERLAP
from ringdance.training.gradients.source import DENSE
from ringdance.training.process_sets import add_process_set

AVERAGE = ReduceOp.AVERAGE
Average = Callable[[list[Array], Array], None]


class Gradients:
    """A source whose parameters have one gradient each, of three elements."""

    advice = "broadcast them"

    def __init__(self, dtype: str) -> None:
        self.view = np.ones(3, dtype_of(dtype))

    def sample(self, indices: Sequence[int], names: Sequence[str]) -> tuple[list[str], Array]:
        return list(names), np.empty(0, np.float32)

    def kinds(self, computed: bytearray, indices: Sequence[int] | None = None) -> bytearray:
        chosen = range(len(computed)) if indices is None else indices
        return bytearray(DENSE * computed[index] for index in chosen)

    def unreduced(self, computed: bytearray) -> list[int]:
        return []

    def forget(self) -> None:
        pass

    settle = forget_changed = forget

    def gradient_views(self, indices: Sequence[int]) -> tuple[Array, ...]:
        return (self.view,) * len(indices)

    def buffers(self, indices: Sequence[int], zeros: bytes) -> tuple[Array, ...]:
        return (self.view,) * len(indices)

    on_device = False

    def send(self, call: Any, engine: Any, indices: Sequence[int], zeros: bytes, wake: bool) -> Any:
        views = self.buffers(indices, zeros)
        return call.submit(engine, views, views, wake=wake)

    def close_direct(self) -> None:
        pass

    def write_back(self, indices: Sequence[int], union: bytes) -> None:
        pass

    def nbytes(self, index: int) -> int:
        return self.view.nbytes


class Job:
    """Stands for a call: averages this rank's tag with the others' tags."""

    def __init__(self, others: list[Array], average: Average) -> None:
        self.others, self.average = others, average

    def submit(self, engine: Any, sent: tuple[Array, ...], outputs: tuple[Array, ...]) -> Job:
        self.average([*self.others, sent[-1].copy()], outputs[-1])
        return self

    def wait(self) -> None:
        pass


def reduced(how: Reduction, parts: list[Array], out: Array) -> None:
    prepared = []
    for part in parts:
        scaled = np.empty_like(part)
        how.prepare(part, scaled)
        prepared.append(scaled)
    how.combine(prepared, out)
    how.deliver(out.copy(), out)


def averages(dtype: str, size: int) -> list[Average]:
    """Return averages on one host, with and without predivide, and as two hosts compute them."""
    ways = [
        lambda parts, out, scale=scale: reduced(
            reduction(dtype, AVERAGE, 1 / scale, scale, size), parts, out
        )
        for scale in (1.0, 3.0)
    ]
    sizes = (size // 3 + 1, size - size // 3 - 1)
    if sizes[1]:

        def by_hosts(parts: list[Array], out: Array) -> None:
            how, means = reduction(dtype, AVERAGE, 1.0, 1.0, size), []
            for members, some in zip(sizes, (parts[: sizes[0]], parts[sizes[0] :]), strict=True):
                inside, across = two_stages(how, members, sizes)
                means.append(np.empty_like(out))
                inside.combine(some, means[-1])
            across.combine(means, out)
            across.deliver(out.copy(), out)

        ways.append(by_hosts)
    return ways


def fast_path_of(dtype: str) -> FastPath:
    return FastPath(None, Gradients(dtype), Call(Collective.ALLREDUCE, ""))  # type: ignore[arg-type]


def tag_of(dtype: str, step: int) -> Array:
    return fast_path_of(dtype)._tag(dtype_of(dtype), step)


def outcome(dtype: str, step: int, others: list[Array], average: Average) -> bool:
    """Return True if a rank in this step detects that others are in a different step."""
    path = fast_path_of(dtype)
    path.update(bytes([DENSE]), True, True)
    path._call = Job(others, average)  # type: ignore[assignment]
    path.update(bytes([DENSE]), True, True)
    assert path.update(bytes([DENSE]), True, True)
    try:
        assert path.exchange(bytearray([1]), step)
    except DifferentStepsError:
        return True
    return False


BEHIND = list(product([*FLOATS, "int8"], [2, 3, 5, 7, 8, 13, 129, 1000]))


@pytest.mark.parametrize("case", sampled("a rank behind", BEHIND, 12), ids=str)
def test_every_rank_sees_that_one_is_behind(case: tuple[str, int]) -> None:
    """All ranks notice, however many have joined and add zeros, and however averages are rounded."""
    dtype, size = case
    nothing = np.zeros_like(tag_of(dtype, 0))
    for average in averages(nothing.dtype.name, size):
        for step in (0, 6, 7, STEPS - 1):
            here, ahead = tag_of(dtype, step), tag_of(dtype, (step + 1) % STEPS)
            for joined in {0, min(1, size - 2), size // 2 - 1, size - 2}:
                rest = size - joined - 2  # other ranks that are ahead
                zeros = [nothing] * joined
                assert outcome(dtype, step, [*zeros, *[ahead] * (rest + 1)], average)
                assert outcome(dtype, (step + 1) % STEPS, [*zeros, here, *[ahead] * rest], average)
                assert not outcome(dtype, step, [*zeros, *[here] * (rest + 1)], average)
            assert not outcome(dtype, step, [nothing] * (size - 1), average)


APART = list(product(["bfloat16", "float32"], [None, "aabbb", "abababab"]))


@pytest.mark.parametrize("case", sampled("different steps", APART, 2), ids=str)
def test_different_steps_raise_on_all_ranks(case: tuple[str, str | None]) -> None:
    dtype, hosts = case
    size = len(hosts or "12345")

    def program(engine: Engine) -> str:
        exchange = GradientExchange(Gradients(dtype), ["weight"])
        for _ in range(STEPS - 1):
            exchange.on_gradient(0)
            exchange.on_backward_end()
            exchange.on_step_end()
        assert exchange.mode is Mode.FAST
        if engine.rank != size - 2:
            exchange.on_step_end()
        exchange.on_gradient(0)
        with pytest.raises(MismatchError, match="different steps") as raised:
            exchange.on_backward_end()
        return str(raised.value).split("is in step ")[1].split(". ")[0]

    messages = job(size, program, hosts=hosts)
    assert set(messages) == {
        "247, and ranks are at different steps: 0, 7 (modulo 8)",
        "0, and ranks are at different steps: 0, 7 (modulo 8)",
    }


def test_ranks_that_have_joined_are_in_no_step() -> None:
    def program(engine: Engine) -> None:
        source = Gradients("float16")
        exchange = GradientExchange(source, ["weight"])
        for step in range(20):
            if engine.rank == 4 and step == 10:
                break
            source.view[:] = 5.0
            exchange.on_gradient(0)
            exchange.on_backward_end()
            assert source.view.tolist() == [5.0 if step < 10 else 4.0] * 3
            exchange.on_step_end()
        join(engine)

    job(5, program)


@pytest.mark.parametrize("seed", range(4))
def test_ranks_choose_overlap_between_different_steps(seed: int) -> None:
    """Ranks see a new value up to two steps late. The fast path stays equal on all and opens again."""
    luck = random.Random(seed)
    seen = {(rank, at): luck.randrange(3) for rank in range(3) for at in range(12, 140, 8)}

    def program(engine: Engine) -> list[tuple[bool, ...]]:
        source = Gradients("float32")
        exchange = GradientExchange(source, ["weight"], overlap=engine.rank == 1)
        path, states = exchange._fast_path, []
        for step in range(150):
            for at in range(12, 140, 8):
                if step == at + seen[engine.rank, at]:
                    exchange.choose_overlap(bool(at // 8 % 2))
            source.view[:] = engine.rank
            exchange.on_gradient(0)
            exchange.on_backward_end()
            assert source.view.tolist() == [1.0] * 3
            exchange.on_step_end()
            states.append((exchange.overlap, exchange.mode is Mode.FAST, path._in_a_row, path._backoff))
        return states

    first, *others = job(3, program, Settings(deadlock_time=3.0))
    assert others == [first, first]
    assert {state[:2] for state in first} == {(False, True), (False, False), (True, False)}
    assert first[-1][:2] == (False, True) or first[-1][0]
    assert max(state[3] for state in first) <= 8


def test_a_tuner_leaves_the_overlap_of_other_sets() -> None:
    def program(engine: Engine) -> tuple[bool, ...]:
        some = add_process_set([0, 1])
        ours = [GradientExchange(Gradients("float32"), [name]) for name in "ab"]
        if engine.rank < 2:
            ours.append(GradientExchange(Gradients("float32"), ["c"], process_set=some))
        assert OVERLAP.get() == 0
        OVERLAP.set(1)
        assert OVERLAP.get() == 1
        return tuple(exchange.wants_overlap for exchange in ours)

    assert job(3, program) == [(True, True, False)] * 2 + [(True, True)]


def test_a_process_set_has_another_number_after_a_restart() -> None:
    """The exchange continues with the same ranks."""
    exchanges: dict[int, GradientExchange] = {}

    def step(rank: int) -> None:
        exchange = exchanges[rank]
        exchange.source.view[:] = rank
        exchange.on_gradient(0)
        exchange.on_backward_end()
        assert exchange.source.view.tolist() == [0.5] * 3
        exchange.on_step_end()

    def before(engine: Engine) -> None:
        pair = [add_process_set([0, 1]), add_process_set([1, 2])][0]
        if engine.rank < 2:
            exchanges[engine.rank] = GradientExchange(Gradients("float32"), ["a"], process_set=pair)
            step(engine.rank)

    def after(engine: Engine) -> None:
        for ranks in ([1, 2], [0, 1]):
            add_process_set(ranks)
        if engine.rank < 2:
            step(engine.rank)
            assert exchanges[engine.rank].set_id == 2

    job(3, before)
    job(3, after)
