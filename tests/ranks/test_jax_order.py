"""The order of exchanges in compiled programs: within one, between several in flight, with unused results.

Unnamed exchanges match by order, so the tests identify each exchange by its data.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from other_settings import other_settings

import ringdance.jax as hvd
from ringdance.jax import _private, device, exchange, programs

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
total = partial(hvd.allreduce, op=hvd.Sum)
Seen = list[float]


BY_NCCL = os.environ.get("TEST_NCCL") == "double"


@pytest.fixture(params=["nccl"] if BY_NCCL else ["quick", "tokens", "callback"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Select how programs start: without tokens, with tokens, or through JAX's callbacks."""
    if request.param == "tokens":
        monkeypatch.setattr(programs, "_may_be_quick", lambda *_: False)
    if request.param != "callback":
        yield request.param
        return
    with other_settings({"RINGDANCE_JAX_FFI": "off"}):
        yield request.param


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Record the first number of each exchange in the order in which exchanges are carried out."""
    if SIZE == 1:
        pytest.skip("one rank exchanges nothing")
    results: Seen = []
    original = exchange.run

    def run(what: Any, inputs: Any, *rest: Any) -> Any:
        results.append(float(inputs[0].reshape(-1)[0]))
        time.sleep(0.001 * (RANK + 1))  # gives other exchanges time to overtake
        return original(what, inputs, *rest)

    def submit(call: Any, inputs: Any, *rest: Any) -> Any:
        results.append(float(memory(inputs[0].address, 4).view(np.float32)[0]))
        return original_submit(call, inputs, *rest)

    if BY_NCCL:
        from nccl_double import memory

        original_submit = device._submit
        monkeypatch.setattr(device, "_submit", submit)
    monkeypatch.setattr(exchange, "run", run)
    return results


# XLA cannot start such a program with its token, and an error stays in the token.
needs_no_token = pytest.mark.skipif(BY_NCCL, reason="programs for GPUs have tokens")


def late(x: Any) -> Any:
    """Return zero, after some computation. Not a matrix product, because some crash XLA in JAX 0.9.2."""
    return jax.lax.fori_loop(0, 20, lambda _, y: jnp.sin(y), jnp.full(90_000, 1e-9) * x).sum() * 0


def jit(function: Callable[..., Any]) -> Any:
    """Compile again, whatever was compiled before."""
    return jax.jit(lambda *values: function(*values))


@pytest.mark.usefixtures("way")
def test_calls_that_are_ready_late_are_not_overtaken(seen: Seen) -> None:
    def many(x: Any) -> Any:
        return [total(number + (late(x) if number % 2 == 0 else 0 * x)) for number in range(12)]

    for _ in range(3):
        result = jit(many)(jnp.float32(1))
        assert [float(value) for value in result] == [SIZE * number for number in range(12)]
    assert seen == list(range(12)) * 3


@pytest.mark.usefixtures("way")
def test_order_through_loops_branches_and_nested_functions(seen: Seen) -> None:
    nested = jax.jit(lambda x: (total(x), total(x + 1))[0])  # the second result is not used
    again = jax.checkpoint(lambda x: total(x) ** 2)

    def everything(x: Any) -> Any:
        total(late(x))
        x = jax.lax.fori_loop(0, 2, lambda turn, x: (total(1.0 + turn), x)[1], x)
        nested(3.0 + 0 * x)
        jax.lax.cond(x > 0, lambda: (total(late(x) + 5), None)[1], lambda: (total(x - 100), None)[1])
        nested(6.0 + 0 * x)
        slope = jax.grad(again)(8 + 0 * x)
        total(11 + 0 * x)
        return x, slope

    x, slope = jit(everything)(jnp.float32(1))
    assert (float(x), float(slope)) == (1, 2 * 8 * SIZE * SIZE)
    jax.block_until_ready(jit(everything)(jnp.float32(1)))
    programs.settle()
    once = [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert seen[: len(once)] == once
    assert seen[-1] == 11
    assert seen[: len(seen) // 2] * 2 == seen
    assert len(set(hvd.allgather_object(tuple(seen)))) == 1


@pytest.mark.usefixtures("way")
def test_programs_in_flight_exchange_in_the_order_of_their_calls(seen: Seen) -> None:
    """Neither a small program nor a call outside programs overtakes a large program."""
    large, small = jit(lambda x: total(x + late(x))), jit(total)
    # Created beforehand, because creating one is itself a program that waits for earlier programs.
    values = jax.block_until_ready([jnp.float32(number) for number in range(1, 10)])
    for _ in range(5):
        ways = [large, small, total] * 3
        results = [function(value) for function, value in zip(ways, values, strict=True)]
        assert [float(array) for array in results] == [SIZE * number for number in range(1, 10)]
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8, 9] * 5


@pytest.mark.usefixtures("way")
def test_two_programs_and_their_results_may_be_dropped(seen: Seen) -> None:
    def unused(x: Any) -> Any:
        total(x)
        jax.jit(total)(x + 1)
        return x

    compiled = jit(unused)
    for _ in range(3):
        compiled(jnp.float32(1))
        jit(lambda x: (total(x + late(x)), None)[1])(jnp.float32(3))
    hvd.barrier()
    assert seen == [1, 2, 3] * 3


def test_ways_may_be_mixed(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program with tokens and one without keep the order of their calls."""
    quick = jit(lambda x: total(x + late(x)))
    quick(1.0).block_until_ready()
    with monkeypatch.context() as patch:
        patch.setattr(programs, "_may_be_quick", lambda *_: False)
        slow = jit(lambda x: total(x + late(x)))
        slow(2.0).block_until_ready()
    values = jax.block_until_ready([jnp.float32(number) for number in range(3, 9)])
    results = [function(value) for value in values for function in (quick, slow)]
    assert [float(array) for array in results] == [SIZE * number for number in range(3, 9) for _ in range(2)]
    assert seen == [1, 2, *[number for number in range(3, 9) for _ in range(2)]]


