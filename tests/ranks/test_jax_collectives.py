"""Collectives on JAX arrays: eagerly, in jit, grad and control flow, by XLA's interface and by callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from other_settings import other_settings

import ringdance.jax as hvd
from ringdance.core.request import Collective
from ringdance.errors import ArgumentError, MismatchError
from ringdance.jax import ffi, operations
from ringdance.training.collectives import Call

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
Wrap = Callable[[Any], Any]


@pytest.fixture(scope="module", params=["eager", "jit", "callback"])
def wrap(request: pytest.FixtureRequest) -> Iterator[Wrap]:
    """Select how a function of arrays runs. Each wrapped function is compiled again."""
    if request.param == "callback":
        with other_settings({"RINGDANCE_JAX_FFI": "off"}):
            yield lambda function: jax.jit(lambda *values: function(*values))
    else:
        assert ffi.available()
        yield jax.jit if request.param == "jit" else lambda function: function


def mine(rank: int = RANK, rows: int = 2 * SIZE) -> Any:
    return jnp.arange(rows * 3.0).reshape(rows, 3) * (rank + 1) + rank


def everyone() -> list[np.ndarray[Any, Any]]:
    return [np.asarray(mine(rank)) for rank in range(SIZE)]


def same(found: Any, expected: Any) -> None:
    assert found.shape == np.shape(expected)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=1e-6)


def test_values(wrap: Wrap) -> None:
    total = sum(everyone())
    same(wrap(hvd.allreduce)(mine()), total / SIZE)
    scales = {"prescale_factor": 2.0, "postscale_factor": 0.5}
    same(wrap(lambda x: hvd.allreduce(x, op=hvd.Sum, **scales))(mine()), total)
    same(wrap(lambda x: hvd.allreduce(x, op=hvd.Max, name="largest"))(mine()), np.max(everyone(), axis=0))
    same(wrap(hvd.allgather)(mine()), np.concatenate(everyone()))
    for root in range(SIZE):
        same(wrap(lambda x, root=root: hvd.broadcast(x, root))(mine()), everyone()[root])
    pieces = [array[2 * RANK : 2 * RANK + 2] for array in everyone()]
    same(wrap(hvd.alltoall)(mine()), np.concatenate(pieces))
    same(wrap(lambda x: hvd.reducescatter(x, op=hvd.Sum))(mine()), total[2 * RANK : 2 * RANK + 2])
    same(wrap(hvd.allreduce)(jnp.float32(RANK)), (SIZE - 1) / 2)


def test_all_types_in_one_group(wrap: Wrap) -> None:
    kinds = ["float32", "bfloat16", "float16", "int32", "uint8"]
    values = [jnp.full((5,), RANK + 1).astype(kind) for kind in kinds]
    done = wrap(lambda *all_: hvd.grouped_allreduce(all_, op=hvd.Sum))(*values)
    for kind, item in zip(kinds, done, strict=True):
        assert item.dtype == kind
        same(item, np.full(5, SIZE * (SIZE + 1) // 2))
    truth = jnp.array([RANK == 0, True])
    assert wrap(lambda x: hvd.allreduce(x, op=hvd.Min))(truth).tolist() == [SIZE == 1, True]
    compressed = wrap(lambda x: hvd.allreduce(x, compression=hvd.Compression.bf16))(mine())
    np.testing.assert_allclose(compressed, sum(everyone()) / SIZE, rtol=2e-2)


def test_gradients(wrap: Wrap) -> None:
    """Gradients are as in the torch and TensorFlow bindings: averaged, or reduced by the call's operation."""
    weight = jnp.float32(RANK + 1)
    mean = (SIZE + 1) / 2
    like = np.ones((2 * SIZE, 3))

    def gradient(function: Callable[[Any], Any]) -> Any:
        return wrap(jax.grad(lambda x: (function(x) * weight).sum()))(mine())

    same(gradient(hvd.allreduce), mean * like)
    same(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, name="sum")), mean * SIZE * like)
    same(gradient(hvd.allgather), mean * like)
    same(gradient(lambda x: hvd.broadcast(x, 0)), mean * like * (RANK == 0))
    blocks = np.repeat(np.arange(SIZE) + 1, 2)[:, None] * like
    same(gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum)), SIZE * blocks)
    same(gradient(hvd.alltoall), blocks)
    group = wrap(jax.grad(lambda x: sum(array.sum() for array in hvd.grouped_allreduce([x, 2 * x]))))
    same(group(mine()), 3 * like)


@pytest.mark.ranks(2, 3, 4)
def test_what_is_not_linear_has_no_gradient(wrap: Wrap) -> None:
    def loss(x: Any, stop: Any) -> Any:
        results = [hvd.allreduce(x, op=op) for op in (hvd.Min, hvd.Max, hvd.Product)]
        return x.sum() + sum(stop(array).sum() for array in results), results

    with pytest.raises(ArgumentError, match=rf"on rank {RANK}: .* so use Average or Sum"):
        wrap(jax.grad(lambda x: loss(x, jnp.asarray)[0]))(mine())
    # Results other than the loss do not need a gradient.
    gradient, _ = wrap(jax.grad(lambda x: loss(x, jax.lax.stop_gradient), has_aux=True))(mine())
    same(gradient, jnp.ones((2 * SIZE, 3)))


def test_second_derivative(wrap: Wrap) -> None:
    def loss(x: Any) -> Any:
        return (hvd.allreduce(x, op=hvd.Sum) ** 2).sum()

    result = wrap(jax.grad(lambda x: jax.grad(loss)(x).sum()))(mine())
    same(result, 2.0 * SIZE**2 * np.ones((2 * SIZE, 3)))
    result = wrap(jax.grad(lambda x: jax.grad(lambda x: (hvd.allgather(x) ** 2).sum())(x).sum()))(mine())
    same(result, 2.0 / SIZE * np.ones((2 * SIZE, 3)))


def test_loops_branches_and_order() -> None:
    """Independent calls in one program run in the written order on all ranks."""

    def body(carry: Any, _: Any) -> tuple[Any, Any]:
        there = jax.lax.cond(carry.sum() > 0, hvd.allreduce, lambda x: x, carry)
        return there + 1.0, hvd.allgather(carry[:1])

    last, seen = jax.jit(lambda x: jax.lax.scan(body, x, None, length=3))(jnp.full((2,), RANK + 1.0))
    same(last, np.full(2, (SIZE + 1) / 2 + 3))
    assert seen.shape == (3, SIZE)

    @jax.jit
    def many(x: Any) -> Any:
        return [hvd.allreduce(x + number, op=hvd.Sum) for number in range(20)]

    for number, value in enumerate(many(jnp.zeros(1000))):
        same(value, np.full(1000, SIZE * number))


def test_a_result_that_nobody_uses_is_still_exchanged() -> None:
    jax.jit(lambda x: (hvd.allreduce(x, name="unused"), x)[1])(mine())
    same(hvd.allreduce(mine(), name="used"), sum(everyone()) / SIZE)