@needs_no_token
def test_programs_compiled_ahead_can_be_called_again() -> None:
    """JAX passes their tokens to the first call only, so these programs must not have tokens."""
    ahead = jax.jit(total).lower(jnp.zeros(4)).compile()
    for number in range(3):
        assert ahead(jnp.full(4, number * 1.0)).tolist() == [SIZE * number] * 4


def test_literals_keys_and_no_arguments() -> None:
    table = np.arange(1000.0, dtype=np.float32)
    result = jit(lambda: total(jnp.asarray(table)))()
    np.testing.assert_array_equal(result, SIZE * table)

    def noise(key: Any) -> Any:
        return key, total(jax.random.uniform(key)), None, 3

    key, value, _, three = jit(noise)(jax.random.key(1))
    assert jnp.array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(1)))
    assert float(value) == pytest.approx(SIZE * float(jax.random.uniform(jax.random.key(1))))
    assert three == 3


def test_donated_memory_is_used_again() -> None:
    step = jax.jit(lambda x, y: (total(x) / SIZE + 1, y), donate_argnums=0)
    x, y = jnp.zeros(10_000), jnp.ones(3)
    for _ in range(5):
        before = x
        x, y = step(x, y)
        assert before.is_deleted()
    assert x.tolist() == [5.0] * 10_000


@needs_no_token
@pytest.mark.ranks(2, 3, 4)
def test_an_error_in_a_program_in_flight_does_not_reach_the_next() -> None:
    bad, good = jit(lambda x: total(x + late(x[0]))), jit(lambda x: total(x + late(x)))
    good(1.0).block_until_ready()
    started = [bad(jnp.ones(2 + (RANK == 0))), good(2.0)]
    with pytest.raises(jax.errors.JaxRuntimeError, match="MismatchError"):
        started[0].block_until_ready()
    assert float(started[1]) == 2 * SIZE


@pytest.mark.parametrize("known", [True, False])
def test_constants_are_exchanged_when_the_program_runs(
    seen: Seen, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Constants are not exchanged during tracing. An untaken branch exchanges nothing, a loop every round."""
    if not known:
        monkeypatch.setattr(_private, "no_trace", bool)
    constant = jnp.float32(RANK + 1)
    assert float(jax.lax.cond(RANK < 0, lambda: total(constant), lambda: constant)) == RANK + 1
    jax.effects_barrier()
    assert seen == []
    loop = jax.jit(lambda: jax.lax.fori_loop(0, 3, lambda _, carry: carry + total(constant), 0.0))
    assert [float(loop()) for _ in range(2)] == [3 * SIZE * (SIZE + 1) / 2] * 2
    assert seen == [RANK + 1] * 6
    # Next to a differentiated value, an eager call may gather any number of rows.
    result = jax.grad(lambda x: x * float(hvd.allgather(jnp.full(RANK + 1, 2.0)).sum()))(1.0)
    assert float(result) == SIZE * (SIZE + 1)


def test_programs_are_traced_again_at_another_size() -> None:
    """A one-process program contains no exchange, so it is traced again in a larger job, and vice versa."""
    program = jax.jit(lambda x: (total(x), hvd.allgather(x)))
    mean = jax.jit(hvd.allreduce)
    for comm in (None, [RANK], None):
        hvd.shutdown()
        hvd.init(comm)
        assert hvd.size() == (SIZE if comm is None else 1)
        ranks = list(range(1, SIZE + 1)) if comm is None else [RANK + 1]
        result, gathered = program(jnp.full(1, RANK + 1.0))
        assert (float(result[0]), gathered.tolist()) == (sum(ranks), ranks)
        assert float(mean(RANK + 1.0)) == sum(ranks) / len(ranks)