def test_uneven_rows_outside_of_jit() -> None:
    x = jnp.full((RANK + 1, 2), float(RANK))
    gathered = hvd.allgather(x)
    same(gathered, np.repeat(np.arange(SIZE), np.arange(SIZE) + 1)[:, None] * np.ones(2))
    same(jax.grad(lambda x: (hvd.allgather(x) * (RANK + 1)).sum())(x), np.full((RANK + 1, 2), (SIZE + 1) / 2))
    rows, received = hvd.alltoall(jnp.arange(SIZE * (SIZE + 1) // 2 + 1.0), splits=range(1, SIZE + 1))
    assert received.tolist() == [RANK + 1] * SIZE
    assert rows.shape == (SIZE * (RANK + 1),)
    sent = jnp.arange(SIZE * (SIZE + 1) // 2 + 1.0)  # one row is not sent, so it has no gradient
    result = jax.grad(lambda x: (hvd.alltoall(x, splits=range(1, SIZE + 1))[0] * 2).sum())(sent)
    same(result, [2.0] * (len(sent) - 1) + [0.0])
    assert hvd.reducescatter(jnp.ones((SIZE + 1, 2)), op=hvd.Sum).shape == (1 + (RANK == 0), 2)


@pytest.mark.ranks(2, 3, 4)
def test_errors_are_seen_on_all_ranks_and_work_goes_on() -> None:
    with pytest.raises(MismatchError, match="shapes"):
        hvd.allreduce(jnp.ones(2 + (RANK == 0)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="MismatchError: Mismatched shapes"):
        jax.block_until_ready(jax.jit(hvd.allreduce)(jnp.ones(2 + (RANK == 0))))
    same(jax.jit(hvd.allreduce)(mine()), sum(everyone()) / SIZE)
    with pytest.raises(jax.errors.JaxRuntimeError, match="same size on all ranks"):
        jax.block_until_ready(jax.jit(hvd.allgather)(jnp.ones((2 + (RANK == 0), 2))))
    same(jax.jit(hvd.allgather)(mine()), np.concatenate(everyone()))
    with pytest.raises(ArgumentError, match="outside of jit"):
        jax.jit(lambda x: hvd.alltoall(x, splits=[1] * SIZE))(mine())
    with pytest.raises(ArgumentError, match="one dimension"):
        hvd.allgather(jnp.float32(1))


def test_an_unknown_kind_of_collective_is_an_internal_error() -> None:
    with pytest.raises(AssertionError, match="does not support the collective BARRIER"):
        operations._shapes(Call(Collective.BARRIER), [jnp.zeros(3)])


@pytest.mark.ranks(3, 4)
def test_process_sets() -> None:
    some = hvd.add_process_set([0, SIZE - 1])
    try:
        if RANK in (0, SIZE - 1):
            expected = (everyone()[0] + everyone()[-1]) / 2
            same(hvd.allreduce(mine(), process_set=some), expected)
            same(jax.jit(lambda x: hvd.allreduce(x, process_set=some))(mine()), expected)
            place = 0 if RANK == 0 else 1
            result = jax.jit(lambda x: hvd.reducescatter(x, process_set=some))(jnp.ones((4, 1)) * place)
            same(result, np.full((2, 1), 0.5))
    finally:
        hvd.barrier()
        hvd.remove_process_set(some)


def test_memory_is_shared_where_it_can_be() -> None:
    x = mine()
    from ringdance.jax.memory import array_of, from_array

    view = array_of(x)
    assert view.flags.writeable
    assert view.__array_interface__["data"][0] == x.unsafe_buffer_pointer()
    result = hvd.allreduce(x)
    assert np.asarray(result).ctypes.data % 64 == 0
    back = from_array(view, x)
    assert back.unsafe_buffer_pointer() == x.unsafe_buffer_pointer() or x.unsafe_buffer_pointer() % 64
    assert array_of(jnp.ones(3, jnp.bfloat16)).dtype == jnp.bfloat16


def test_64_bits_of_numpy_stay_whole() -> None:
    """64-bit counters, seeds and sums of losses are not truncated to 32 bits, although JAX would do so."""
    large, third = np.array([2**40 + RANK]), np.float64(RANK + 1 / 3)
    tree = {"step": large, "seed": np.array(2**63 + RANK, np.uint64), "loss": np.full((2, 2), third).T}
    result = hvd.broadcast_parameters(tree, root_rank=SIZE - 1)
    assert result["step"].tolist() == [2**40 + SIZE - 1]
    assert int(result["seed"]) == 2**63 + SIZE - 1
    assert result["loss"].tolist() == [[SIZE - 1 + 1 / 3] * 2] * 2
    assert {array.dtype.name for array in result.values()} == {"int64", "uint64", "float64"}
    total = hvd.allreduce(large, op=hvd.Sum)
    assert total.tolist() == [SIZE * 2**40 + SIZE * (SIZE - 1) // 2]
    total += 1
    assert large.tolist() == [2**40 + RANK]  # results own their memory
    assert hvd.allreduce(third, op=hvd.Max).item() == SIZE - 1 + 1 / 3
    assert hvd.allgather(large).tolist() == [2**40 + rank for rank in range(SIZE)]
    assert hvd.alltoall(np.repeat(large, SIZE)).tolist() == [2**40 + rank for rank in range(SIZE)]
    both = hvd.grouped_allreduce([third, jnp.float32(third)], compression=hvd.Compression.fp16)
    assert [array.dtype.name for array in both] == ["float32", "float32"]
    assert isinstance(hvd.allreduce(np.float32(third)), jax.Array)
    jax.config.update("jax_enable_x64", True)
    try:
        assert isinstance(hvd.allreduce(large), jax.Array)
        assert hvd.allreduce(large).dtype == "int64"
    finally:
        jax.config.update("jax_enable_x64", False)


def test_broadcast_of_a_pytree() -> None:
    def tree(rank: int) -> Any:
        others = [f"rank {rank}", np.ones(2) * rank]
        return {"a": mine(rank), "key": jax.random.key(rank), "n": rank, "none": None, "s": others}

    result, expected = hvd.broadcast_parameters(tree(RANK), root_rank=SIZE - 1), tree(SIZE - 1)
    same(result["a"], expected["a"])
    assert jnp.array_equal(jax.random.key_data(result["key"]), jax.random.key_data(expected["key"]))
    assert (result["n"], result["none"], result["s"][0]) == (SIZE - 1, None, f"rank {SIZE - 1}")
    assert result["s"][1].tolist() == [SIZE - 1] * 2
    assert hvd.broadcast_object({"rank": RANK}) == {"rank": 0}
    assert hvd.allgather_object(RANK) == list(range(SIZE))


def test_complex_numbers(wrap: Wrap) -> None:
    def near(found: Any, expected: Any) -> None:
        assert found.dtype == np.complex64
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5)

    every = [array + 1j * array[::-1] for array in everyone()]
    x, total, own = jnp.asarray(every[RANK], jnp.complex64), sum(every), slice(2 * RANK, 2 * RANK + 2)
    near(wrap(hvd.allreduce)(x), total / SIZE)
    near(wrap(lambda x: hvd.grouped_allreduce([x, jnp.ones(2)], op=hvd.Sum)[0])(x), total)
    near(wrap(hvd.allgather)(x), np.concatenate(every))
    near(wrap(lambda x: hvd.broadcast(x, 0))(x), every[0])
    near(wrap(hvd.alltoall)(x), np.concatenate([array[own] for array in every]))
    near(wrap(lambda x: hvd.reducescatter(x, op=hvd.Sum))(x), total[own])
    for op in (hvd.Product, hvd.Adasum) if SIZE > 1 else ():
        with pytest.raises((ArgumentError, jax.errors.JaxRuntimeError, ValueError), match="not by"):
            jax.block_until_ready(wrap(lambda x, op=op: hvd.allreduce(x, op=op))(x))
    loss = lambda x: (jnp.abs(hvd.allreduce(x, op=hvd.Sum)) ** 2).sum()  # noqa: E731
    near(wrap(jax.grad(loss))(x), 2 * SIZE * np.conj(total))


def test_complex_numbers_of_64_bits_each_and_training() -> None:
    inputs = np.array([1 + 1e-12j]) * (RANK + 1)
    result = hvd.allreduce(inputs, op=hvd.Sum)
    assert result.dtype == np.complex128
    assert result == np.array([1 + 1e-12j]) * sum(range(1, SIZE + 1))
    transformation = hvd.distributed(optax.sgd(1.0), compression=hvd.Compression.bf16)
    weight = jnp.ones(3, jnp.complex64)
    state = transformation.init(weight)
    updates, _ = transformation.update(weight * (RANK + 0.001j), state, weight)
    np.testing.assert_allclose(updates, -np.full(3, (SIZE - 1) / 2 + 0.001j), rtol=1e-6)
    with other_settings({"RINGDANCE_CHECK_WEIGHTS": "error"}):
        transformation = hvd.distributed(optax.sgd(1.0))
        weight = weight + 1j * RANK  # only the imaginary parts differ
        state = transformation.init(weight)

        def train() -> None:
            for _ in range(12):
                transformation.update(weight, state, weight)

        with pytest.raises(MismatchError, match="models differ") if SIZE > 1 else nullcontext():
            train()
